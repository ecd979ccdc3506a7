"""Whatever comes, the exit watch passes facts on in their order, and each by its deadline."""

from gangs import exited, reported, running_gang, spawned
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant, after
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import RanksBlamed, Stimulus, StopRequested, Swept, WorkerExited
from rankwise.core.watch.machine import HOLD_MAX, ExitWatch
from rankwise.core.watch.vocabulary import (
    CallsBegan,
    CallsJudged,
    EndLooked,
    NodesAnswered,
    Passed,
    PassOn,
    PastLooked,
    RanksAnswered,
    WatchEffect,
    WatchSpec,
    WatchStimulus,
)

SIZE, GRACE = 4, Duration(5 * SECOND)
RANKS = st.integers(0, SIZE - 1)
CODES = st.sampled_from((0, 1, -6, -9, -15, 143))
BLAMED = st.sampled_from((None, RanksBlamed((2,), 0, "has not come", (2,))))
FACTS: st.SearchStrategy[Stimulus] = st.one_of(
    st.builds(exited, RANKS, CODES),
    st.builds(reported, RANKS, st.sampled_from(("no", "Connection closed by peer", "timed out"))),
    st.builds(spawned, RANKS),
    st.just(Swept(0)),
)
ANSWERS: st.SearchStrategy[WatchStimulus] = st.one_of(
    st.builds(
        EndLooked,
        attempt=st.just(0),
        local_rank=RANKS,
        is_over_limit=st.booleans(),
        may_come=st.booleans(),
        is_ending=st.booleans(),
        blamed=BLAMED,
        is_undecided=st.booleans(),
    ),
    st.builds(RanksAnswered, st.just(0), st.booleans()),
    st.builds(CallsJudged, st.just(0), RANKS, BLAMED, st.booleans()),
    st.builds(PastLooked, st.just(0), BLAMED, st.booleans()),
    st.just(NodesAnswered()),
    st.just(CallsBegan(1)),
    st.just(StopRequested(15)),
    st.just(StopRequested(None)),
)
"""The other nodes never agree to the stop without a signal: the gang does not hear of it."""
STEPS = st.tuples(st.integers(0, 2000), st.one_of(FACTS, ANSWERS))


class Agent:
    """Tells a gang what the watch passes on, as an agent does."""

    def __init__(self) -> None:
        spec = WatchSpec(stop_signals=(15,))
        self.watch = ExitWatch(spec, grace=GRACE, hang_timeout=None)
        self.gang = self.watch.gang = running_gang(SIZE)
        self.watch.handle(CallsBegan(0), Instant(0))
        self.heard: list[tuple[Stimulus, Instant]] = []
        self.passed: list[Stimulus] = []
        self.stopped_at: Instant | None = None

    def tell(self, stimulus: WatchStimulus, now: Instant) -> None:
        self.let_time_pass(now)
        if isinstance(stimulus, StopRequested):
            self.stopped_at = now
        if isinstance(stimulus, FACT_TYPES):
            self.heard.append((stimulus, now))
        self.carry_out(self.watch.handle(stimulus, now), now)
        if isinstance(stimulus, StopRequested) and stimulus.signal is not None:
            self.gang.handle(stimulus, now)
            self.go_on(now)

    def let_time_pass(self, now: Instant) -> None:
        while (due := self.watch.next_deadline) is not None and due <= now:
            self.carry_out(self.watch.tick(due), due)
            self.check_deadlines(due)
        self.check_deadlines(now)

    def carry_out(self, effects: list[WatchEffect], now: Instant) -> None:
        for effect in effects:
            if isinstance(effect, PassOn):
                if not isinstance(effect.fact, RanksBlamed):
                    self.passed.append(effect.fact)
                self.gang.handle(effect.fact, now)
        self.go_on(now)

    def go_on(self, now: Instant) -> None:
        if self.watch.awaits_gang:
            self.carry_out(self.watch.handle(Passed(), now), now)

    def check_deadlines(self, now: Instant) -> None:
        for fact, received_at in self.heard[len(self.passed) :]:
            latest = after(received_at, HOLD_MAX)
            if self.stopped_at is not None:
                latest = max(latest, after(self.stopped_at, GRACE))
            assert now <= latest, f"{fact} of {received_at} is still held back at {now}"


FACT_TYPES = (WorkerExited, type(reported(0)), type(spawned(0)), Swept)


def without_instant(fact: Stimulus) -> object:
    """An exit that belongs to a stop is passed on with another instant."""
    if isinstance(fact, WorkerExited):
        return fact.local_rank, fact.exit
    return fact


@given(st.lists(STEPS, max_size=12))
def test_facts_are_passed_on_once_in_their_order_and_by_their_deadline(
    steps: list[tuple[int, WatchStimulus]],
) -> None:
    agent, now = Agent(), Instant(0)

    for pause_ms, stimulus in steps:
        now = after(now, Duration(pause_ms * MILLISECOND))
        agent.tell(stimulus, now)
    agent.let_time_pass(after(now, Duration(HOLD_MAX + GRACE)))

    assert list(map(without_instant, agent.passed)) == [
        without_instant(fact) for fact, _ in agent.heard
    ]
    assert agent.watch.next_deadline is None


def test_gang_here_acts_on_what_is_passed_on() -> None:
    agent = Agent()

    agent.tell(exited(0, 1), Instant(0))
    agent.tell(EndLooked(0, 0), Instant(0))

    assert agent.gang.phase is GangPhase.STOPPING
