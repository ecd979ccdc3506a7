"""What no order of plausible facts may bring a gang to do.

The state machine plays a world that may be slow, unlucky and rude, but not impossible: workers end
after they came up, report before they end, and a sweep tells the truth. In return the gang must
keep its promises whatever comes next.
"""

from gangs import reported, spawned
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rankwise.base.failure import ExitStatus, FailureCause, Outcome, OutcomeStatus
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import (
    DumpsLooked,
    DumpStacks,
    Effect,
    Finish,
    GangSpec,
    GuardianLost,
    LookForDumps,
    LookForProgress,
    ProgressLooked,
    SignalWorker,
    SpawnWorker,
    StacksDumped,
    Started,
    Stimulus,
    StopRequested,
    Sweep,
    Swept,
    WorkerExited,
    WorkerRefused,
)

PATIENCES = st.sampled_from([Duration(0), Duration(1), Duration(SECOND), Duration(30 * SECOND)])
SPECS = st.builds(
    GangSpec,
    size=st.integers(1, 4),
    grace=PATIENCES,
    hang_timeout=st.sampled_from([None, Duration(1), Duration(SECOND)]),
    spawn_timeout=PATIENCES,
    stacks_timeout=PATIENCES,
    sweep_timeout=PATIENCES,
)
ATTEMPT = 1
SELDOM = st.integers(0, 9)
"""What ends a gang in any phase happens when this is 0, so that gangs get far in their lives."""
Worker = tuple[int, int]


