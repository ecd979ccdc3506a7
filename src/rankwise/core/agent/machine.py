"""The agent machine: the life of one node, from joining a run to its verdict.

Theory of operation
===================

An agent is a rendezvous and, one after the other, a gang for each round that this node is a member
of. It carries words between the two, and takes the few decisions that are neither's. A node that is
the only one has `Alone` for a rendezvous, which answers the same words by itself. Facts about
workers come through the exit watch (`core/watch`), which holds back what may be another rank's
doing; it is made with the first fact that it may hold.

```
            PrepareRound   NodeReady     Settled            Finish
 AgentStarted ──→ PREPARING ──→ WAITING ──→ RUNNING ──────────→ ENDED ──→ LEAVING ──→ FINISHED
                    ↑                      gang lives           │  ↑ verdict, refusal,
                    └──────── another round is gathered ────────┘    or no answer in time
```

A gang that has paused (`rankwise.recover`) goes the same way, but lives on: in the next round it is
resumed. If there is none, it is ended first (DISMISSING). Ranks that wait in a pause are bound to
no round, and do nothing until a round of which this node is a member calls them: to the other nodes
they are as good as dead, also while this one is cut off or a spare.

- *A gang has one life*: the rendezvous counts the restarts of the job. Its attempt number is
  the round's, so that late facts about an earlier round's workers touch nothing.
- *A failure travels at once*, as soon as the gang stops its siblings for it; what is found out
  about it afterwards (`DescribeFailures`) follows when the gang has ended.
- *A round that is over* recalls the ranks that can be called again, where restarts are left, and
  ends the others with SIGTERM and their grace. It ends all with SIGKILL if others may soon have
  this node's ranks, or if there is nothing left to come back to.
- *An exception that a rank holds back*, since it may come of a death, is held among several nodes
  until a node that was lost would be missed: for a lease, and the time of a request.
- *Done* means that this node's workers have all succeeded. It waits until all others are done too,
  since their failure would call it back; it does not wait for anything after the verdict.
- *Asked to stop*, the agent says so at once, asks the others to agree (or leaves alone, if so
  configured), stops its gang when they have, and waits for the verdict for as long as the others
  may receive it, and no longer than its gang's grace. If none answers within a lease, or the store
  is silent for half of it, it chooses for its ranks where they stop: what is left of the lease is
  for them to save. Asked a second time it kills, and leaves.
- *Who dies*: a worker: the gang. The agent: its guardian kills the workers, its lease ends. The
  store, or the way to it: the rendezvous says when the gang must go.
"""

from typing import TYPE_CHECKING

import msgspec

from rankwise.base.errors import LocalProtocolError
from rankwise.base.failure import (
    ExitStatus,
    Failure,
    FailureCause,
    Outcome,
    OutcomeStatus,
    failure_in_words,
)
from rankwise.base.machine import Ticked
from rankwise.base.root_cause import may_be_consequence
from rankwise.base.units import Duration, Instant, after, between, format_duration, postponed
from rankwise.core.agent.alone import Alone
from rankwise.core.agent.state import AgentPhase
from rankwise.core.agent.vocabulary import (
    AgentSpec,
    AgentStarted,
    AnnounceRound,
    AnnounceRoundEnd,
    AnnounceStop,
    AskRanksToStop,
    BeginAttempt,
    DescribeFailures,
    Effect,
    FailuresDescribed,
    FinishRun,
    LeaveRequested,
    NodeStimulus,
    PreparationFailed,
    PrepareRound,
    RanksStood,
    RoundPrepared,
    StepReported,
    Stimulus,
    StopRanksAt,
)
from rankwise.core.gang import vocabulary as gang_words
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.state import GangPhase
from rankwise.core.rendezvous import vocabulary as rendezvous_words
from rankwise.core.rendezvous.records import Departure, Trouble, Verdict
from rankwise.core.rendezvous.vocabulary import (
    Answer,
    CallRecordsReported,
    Closed,
    DepartureRequested,
    Dissolved,
    GangEnded,
    GangFailing,
    InquiryAnswered,
    Joined,
    LeaveSettled,
    Left,
    NodeReady,
    RanksArrived,
    RanksFound,
    RefusalKind,
    Refused,
    Settled,
    SheetsGathered,
    StopAgreed,
    StopStepAgreed,
    TroubleReported,
    World,
)
from rankwise.core.watch import vocabulary as watch_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.core.rendezvous.machine import Rendezvous
    from rankwise.core.watch.machine import ExitWatch

SIGTERM = 15
SIGKILL = 9
_NOT_FAILING = (GangPhase.IDLE, GangPhase.STARTING, GangPhase.RUNNING, GangPhase.DUMPING)
"""Nothing has failed, or who is to blame is not told while ranks show where they stand."""