class GangInAnyWorld(RuleBasedStateMachine):
    """The world's side, and the gang's promises."""

    def __init__(self) -> None:
        super().__init__()
        self.now = Instant(0)
        self.ordered: list[Worker] = []
        self.unborn: list[Worker] = []
        self.alive: list[Worker] = []
        self.swept: set[int] = set()
        self.to_sweep: list[int] = []
        self.to_look: list[int] = []
        self.to_dump: list[int] = []
        self.to_look_for_dumps: list[int] = []
        self.outcomes: list[Outcome] = []

    @initialize(spec=SPECS)
    def make_gang(self, spec: GangSpec) -> None:
        self.gang = Gang(spec, ATTEMPT)
        self.tell(Started())

    def tell(self, stimulus: Stimulus) -> None:
        was_finished = bool(self.outcomes)
        effects = self.gang.handle(stimulus, self.now)
        assert not (was_finished and effects), "a finished gang is silent"
        self.obey(effects)

    def obey(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SpawnWorker(local_rank, attempt):
                    self.begin((local_rank, attempt))
                case SignalWorker(local_rank, attempt, signal):
                    worker = (local_rank, attempt)
                    assert worker in self.alive, "signals go to workers that have come up"
                    assert signal > 0
                case Sweep(attempt):
                    assert attempt not in self.swept
                    self.to_sweep.append(attempt)
                case LookForProgress(attempt):
                    self.to_look.append(attempt)
                case LookForDumps(attempt):
                    self.to_look_for_dumps.append(attempt)
                case DumpStacks(attempt):
                    self.to_dump.append(attempt)
                case Finish(outcome):
                    self.outcomes.append(outcome)
                case _:
                    pass

    def begin(self, worker: Worker) -> None:
        local_rank, attempt = worker
        assert worker not in self.ordered, "every worker is ordered once"
        assert 0 <= local_rank < self.gang.spec.size
        assert attempt == ATTEMPT
        self.ordered.append(worker)
        self.unborn.append(worker)

    @rule(step=st.sampled_from([0, 1, SECOND // 2, 40 * SECOND]))
    def time_passes(self, step: int) -> None:
        until = Instant(self.now + step)
        for _ in range(100):
            deadline = self.gang.next_deadline
            if deadline is None or deadline > until:
                break
            self.now = max(self.now, deadline)
            self.obey(self.gang.tick(self.now))
            later = self.gang.next_deadline
            assert later is None or later >= self.now, "a deadline lies ahead"
        else:
            raise AssertionError("the gang is woken again and again, and does nothing")
        self.now = until

    @precondition(lambda self: self.unborn)
    @rule(data=st.data(), is_refused=st.booleans())
    def a_worker_comes_up_or_not(self, data: st.DataObject, *, is_refused: bool) -> None:
        worker = data.draw(st.sampled_from(self.unborn))
        self.unborn.remove(worker)
        if is_refused:
            self.tell(WorkerRefused(*worker, "no"))
        else:
            self.alive.append(worker)
            self.tell(spawned(*worker))

    @precondition(lambda self: self.unborn)
    @rule()
    def all_others_come_up(self) -> None:
        for worker in list(self.unborn):
            if worker in self.unborn:
                self.unborn.remove(worker)
                self.alive.append(worker)
                self.tell(spawned(*worker))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_worker_reports(self, data: st.DataObject) -> None:
        local_rank, attempt = data.draw(st.sampled_from(self.alive))
        self.tell(reported(local_rank, raised_at=self.now, attempt=attempt))

    @precondition(lambda self: self.alive)
    @rule(
        data=st.data(), code=st.sampled_from([0, 0, 1, -9, -15]), ago=st.sampled_from([0, 1, 1000])
    )
    def a_worker_ends(self, data: st.DataObject, code: int, ago: int) -> None:
        worker = data.draw(st.sampled_from(self.alive))
        self.alive.remove(worker)
        self.tell(WorkerExited(*worker, ExitStatus(code), Instant(max(0, self.now - ago))))

    @precondition(lambda self: self.to_sweep)
    @rule(survives=st.booleans())
    def the_sweep_ends(self, *, survives: bool) -> None:
        attempt = self.to_sweep.pop()
        left = [worker for worker in self.alive if worker[1] == attempt] if survives else []
        self.unborn = [worker for worker in self.unborn if worker[1] != attempt]
        self.alive = left
        if not left:
            self.swept.add(attempt)
        self.tell(Swept(attempt, tuple(1000 * (a + 1) + rank for rank, a in left)))

    @precondition(lambda self: self.to_look)
    @rule(ago=st.sampled_from([0, 1, SECOND, 10 * SECOND]))
    def progress_is_looked_up(self, ago: int) -> None:
        self.tell(ProgressLooked(self.to_look.pop(), Instant(max(0, self.now - ago))))

    @precondition(lambda self: self.to_look_for_dumps)
    @rule(is_dumping=st.booleans())
    def dumps_are_looked_for(self, *, is_dumping: bool) -> None:
        dumping = tuple(rank for rank, _ in self.alive[:1]) if is_dumping else ()
        self.tell(DumpsLooked(self.to_look_for_dumps.pop(), dumping))

    @precondition(lambda self: self.to_dump)
    @rule()
    def stacks_are_dumped(self) -> None:
        self.tell(StacksDumped(self.to_dump.pop()))

    @rule(signal=st.sampled_from([None, 2, 15]), luck=SELDOM)
    def somebody_asks_for_an_end(self, signal: int | None, luck: int) -> None:
        if luck == 0:
            self.tell(StopRequested(signal))

    @rule(luck=SELDOM)
    def the_guardian_is_lost(self, luck: int) -> None:
        if luck == 0:
            self.alive.clear()
            self.unborn.clear()
            self.tell(GuardianLost("it was killed"))

    @rule(rank=st.integers(0, 3), fact=st.sampled_from(["exit", "swept", "refused", "dumped"]))
    def a_fact_about_an_earlier_attempt_comes_late(self, rank: int, fact: str) -> None:
        attempt = self.gang.attempt - 1
        facts: dict[str, Stimulus] = {
            "exit": WorkerExited(rank, attempt, ExitStatus(1), self.now),
            "swept": Swept(attempt),
            "refused": WorkerRefused(rank, attempt, "late"),
            "dumped": StacksDumped(attempt),
        }
        before = (self.gang.phase, self.gang.next_deadline)
        assert self.gang.handle(facts[fact], self.now) == []
        assert (self.gang.phase, self.gang.next_deadline) == before

    @invariant()
    def the_whole_gang_is_ordered_at_once(self) -> None:
        if self.ordered:
            assert len(self.ordered) == self.gang.spec.size

    @invariant()
    def the_outcome_comes_once_and_with_the_end(self) -> None:
        if self.ordered:
            is_finished = self.gang.phase is GangPhase.FINISHED
            assert len(self.outcomes) == (1 if is_finished else 0)
            assert self.gang.outcome == (self.outcomes[0] if is_finished else None)

    @invariant()
    def the_outcome_explains_itself(self) -> None:
        for outcome in self.outcomes:
            if outcome.status is OutcomeStatus.SUCCEEDED:
                assert outcome.failures == ()
            if outcome.status is OutcomeStatus.FAILED:
                assert outcome.failures[0].cause is not FailureCause.STOPPED

    @invariant()
    def only_a_gang_that_waits_for_facts_alone_has_no_deadline(self) -> None:
        if self.ordered and self.gang.next_deadline is None:
            # A gang that starts may wait for its look alone: the driver always answers.
            waits_for_look = self.gang.phase is GangPhase.STARTING and bool(self.to_look)
            assert waits_for_look or self.gang.phase in (GangPhase.RUNNING, GangPhase.FINISHED)


TestGangInAnyWorld = GangInAnyWorld.TestCase
TestGangInAnyWorld.settings = settings(max_examples=150, stateful_step_count=40)