class Agent:
    """One node of a run. See the module's text for its life."""

    def __init__(self, spec: AgentSpec) -> None:
        self.spec = spec
        self.phase = AgentPhase.IDLE
        self.rendezvous: Rendezvous | Alone = _rendezvous_of(spec)
        self.gang: Gang | None = None
        self.make_gang: Callable[[gang_words.GangSpec, int], Gang] = Gang
        """Makes the gang of each round; others than `Gang` show that checkers can fail."""
        self.watch: ExitWatch | None = None
        """None until the first fact that it may hold back."""
        self.world: World | None = None
        self.finished: FinishRun | None = None
        self._effects: list[Effect] = []
        self._untold: list[watch_words.WatchStimulus] = []
        """The next fact for the watch, which may be busy with the one before."""
        self._deadline: Instant | None = None
        self._next_round = 0
        self._last_round = -1
        self._begun_at = Instant(0)
        self._stopped_at: Instant | None = None
        self._step: int | None = None
        self._is_failing_reported = False
        self._is_end_reported = False
        self._is_stop_agreed = False
        """Whether the whole job stops with this round."""
        self._chooses_step = False
        """Whether the ranks of this node stop in this round without the others."""
        self._stops_asked = 0
        self._loss = ""
        """Why this node can have no workers any more; empty while it can."""
        self._is_going = False
        """Whether this node was asked to stop or to leave."""
        self._gone_by = Instant(0)
        """When it has gone then: a grace later, whatever the others do."""
        self._kept = 0
        """How many workers of the last gang wait for the next round."""
        self._outcome: Outcome | None = None
        self._verdict: Verdict | None = None
        self._refusal: Refused | None = None
        self._detail = ""
        self._stop_signal: int | None = None

    @property
    def next_deadline(self) -> Instant | None:
        """When `tick` wants to be called next; None while only stimuli can change anything."""
        if self.phase is AgentPhase.FINISHED:
            return None  # the watch may still ask about a hang that the ranks' ends have settled
        # Spelled out without a list: it is evaluated after every message, and an agent gets
        # thousands.
        earliest = self._deadline_of_rendezvous
        own = self._deadline
        if own is not None and (earliest is None or own < earliest):
            earliest = own
        gangs = None if self.gang is None else self.gang.next_deadline
        if gangs is not None and (earliest is None or gangs < earliest):
            earliest = gangs
        watchs = None if self.watch is None else self.watch.next_deadline
        if watchs is not None and (earliest is None or watchs < earliest):
            earliest = watchs
        return earliest

    @property
    def _deadline_of_rendezvous(self) -> Instant | None:
        """None while this node leaves without having said so, and after: no round may begin."""
        is_gone = self.phase in (AgentPhase.DISMISSING, AgentPhase.FINISHED)
        return None if is_gone else self.rendezvous.next_deadline

    @property
    def has_workers(self) -> bool:
        """Whether a worker of this node may live."""
        return self.phase is AgentPhase.RUNNING

    def handle(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        """Take in a fact; return what is to be done, in this order."""
        if self.phase is AgentPhase.FINISHED:
            return []
        if isinstance(stimulus, Answer):  # first, since they are the most by far
            self._tell_rendezvous(stimulus, now)
        else:
            self._on_stimulus(stimulus, now)
        effects, self._effects = self._effects, []
        return effects

    def _on_stimulus(self, stimulus: NodeStimulus, now: Instant) -> None:
        match stimulus:
            case AgentStarted():
                self._on_started(stimulus, now)
            case Ticked():
                self._on_deadline(now)
            case gang_words.StopRequested():
                # First: exits that the watch holds back are let go before their gang is to stop.
                if self.watch is not None:
                    self._tell_watch(stimulus, now)
                self._on_stop_requested(stimulus, now)
            case LeaveRequested():
                self._on_leave_requested(now)
            case RoundPrepared():
                self._on_prepared(stimulus, now)
            case PreparationFailed():
                self._on_preparation_failed(stimulus, now)
            case FailuresDescribed():
                self._on_described(stimulus, now)
            case StepReported():
                # Ranks of an earlier round may still write: their step is no progress of this one.
                if self.world is not None and stimulus.round == self.world.round:
                    self._step = stimulus.step
            case RanksStood():
                self._on_ranks_stood(stimulus, now)
            case (
                gang_words.WorkerSpawned()
                | gang_words.WorkerRefused()
                | gang_words.WorkerReported()
                | gang_words.WorkerExited()
                | gang_words.RecoveryMessageSent()
                | gang_words.Swept()
                | gang_words.ProgressLooked()
                | gang_words.DumpsLooked()
                | gang_words.StacksDumped()
                | gang_words.RanksBlamed()
                | gang_words.GuardianLost()
            ):
                self._on_worker_fact(stimulus, now)
            case (
                watch_words.CallsBegan()
                | watch_words.EndLooked()
                | watch_words.RanksAnswered()
                | watch_words.CallsJudged()
                | watch_words.PastLooked()
                | watch_words.AwaitedFound()
            ):
                self._tell_watch(stimulus, now)
            case gang_words.Suspended():
                self._on_suspended(stimulus, now)
            case TroubleReported():
                # Trouble of a gang that has ended needs no inquiry any more.
                if self.has_workers and self.world is not None:
                    self._tell_rendezvous(stimulus, now)
            case CallRecordsReported():
                self._tell_rendezvous(stimulus, now)

    def tick(self, now: Instant) -> list[Effect]:
        """Let deadlines that have passed take effect. Calling it too early changes nothing."""
        deadline = self.next_deadline
        if deadline is None or now < deadline:
            return []
        return self.handle(Ticked(), now)

    def _on_deadline(self, now: Instant) -> None:
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._on_own_deadline(now)
        watch = self.watch
        if watch is not None and watch.next_deadline is not None and now >= watch.next_deadline:
            self._tell_watch(Ticked(), now)
        gang = self.gang
        if gang is not None and gang.next_deadline is not None and now >= gang.next_deadline:
            self._tell_gang(Ticked(), now)
        at = self._deadline_of_rendezvous
        if at is not None and now >= at:
            self._tell_rendezvous(rendezvous_words.DeadlinePassed(), now)

    def _on_own_deadline(self, now: Instant) -> None:
        match self.phase:
            case AgentPhase.PREPARING:
                patience = format_duration(self.spec.prepare_timeout)
                why = f"this node was not fit for a round within {patience}"
                self._refuse(why, "find the check that does not end", now)
            case AgentPhase.DESCRIBING:
                self._gang_has_ended(now)
            case AgentPhase.RUNNING if self._others_may_agree(now):
                pass
            case AgentPhase.RUNNING:
                self._stop_without_others(now)
            case AgentPhase.ENDED if self._may_still_learn(now):
                pass
            case AgentPhase.WAITING | AgentPhase.ENDED:
                self._detail = self._detail or "no verdict of the whole job came in time"
                self._leave(now)
            case AgentPhase.IDLE | AgentPhase.DISMISSING | AgentPhase.LEAVING | AgentPhase.FINISHED:
                pass

    # The beginning, and getting ready for a round

    def _on_started(self, stimulus: AgentStarted, now: Instant) -> None:
        if self.phase is not AgentPhase.IDLE:
            raise LocalProtocolError("the agent was started twice; an agent lives once")
        assert stimulus.spec == self.spec, "an agent is started with the spec that it was made with"
        self._tell_rendezvous(Joined(), now)
        self._prepare(0, now)

    def _prepare(self, round_number: int, now: Instant) -> None:
        if self.phase in (AgentPhase.DISMISSING, AgentPhase.LEAVING, AgentPhase.FINISHED):
            return
        if self._loss:
            self._refuse_without_guardian(now)
            return
        self.phase = AgentPhase.PREPARING
        self.world = None
        # Facts about an earlier preparation may still come: they are told apart by this number.
        self._next_round = round_number
        self._deadline = after(now, self.spec.prepare_timeout)
        self._effects.append(PrepareRound(round_number))

    def _on_prepared(self, stimulus: RoundPrepared, now: Instant) -> None:
        if self.phase is not AgentPhase.PREPARING or stimulus.round != self._next_round:
            return
        self.phase = AgentPhase.WAITING
        self._deadline = None
        self._tell_rendezvous(NodeReady(stimulus.round, stimulus.port), now)

    def _on_preparation_failed(self, stimulus: PreparationFailed, now: Instant) -> None:
        if self.phase is AgentPhase.PREPARING and stimulus.round == self._next_round:
            self._refuse(stimulus.reason, stimulus.hint, now)

    def _on_suspended(self, stimulus: gang_words.Suspended, now: Instant) -> None:
        """Let no deadline of this node count that time; what other nodes think of it is theirs."""
        self._deadline = postponed(self._deadline, stimulus.duration)
        self._gone_by = after(self._gone_by, stimulus.duration)
        if isinstance(self.rendezvous, Alone):
            # Only of a node that is alone: to other nodes a suspended one looks lost, and its
            # lease ends.
            self.rendezvous.on_suspended(stimulus.duration)
        if self.watch is not None:
            self._tell_watch(stimulus, now)
        if self.gang is not None:
            self._tell_gang(stimulus, now)

    def _on_guardian_lost(self, stimulus: gang_words.GuardianLost, now: Instant) -> None:
        """No worker can be made on this node any more; those that there were have died."""
        # Kept, since the rendezvous may ask for a round much later.
        self._loss = stimulus.reason
        if self.gang is not None:
            self._tell_gang(stimulus, now)
        if self.phase in (AgentPhase.PREPARING, AgentPhase.WAITING):
            self._refuse_without_guardian(now)

    def _refuse_without_guardian(self, now: Instant) -> None:
        hint = "it was killed, or the machine was out of memory; start this node again"
        self._refuse(f"this node can start no more ranks: {self._loss}", hint, now)

    def _refuse(self, why: str, hint: str, now: Instant) -> None:
        """This node itself finds that it cannot go on."""
        self._refusal = Refused(RefusalKind.UNFIT, why, hint)
        self._leave(now)

    # The rendezvous

    def _tell_rendezvous(self, stimulus: rendezvous_words.Stimulus, now: Instant) -> None:
        for effect in self.rendezvous.handle(stimulus, now):
            match effect:
                case Settled():
                    self._on_settled(effect, now)
                case Dissolved():
                    self._on_dissolved(effect, now)
                case StopAgreed():
                    self._on_stop_agreed(effect, now)
                case StopStepAgreed():
                    # It may be agreed upon when the ranks of this node have ended.
                    if self.has_workers:
                        self._effects.append(StopRanksAt(effect.round, effect.step))
                case Closed():
                    self._verdict = effect.verdict
                    self._end_all(now)
                case Refused():
                    self._refusal = effect
                    self._end_all(now)
                case SheetsGathered():
                    self._judge(effect, now)
                case RanksFound():
                    self._on_ranks_found(effect, now)
                case LeaveSettled():
                    self._finish(now)
                case InquiryAnswered():
                    self._effects.append(effect)
                    if self.watch is not None:
                        self._tell_watch(watch_words.NodesAnswered(), now)
                case _:  # an order for the store, or a line for the user
                    self._effects.append(effect)

    def _judge(self, gathered: SheetsGathered, now: Instant) -> None:
        """Tell who is to blame that ranks of the job wait, as far as nodes have told."""
        from rankwise.core.agent.judging import judged  # noqa: PLC0415  # rare: only where ranks wait

        size = None if self.world is None else self.world.size
        self._tell_rendezvous(judged(gathered, size, self.spec.offer.node_id, now), now)

    def _on_ranks_found(self, found: RanksFound, now: Instant) -> None:
        """Ranks keep others waiting, and some of them may be of this node."""
        world = self.world
        if world is None or world.round != found.round:
            return
        own = tuple(
            rank - world.first_rank
            for rank in found.ranks
            if 0 <= rank - world.first_rank < world.slots
        )
        if own:
            blamed = gang_words.RanksBlamed(
                own, found.round, found.text, found.ranks, found.mismatch
            )
            self._on_ranks_blamed(blamed, now)

    def _on_ranks_blamed(self, blamed: gang_words.RanksBlamed, now: Instant) -> None:
        """Ranks of this node keep others waiting: they have failed, though all may have ended."""
        world = self.world
        if world is None or world.round != blamed.attempt:
            return
        if self.phase is AgentPhase.RUNNING:
            self._tell_gang(blamed, now)
        elif (
            self.phase is AgentPhase.ENDED and self._outcome is not None and not self.spec.is_alone
        ):
            self._fail_after_all(blamed, now)

    def _fail_after_all(self, blamed: gang_words.RanksBlamed, now: Instant) -> None:
        """All workers have ended well, but ranks of other nodes wait for some of them."""
        outcome, world = self._outcome, self.world
        assert outcome is not None, "called once it is known"
        assert world is not None, "a gang lives in a world"
        # A failure or a stop of its own explains the wait of the others already.
        if outcome.status is not OutcomeStatus.SUCCEEDED:
            return
        failures = self._own(
            tuple(
                Failure(
                    local_rank=local_rank,
                    attempt=world.round,
                    cause=FailureCause.OUT_OF_STEP,
                    at=now,
                    exit=ExitStatus(code=0),
                    detail=blamed.reason,
                    accused=blamed.accused,
                    mismatch=blamed.mismatch,
                )
                for local_rank in blamed.local_ranks
            )
        )
        self._outcome = msgspec.structs.replace(
            outcome, status=OutcomeStatus.FAILED, failures=failures
        )
        # The others get it once it is described: this node has ended, so they would not wait.
        self.phase = AgentPhase.DESCRIBING
        self._deadline = after(now, self.spec.describe_timeout)
        self._effects.append(DescribeFailures(world.round, failures))

    def _on_settled(self, settled: Settled, now: Instant) -> None:
        if self.phase is AgentPhase.DISMISSING:
            return  # it was chosen too late; the others see it go
        assert self.phase is AgentPhase.WAITING, f"a round began while {self.phase}"
        self.phase = AgentPhase.RUNNING
        self.world = settled.world
        self._begun_at = now
        self._stopped_at = None
        self._step = None
        self._is_failing_reported = self._is_stop_agreed = self._chooses_step = False
        self._outcome = None
        # Asked to stop before this round began: its ranks stop in it as soon as the others agree.
        self._deadline = self._agreed_by if self._is_going else None
        self._last_round = settled.world.round
        self._is_end_reported = False
        self._effects.append(BeginAttempt(settled.world))
        if not self.spec.is_alone:
            self._effects.append(AnnounceRound(settled.world, self._waiting_ranks))
        if self.gang is not None:
            # Its gang has paused: the ranks that wait in it are called again.
            self._tell_gang(gang_words.Resumed(settled.world.round, self._may_recover), now)
            return
        self.gang = self.make_gang(self._gang_spec, settled.world.round)
        self.gang.recovers = self._may_recover
        self._tell_gang(gang_words.Started(), now)

    @property
    def _may_recover(self) -> bool:
        """Whether workers are kept for another round, should this one fail."""
        policy = self.spec.rendezvous.policy
        assert self.world is not None, "asked when a round begins"
        return self.world.restarts < policy.restarts_max

    @property
    def _waiting_ranks(self) -> int:
        """How many ranks of this node wait to be called again."""
        return 0 if self.gang is None else sum(each.is_running for each in self.gang.workers)

    @property
    def _gang_spec(self) -> gang_words.GangSpec:
        spec, meeting = self.spec.gang, self.spec.rendezvous
        if self.spec.is_alone:
            return spec
        # The death that explains an exception may be of another node, which is missed when its
        # lease ends, and known here a request later.
        known = Duration(meeting.lease_ttl + meeting.request_timeout)
        return msgspec.structs.replace(spec, exception_timeout=max(spec.exception_timeout, known))

    def _on_dissolved(self, dissolved: Dissolved, now: Instant) -> None:
        self._announce_end(dissolved.round, dissolved.why)
        if self.phase is AgentPhase.RUNNING:
            gang = self.gang
            if not dissolved.at_once and gang is not None and gang.phase is GangPhase.DUMPING:
                self._stopped_at = self._stopped_at or now
                return  # its workers show where they stand, and are told to stop then
            if dissolved.at_once or self._is_going or not self._may_recover:
                # At once if others may soon have this node's ranks: two of one rank would corrupt
                # data.
                self._stop_gang(SIGTERM, now, at_once=dissolved.at_once)
                return
            self._stopped_at = self._stopped_at or now
            self._tell_gang(gang_words.RecallRequested(), now)
        elif self.phase is AgentPhase.ENDED:
            self._get_ready_again(now)

    def _on_stop_agreed(self, agreed: StopAgreed, now: Instant) -> None:
        if self.phase is not AgentPhase.RUNNING:
            return
        self._is_stop_agreed = True
        self._deadline = self._last_moment if self._is_going else None
        self._announce_end(agreed.round, agreed.why)
        # Before the signal: `should_stop` of all ranks must name one step, or collectives hang.
        self._effects.append(AskRanksToStop(agreed.round, agreed.signal))
        self._stop_gang(agreed.signal, now)

    def _end_all(self, now: Instant) -> None:
        """There is nothing to come back to: end the gang if there is one, then leave."""
        if self.phase is AgentPhase.RUNNING:
            self._stop_gang(SIGTERM, now, at_once=True)
        elif self.phase is not AgentPhase.DESCRIBING:
            self._leave(now)

    def _announce_end(self, number: int, why: str) -> None:
        """Tell people once why a round is over; the next one's beginning tells what was judged."""
        if not self.spec.is_alone and not self._is_end_reported:
            self._is_end_reported = True
            self._effects.append(AnnounceRoundEnd(number, why))

    # The watch

    def _on_worker_fact(self, fact: gang_words.Stimulus, now: Instant) -> None:
        """Take in a fact about workers, now or when it is known whose doing it is."""
        if self.watch is None and not self._may_be_held(fact):
            self._pass_on(fact, now)
        else:
            self._tell_watch(fact, now)

    def _may_be_held(self, fact: gang_words.Stimulus) -> bool:
        spec = self.spec.watch
        if isinstance(fact, gang_words.WorkerExited):
            return fact.exit.may_be_by(spec.stop_signals)  # of the whole run
        return spec.asks_about_hangs and isinstance(fact, gang_words.ProgressLooked)

    def _tell_watch(self, stimulus: watch_words.WatchStimulus, now: Instant) -> None:
        watch = self.watch = self.watch or self._new_watch(now)
        self._untold.append(stimulus)
        if len(self._untold) > 1:
            return  # the loop below is at work, and comes to it
        while self._untold:
            watch.gang = self.gang
            for effect in watch.handle(self._untold[0], now):
                self._on_watch_effect(effect, now)
            del self._untold[0]
            watch.gang = self.gang
            # Facts that were let go follow one by one: the gang may have ended with the last one.
            if not self._untold and watch.awaits_gang:
                self._untold.append(watch_words.Passed())

    def _new_watch(self, now: Instant) -> "ExitWatch":
        from rankwise.core.watch.machine import ExitWatch  # noqa: PLC0415  # few runs need one

        spec = self.spec
        watch = ExitWatch(spec.watch, grace=spec.gang.grace, hang_timeout=spec.gang.hang_timeout)
        if self._stops_asked:
            # The watch is made late, and must know that exits may be the stop's doing.
            watch.handle(gang_words.StopRequested(), now)
        return watch

    def _on_watch_effect(self, effect: watch_words.WatchEffect, now: Instant) -> None:
        match effect:
            case watch_words.PassOn():
                self._pass_on(effect.fact, now)
            case watch_words.AskNodes():
                self._ask_nodes(effect.trouble, now)
            case _:
                self._effects.append(effect)

    def _pass_on(self, fact: gang_words.Stimulus, now: Instant) -> None:
        match fact:
            case gang_words.RanksBlamed():
                self._on_ranks_blamed(fact, now)
            case gang_words.GuardianLost():
                self._on_guardian_lost(fact, now)
            case _:
                self._tell_gang(fact, now)

    def _ask_nodes(self, trouble: Trouble, now: Instant) -> None:
        world = self.world
        if self.has_workers and world is not None and len(world.members) > 1:
            self._tell_rendezvous(TroubleReported(world.round, trouble), now)
        else:
            self._tell_watch(watch_words.NodesAnswered(), now)

    # The gang

    def _tell_gang(self, stimulus: gang_words.Stimulus, now: Instant) -> None:
        gang = self.gang
        if gang is None:
            return
        for effect in gang.handle(stimulus, now):
            match effect:
                case gang_words.Finish():
                    self._on_gang_finished(effect.outcome, now)
                case gang_words.Pause():
                    self._kept = len(effect.kept)
                    self._on_gang_over(effect.outcome, now)
                case _:
                    self._effects.append(effect)
        # Else it has finished meanwhile, and its outcome tells more.
        if self.gang is gang:
            self._tell_of_failing(gang, now)
        watch = self.watch
        if watch is not None and watch.hold is not None and not self._untold:
            watch.gang = self.gang
            if watch.awaits_gang:  # it holds an exit back until the gang is stopped
                self._tell_watch(watch_words.Passed(), now)

    def _tell_of_failing(self, gang: Gang, now: Instant) -> None:
        """Let the others know of a failure while this node's own workers are still ending."""
        if self.spec.is_alone or self._is_failing_reported:
            return
        if self.phase is not AgentPhase.RUNNING or self.world is None:
            return
        if gang.phase in _NOT_FAILING:
            return
        failures = self._own(gang.failures_so_far)
        if failures:
            # Once a round: what is found out later follows with the description of the failures.
            self._is_failing_reported = True
            first = failures[0]
            why = failure_in_words(first, self.spec.offer.host)
            # The other nodes may name the cause, or the end of a lease does, when this is told.
            if len(self.world.members) > 1 and may_be_consequence(first):
                why += " (perhaps a consequence: its peer was gone)"
            self._announce_end(self.world.round, why)
            self._tell_rendezvous(GangFailing(self.world.round, failures), now)

    def _own(self, failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
        """Those that failed by themselves, with the ranks that they had in the job."""
        assert self.world is not None, "workers fail in a world"
        first_rank = self.world.first_rank
        return tuple(
            msgspec.structs.replace(failure, rank=first_rank + failure.local_rank)
            for failure in failures
            if failure.cause is not FailureCause.STOPPED and not self._was_called_off(failure)
        )

    def _was_called_off(self, failure: Failure) -> bool:
        """Whether a worker did not start because the gang was told to stop before."""
        stopped_at = self._stopped_at
        never_started = failure.cause is FailureCause.NOT_STARTED
        return never_started and stopped_at is not None and failure.at >= stopped_at

    def _stop_gang(self, signal: int | None, now: Instant, *, at_once: bool = False) -> None:
        gang = self.gang
        assert gang is not None, "a running agent has a gang"
        if self._stopped_at is None:
            self._stopped_at = now
        was_stopping = gang.phase is GangPhase.STOPPING
        self._tell_gang(gang_words.StopRequested(SIGKILL if at_once else signal), now)
        # One that is stopping already, because a worker failed, takes the first request calmly.
        if at_once and was_stopping and gang.phase is GangPhase.STOPPING:
            self._tell_gang(gang_words.StopRequested(SIGKILL), now)

    def _on_gang_finished(self, outcome: Outcome, now: Instant) -> None:
        self.gang = None
        match self.phase:
            case AgentPhase.RUNNING:
                self._kept = 0
                self._on_gang_over(outcome, now)
            case AgentPhase.DISMISSING:
                self.phase = AgentPhase.ENDED
                self._leave(now)
            case _:
                pass  # it had paused: what it came to is known, and the next round has a new gang

    def _on_gang_over(self, outcome: Outcome, now: Instant) -> None:
        """The round has ended for this node, with the gang or with a pause of it."""
        assert self.world is not None, "a gang lives in a world"
        failures = self._own(outcome.failures)
        own = {failure.local_rank for failure in failures}
        # The other nodes need only what failed by itself; this node's report has all.
        others = tuple(each for each in outcome.failures if each.local_rank not in own)
        self._outcome = msgspec.structs.replace(outcome, failures=(*failures, *others))
        if failures:
            self.phase = AgentPhase.DESCRIBING
            self._deadline = after(now, self.spec.describe_timeout)
            self._effects.append(DescribeFailures(self.world.round, failures))
        else:
            self._gang_has_ended(now)

    def _on_described(self, stimulus: FailuresDescribed, now: Instant) -> None:
        if self.phase is not AgentPhase.DESCRIBING or self.world is None:
            return
        if stimulus.round != self.world.round:
            return
        assert self._outcome is not None, "only a finished gang's failures are described"
        rest = self._outcome.failures[len(stimulus.failures) :]
        self._outcome = msgspec.structs.replace(self._outcome, failures=(*stimulus.failures, *rest))
        self._gang_has_ended(now)

    def _gang_has_ended(self, now: Instant) -> None:
        outcome, world = self._outcome, self.world
        assert outcome is not None, "a gang that has ended has an outcome"
        assert world is not None, "and had a world"
        self.phase = AgentPhase.ENDED
        self._deadline = None
        is_done = outcome.status is OutcomeStatus.SUCCEEDED
        ended = GangEnded(
            round=world.round,
            is_done=is_done,
            failures=self._own(outcome.failures),
            ran=between(self._begun_at, now),
            step=self._step,
            was_stopped=outcome.status is OutcomeStatus.STOPPED,
            obstacle=outcome.detail,
            kept=self._kept,
        )
        self._tell_rendezvous(ended, now)
        if self.phase is not AgentPhase.ENDED:
            return  # it has learned meanwhile that all is over, or that it is wanted again
        is_asked_twice = self._stops_asked > 1
        if self._verdict is not None or self._refusal is not None or is_asked_twice:
            self._leave(now)
        elif outcome.survivors:
            pids = ", ".join(map(str, outcome.survivors))
            why = f"SIGKILL does not end processes of this node (pids {pids})"
            self._refuse(why, "they are stuck in the kernel; look at the machine's disks", now)
        elif self.rendezvous.is_dissolved or not (is_done or self._is_stop_agreed):
            self._get_ready_again(now)
        elif self._is_stop_agreed or self._is_going:
            self._await_verdict(now)

    def _get_ready_again(self, now: Instant) -> None:
        if not self._is_going:
            assert self.world is not None, "again means that there was a round"
            self._prepare(self.world.round + 1, now)
        elif self.spec.leaves_alone or self._stops_asked > 1 or self.rendezvous.is_cut_off:
            self._leave(now)
        elif self._deadline is None:
            self._await_verdict(now)

    # Going

    def _on_stop_requested(self, stimulus: gang_words.StopRequested, now: Instant) -> None:
        self._stops_asked += 1
        if self._stops_asked > 1:
            self._go_at_once(now)
            return
        alone = self.spec.leaves_alone
        self._go(Departure.LEAVES if alone else Departure.PREEMPTED, stimulus.signal, now)

    def _on_leave_requested(self, now: Instant) -> None:
        if not self._is_going:
            self._go(Departure.LEAVES, None, now)

    def _go(self, departure: Departure, signal: int | None, now: Instant) -> None:
        self._is_going = True
        self._gone_by = after(now, self.spec.gang.grace)
        self._stop_signal = signal
        self._detail = "this node was told to stop" if signal is None else ""
        if signal is not None:
            self._detail = f"this node was told to stop by signal {signal}"
        self._effects.append(AnnounceStop(signal, self._what_follows_a_stop(departure)))
        match self.phase:
            case AgentPhase.RUNNING:
                self._deadline = max(now, self._agreed_by)
            case AgentPhase.DESCRIBING:
                pass
            case AgentPhase.ENDED | AgentPhase.PREPARING | AgentPhase.WAITING:
                if not self._waits_for_others(departure):
                    self._leave(now)
                    return
                self.phase = AgentPhase.ENDED
                self._await_verdict(now)
            case AgentPhase.IDLE | AgentPhase.DISMISSING | AgentPhase.LEAVING | AgentPhase.FINISHED:
                return
        self._tell_rendezvous(DepartureRequested(departure, signal), now)

    def _waits_for_others(self, departure: Departure) -> bool:
        """Whether a node without workers that goes stops the job, and waits until it has."""
        meeting = self.rendezvous
        can_tell = meeting.is_awaited and not meeting.is_cut_off
        return can_tell and departure is Departure.PREEMPTED

    def _what_follows_a_stop(self, departure: Departure) -> str:
        patience = format_duration(self.spec.gang.grace)
        if self.rendezvous.is_cut_off:  # and has no ranks any more, or they are being killed
            return "this node leaves"
        if self.phase in (AgentPhase.RUNNING, AgentPhase.DESCRIBING):
            who = "the ranks of this node" if departure is Departure.LEAVES else "all ranks"
            return f"stopping {who} for up to {patience}; a second signal kills them now"
        if self.phase in (
            AgentPhase.IDLE,
            AgentPhase.DISMISSING,
            AgentPhase.LEAVING,
        ) or not self._waits_for_others(departure):
            return "this node leaves"
        others = f"stopping the ranks of the other nodes for up to {patience}"
        return f"{others}; a second signal leaves now"

    @property
    def _agreed_by(self) -> Instant:
        """When the others have agreed to stop, before this node stops its ranks itself.

        Ranks that are to save need some of the lease. The silence of a store shows half-way.
        """
        lease, grace = self.spec.rendezvous.lease_ttl, self.spec.gang.grace
        latest = Instant(self._gone_by - grace + min(lease, grace // 2))
        alive_until = self.rendezvous.alive_until
        return latest if alive_until is None else min(latest, Instant(alive_until - lease // 2))

    def _others_may_agree(self, now: Instant) -> bool:
        """Whether this node goes on waiting for them: its lease has been renewed meanwhile."""
        if now >= self._agreed_by:
            return False
        self._deadline = self._agreed_by
        return True

    @property
    def _last_moment(self) -> Instant:
        """When a leaving node stops to wait for others; they were told a little later."""
        return after(self._gone_by, self.spec.rendezvous.request_timeout)

    def _stop_without_others(self, now: Instant) -> None:
        """The nodes have not agreed to stop, or ranks of this one have used up the time for it."""
        is_late = now >= self._last_moment
        self._deadline = None if is_late else self._last_moment
        if not is_late:
            assert self.world is not None, "a running agent has a world"
            self._chooses_step = True
            why = "this node was told to stop, and the others have not answered in time"
            self._announce_end(self.world.round, why)
            self._effects.append(AskRanksToStop(self.world.round, self._stop_signal))
        self._stop_gang(None, now, at_once=is_late)

    def _on_ranks_stood(self, stimulus: RanksStood, now: Instant) -> None:
        if self.world is None or stimulus.round != self.world.round:
            return
        if self._chooses_step:
            self._effects.append(StopRanksAt(stimulus.round, stimulus.step))
        self._tell_rendezvous(RanksArrived(stimulus.round, stimulus.step), now)

    def _may_still_learn(self, now: Instant) -> bool:
        """Whether the verdict may still come to a node that goes; if so, look again later."""
        if not self._is_going or now >= self._last_moment or self.rendezvous.is_cut_off:
            return False
        self._await_verdict(now)
        return True

    def _go_at_once(self, now: Instant) -> None:
        if self.phase in (AgentPhase.RUNNING, AgentPhase.DISMISSING):
            self._stop_gang(SIGKILL, now, at_once=True)
        elif self.phase not in (AgentPhase.DESCRIBING, AgentPhase.LEAVING):
            self._leave(now)

    def _await_verdict(self, now: Instant) -> None:
        """Wait while the others stop, which takes them a grace at most, and for the verdict.

        A leaving node waits no longer than its lease lives: after that, other nodes ignore it.
        """
        if self._is_going:
            alive_until = self.rendezvous.alive_until
            last = max(self._last_moment, after(now, self.spec.rendezvous.request_timeout))
            self._deadline = last if alive_until is None else max(now, min(last, alive_until))
            return
        gang = self.spec.gang
        patience = gang.grace + gang.sweep_timeout + self.spec.rendezvous.close_timeout
        self._deadline = after(now, Duration(patience))

    def _leave(self, now: Instant) -> None:
        if self.phase in (AgentPhase.DISMISSING, AgentPhase.LEAVING, AgentPhase.FINISHED):
            return
        assert not self.has_workers, "a node does not leave while a worker lives"
        if self.gang is not None:
            self.phase = AgentPhase.DISMISSING
            self._deadline = None
            self._tell_gang(gang_words.StopRequested(SIGTERM), now)
            return
        self.phase = AgentPhase.LEAVING
        self._deadline = None
        self._tell_rendezvous(Left(), now)

    def _finish(self, now: Instant) -> None:
        self.phase = AgentPhase.FINISHED
        self._deadline = None
        knows = self._verdict is not None or self._refusal is not None
        self.finished = FinishRun(
            verdict=self._verdict,
            outcome=self._outcome,
            last_round=self._last_round,
            at=now,
            refusal=None if self._verdict is not None else self._refusal,
            detail="" if knows else self._detail,
            stop_signal=None if knows else self._stop_signal,
        )
        self._effects.append(self.finished)


def _rendezvous_of(spec: AgentSpec) -> "Rendezvous | Alone":
    if spec.is_alone:
        return Alone(spec.rendezvous, spec.offer)
    from rankwise.core.rendezvous.machine import Rendezvous  # noqa: PLC0415  # only for several

    return Rendezvous(spec.run_id, spec.rendezvous, spec.offer)
