"""The exit watch: holds facts about ranks back until it is known whose doing they are.

Theory of operation
===================

All facts that the host tells about a gang pass here before the gang gets them. The first failure
that a gang gets ends it, so what may be another rank's doing waits until that is known; facts that
come later wait behind it, in their order. The watch knows no call records and asks no rank: it
orders looks and questions, and decides by the answers.

```
                                  others may come          have come, or are late
 exit or exception ──→ LOOKING ───────────────────→ STRAGGLING ─────────┐
                          │                                             ↓
                          ├──────────── else ────────────────→ ASKING_RANKS ──→ JUDGING
                          │                                                        │ other nodes
                          ↓ no reason to wait                  known, or never     ↓ may know
                      passed on  ←─────────────────────────────────────────── ASKING_NODES
```

- *An exception that may be another's doing* (`ERROR`) is passed on at once, and what follows waits:
  the first exit would have all others stopped, which could not answer any more.
- *An exit by a limit* (`LIMIT`): the rank waited for another one. As after any time-out, ranks that
  are merely late are to blame.
- *An exit by SIGABRT* (`ABORT`) in a call in which ranks disagree: gloo ends a rank whose data does
  not fit. The call records tell who is to blame once all have come.
- *The last success of a node* (`LATENESS`): the other nodes are asked which rank has made others
  wait.
- *An exit by a signal to the whole run* (`STOP`) may arrive before the signal. If the run is asked
  to stop within `STOP_WINDOW`, the exit belongs to that. The request stops the gang when all nodes
  have agreed; until then the exit waits.
- *A hang* holds no fact back but its own: before ranks count as hung, the host looks for whom they
  wait, and if it cannot tell, the other nodes are asked. Then the host looks once more.
- *A gang that is ended*, by a request to stop or by another node, ends every hold: no answer
  changes its verdict any more, and a gang that stops waits for the exits that are held back.
- *What dies*: a rank, a node or the host that should answer. Each step has a deadline, and each
  fact has one: `HOLD_MAX` after its arrival it is passed on, whatever was answered; a request to
  stop is given the gang's grace.
"""

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from rankwise.base.machine import Ticked
from rankwise.base.root_cause import may_be_of_others, tells_of_time
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant, after, between, postponed
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import (
    LookForProgress,
    ProgressLooked,
    RanksBlamed,
    Stimulus,
    StopRequested,
    Suspended,
    WorkerExited,
    WorkerReported,
    WorkerSpawned,
)
from rankwise.core.rendezvous.records import Trouble
from rankwise.core.watch.state import Hang, HangStep, Hold, WaitingFact
from rankwise.core.watch.vocabulary import (
    AskNodes,
    AskRanks,
    AwaitedFound,
    CallsBegan,
    CallsJudged,
    EndLooked,
    FindAwaited,
    HeldExit,
    HoldReason,
    HoldStep,
    JudgeCalls,
    LookAtEnd,
    LookAtPast,
    NodesAnswered,
    NoteHold,
    Passed,
    PassOn,
    PastLooked,
    RanksAnswered,
    WatchEffect,
    WatchSpec,
    WatchStimulus,
)

if TYPE_CHECKING:
    from rankwise.core.gang.machine import Gang

SIGABRT = 6
LOOK_PATIENCE = Duration(1 * SECOND)
"""How long the host may take to read the call records."""
STRAGGLE, STRAGGLE_MAX = Duration(200 * MILLISECOND), Duration(2 * SECOND)
"""How often ranks are looked at that may yet come to a call, and for how long at most."""
ENDING_MAX = Duration(1 * SECOND)
"""How long a rank that is done by its call record may take to tell how it ends."""
ANSWER_PATIENCE = Duration(500 * MILLISECOND)
"""How long ranks may take to answer: one that holds the interpreter in C never does."""
NODES_PATIENCE = Duration(3 * SECOND)
"""How long the other nodes may take; a rendezvous gives up before (`inquiry.ANSWER_WITHIN`)."""
STOP_WINDOW = Duration(300 * MILLISECOND)
"""How much later than a rank the agent may get a signal to the whole run."""
HOLD_MAX = Duration(10 * SECOND)
"""After that a fact is passed on, whatever is awaited; see the module's text for a stop."""
_NOTED_FROM = Duration(1 * MILLISECOND)
"""Holds are in the journal from that on: a look takes as long."""
_AnswerOfRank = EndLooked | CallsJudged
_WAITS = (
    HoldStep.STRAGGLING,
    HoldStep.ASKING_RANKS,
    HoldStep.ASKING_NODES,
    HoldStep.AWAITING_STOP,
)


class ExitWatch:
    """Stands between the host of one node and its gangs.

    Args:
        spec: what may hold facts back.
        grace: how long a gang that was asked to stop may take.
        hang_timeout: after which ranks without progress count as hung.

    Attributes:
        gang: the present one; the watch reads its phase, and who lives.
    """

    def __init__(self, spec: WatchSpec, *, grace: Duration, hang_timeout: Duration | None) -> None:
        self.gang: Gang | None = None
        self.hold: Hold | None = None
        self._spec = spec
        self._grace = grace
        self._hang_timeout = hang_timeout
        self._facts: deque[WaitingFact] = deque()
        """What the gang has not got yet, in the order of arrival here."""
        self._hang: Hang | None = None
        self._calls_of = -1
        """The last attempt whose ranks make calls; -1 while none has made any."""
        self._has_waited = False
        """Whether ranks were waited for or asked in this attempt."""
        self._has_looked_back = False
        self._is_stop_asked = False
        self._effects: list[WatchEffect] = []

    @property
    def next_deadline(self) -> Instant | None:
        """When `tick` wants to be called next; None while only stimuli can change anything."""
        dues = [each.due for each in (self.hold, self._hang) if each is not None]
        return min(dues, default=None)

    @property
    def awaits_answers(self) -> bool:
        """Whether a hold waits for ranks or nodes, so that answers must stay as they are."""
        hold = self.hold
        return hold is not None and hold.reason not in (HoldReason.LATENESS, HoldReason.STOP)

    @property
    def awaits_gang(self) -> bool:
        """Whether facts follow when the gang has handled the last one."""
        return bool(self._facts) if self.hold is None else not self._gang_lives

    def handle(self, stimulus: WatchStimulus, now: Instant) -> list[WatchEffect]:
        """Take in a fact; return what is to be done, in this order."""
        match stimulus:
            case CallsBegan():
                self._on_calls_began(stimulus)
            case EndLooked():
                self._on_end_looked(stimulus, now)
            case RanksAnswered():
                self._on_ranks_answered(stimulus, now)
            case CallsJudged():
                self._on_calls_judged(stimulus, now)
            case PastLooked():
                self._on_past_looked(stimulus, now)
            case AwaitedFound():
                self._on_awaited_found(stimulus, now)
            case NodesAnswered():
                self._on_nodes_answered(now)
            case Passed():
                self._on_passed(now)
            case StopRequested():
                self._on_stop_requested(now)
            case Suspended():
                self._on_suspended(stimulus.duration)
            case Ticked():
                self._on_deadline(now)
            case _:
                self._on_fact(stimulus, now)
        effects, self._effects = self._effects, []
        return effects

    def tick(self, now: Instant) -> list[WatchEffect]:
        """Let deadlines that have passed take effect. Calling it too early changes nothing."""
        deadline = self.next_deadline
        if deadline is None or now < deadline:
            return []
        return self.handle(Ticked(), now)

    # Facts of the gang

    def _on_fact(self, fact: Stimulus, now: Instant) -> None:
        is_held_for_stop = self.hold is not None and self.hold.reason is HoldReason.STOP
        if isinstance(fact, RanksBlamed) and self.hold is not None and not is_held_for_stop:
            # The first failure that a gang gets is its root cause: blame must come before the exit.
            self._effects.append(PassOn(fact))  # it is what the hold waits for
            return
        self._facts.append(WaitingFact(fact, now))
        if self.hold is None and len(self._facts) == 1:
            self._examine_next(now)

    def _on_passed(self, now: Instant) -> None:
        hold = self.hold
        if hold is None:
            self._examine_next(now)
        elif not self._gang_lives:
            self._let_go(now, is_stop=True)

    def _examine_next(self, now: Instant) -> None:
        """Pass the next fact on, or begin to hold it back."""
        if not self._facts:
            return
        waiting = self._facts[0]
        fact, is_late = waiting.fact, now >= after(waiting.received_at, HOLD_MAX)
        if waiting.is_judged or is_late or self.gang is None:
            self._pass_next()
        elif isinstance(fact, WorkerExited):
            self._examine_exit(fact, now)
        elif isinstance(fact, WorkerReported):
            self._pass_next()
            if self._calls_are_watched and may_be_of_others(fact.error):
                # The exception itself has been passed on: it is no end. Its exit would have the
                # others stopped, which could not answer any more.
                self._begin(HoldReason.ERROR, fact, now)
        elif isinstance(fact, ProgressLooked):
            self._examine_look(fact, now)
        else:
            self._pass_next()

    def _examine_exit(self, exited: WorkerExited, now: Instant) -> None:
        rank = exited.local_rank
        if self._calls_are_watched and not exited.exit.ok:
            # gloo aborts a rank whose data does not fit; any other end in a call follows from a
            # limit.
            by_abort = exited.exit.signal_number == SIGABRT
            self._begin(HoldReason.ABORT if by_abort else HoldReason.LIMIT, exited, now)
        elif self._calls_are_watched and not self._has_looked_back and self._is_last(rank):
            # Once per attempt: by then the ranks' call records are complete, and each look reads
            # all of them.
            self._has_looked_back = True
            self._begin(HoldReason.LATENESS, exited, now)
        else:
            self._pass_unless_stop(now)

    def _pass_unless_stop(self, now: Instant) -> None:
        """Pass on an exit, unless a request to stop may explain it that is about to come."""
        exited = self._facts[0].fact
        assert isinstance(exited, WorkerExited), "only exits are passed on by this"
        # A fact has one budget, however many holds it goes through.
        is_late = now >= after(self._facts[0].received_at, HOLD_MAX)
        if is_late or not (self._gang_lives and exited.exit.may_be_by(self._spec.stop_signals)):
            self._pass_next()
            return
        self.hold = self._new_hold(HoldReason.STOP, exited, now)
        self._await(HoldStep.AWAITING_STOP, STOP_WINDOW, now)
        if self._is_stop_asked:
            self._await_stop(now)

    def _pass_next(self) -> None:
        self._effects.append(PassOn(self._facts.popleft().fact))

    @property
    def _calls_are_watched(self) -> bool:
        """Whether call records can tell, and the gang has no reason to end yet."""
        gang = self.gang
        return self._calls_of >= 0 and gang is not None and gang.phase is GangPhase.RUNNING

    @property
    def _gang_lives(self) -> bool:
        gang = self.gang
        return gang is not None and gang.phase in (GangPhase.STARTING, GangPhase.RUNNING)

    def _is_last(self, local_rank: int) -> bool:
        gang = self.gang
        return gang is not None and gang.is_last(local_rank)

    # A hold

    def _begin(self, reason: HoldReason, fact: WorkerExited | WorkerReported, now: Instant) -> None:
        """Read what the call records show of a rank that has ended, or will."""
        hold = self.hold = self._new_hold(reason, fact, now)
        self._await(HoldStep.LOOKING, LOOK_PATIENCE, now)
        if reason is HoldReason.LATENESS:
            self._effects.append(LookAtPast(fact.attempt))
        else:
            self._look(hold)

    def _look(self, hold: Hold) -> None:
        self._effects.append(LookAtEnd(hold.attempt, hold.local_rank, hold.error is None))

    def _new_hold(
        self, reason: HoldReason, fact: WorkerExited | WorkerReported, now: Instant
    ) -> Hold:
        # The exception of an ERROR hold has left the queue already, so the hold counts from now.
        received_at = self._facts[0].received_at if self._facts else now
        return Hold(
            reason=reason,
            attempt=fact.attempt,
            local_rank=fact.local_rank,
            began_at=now,
            step=HoldStep.LOOKING,
            due=now,
            ends_by=after(received_at, HOLD_MAX),
            error=fact.error if isinstance(fact, WorkerReported) else None,
        )

    def _await(self, step: HoldStep, patience: Duration, now: Instant) -> None:
        hold = self.hold
        assert hold is not None, "a step is one of a hold"
        hold.step, hold.due = step, min(after(now, patience), hold.ends_by)
        if step in _WAITS and (not hold.awaited or hold.awaited[-1] is not step):
            hold.awaited.append(step)

    def _is_at(self, step: HoldStep, answer: _AnswerOfRank) -> bool:
        """Whether an answer is the one that is awaited."""
        hold = self.hold
        return (
            hold is not None
            and hold.step is step
            and (hold.attempt, hold.local_rank) == (answer.attempt, answer.local_rank)
        )

    def _on_end_looked(self, looked: EndLooked, now: Instant) -> None:
        hold = self.hold
        if hold is None:
            return
        if self._is_at(HoldStep.LOOKING, looked):
            self._begin_waiting(hold, looked, now)
        elif self._is_at(HoldStep.LOOKING_AGAIN, looked):
            self._on_looked_again(hold, looked, now)

    def _begin_waiting(self, hold: Hold, looked: EndLooked, now: Instant) -> None:
        if hold.error is not None:
            # A peer that its section's limit has ended is lost since patience is over.
            # After a time-out, ranks that are merely late are to blame; before, they may still
            # come.
            is_over = looked.is_over_limit or tells_of_time(hold.error)
            hold.trouble = Trouble.TIMED_OUT if is_over else Trouble.FAILED
            self._find_blame(hold, now, others_may_come=looked.may_come and not is_over)
        elif looked.is_over_limit:
            hold.reason, hold.trouble = HoldReason.LIMIT, Trouble.TIMED_OUT
            self._find_blame(hold, now, others_may_come=False)
        elif hold.reason is HoldReason.LIMIT or looked.blamed is None:
            self._let_go(now)  # it has ended by itself
        elif not self._has_waited and (looked.is_undecided or looked.may_come):
            self._await_stragglers(hold, now)
        else:
            self._accuse(looked.blamed)
            self._let_go(now)

    def _find_blame(self, hold: Hold, now: Instant, *, others_may_come: bool) -> None:
        """Wait for ranks and ask them once per attempt; after that, judge by what is known."""
        if self._has_waited:
            # The nodes have answered once in this attempt. A second round of questions per failed
            # rank would add seconds for each.
            hold.asks_nodes = False
            self._judge(hold, now)
        elif others_may_come:
            self._await_stragglers(hold, now)
        else:
            self._ask_ranks(hold, now)

    def _await_stragglers(self, hold: Hold, now: Instant) -> None:
        self._has_waited = True
        if hold.straggling_since is None:
            # Counted from the first wait: renewed waits must not add up beyond STRAGGLE_MAX.
            hold.straggling_since = now
        self._await(HoldStep.STRAGGLING, STRAGGLE, now)

    def _on_looked_again(self, hold: Hold, looked: EndLooked, now: Instant) -> None:
        assert hold.straggling_since is not None, "it is looked again at stragglers"
        waited = between(hold.straggling_since, now)
        # Ranks that come to the call decide who is right; one that is ending will tell why.
        is_open = looked.is_undecided and waited < STRAGGLE_MAX
        if is_open or (looked.is_ending and waited < ENDING_MAX):
            self._await_stragglers(hold, now)
        elif hold.reason is HoldReason.ABORT:
            if looked.blamed is not None:
                self._accuse(looked.blamed)
            self._let_go(now)
        else:
            self._ask_ranks(hold, now)

    def _ask_ranks(self, hold: Hold, now: Instant) -> None:
        self._effects.append(AskRanks(hold.attempt))
        self._await(HoldStep.ASKING_RANKS, ANSWER_PATIENCE, now)

    def _on_ranks_answered(self, answered: RanksAnswered, now: Instant) -> None:
        hold = self.hold
        is_awaited = hold is not None and hold.step is HoldStep.ASKING_RANKS
        if hold is None or not is_awaited or hold.attempt != answered.attempt:
            return
        if answered.were_asked:
            self._has_waited = True
        else:
            # No rank was asked, since none records: the note of the hold should not name that
            # step.
            hold.awaited.pop()
        self._judge(hold, now)

    def _judge(self, hold: Hold, now: Instant) -> None:
        self._effects.append(
            JudgeCalls(hold.attempt, hold.local_rank, hold.error is None, hold.trouble)
        )
        self._await(HoldStep.JUDGING, LOOK_PATIENCE, now)

    def _on_calls_judged(self, judged: CallsJudged, now: Instant) -> None:
        hold = self.hold
        if hold is None or not self._is_at(HoldStep.JUDGING, judged):
            return
        if judged.is_open and hold.asks_nodes:
            # Members on other nodes may tell who is right. If these are silent, this judgement
            # stands.
            hold.of_a_part = judged.blamed
            self._ask_nodes(hold.trouble, now)
            return
        if judged.blamed is not None and not judged.is_open:
            self._accuse(judged.blamed)
        self._let_go(now)

    def _on_past_looked(self, looked: PastLooked, now: Instant) -> None:
        hold = self.hold
        is_awaited = hold is not None and hold.reason is HoldReason.LATENESS
        if hold is None or not is_awaited or hold.attempt != looked.attempt:
            return
        if hold.step is not HoldStep.LOOKING:
            return
        if looked.blamed is not None:
            self._accuse(looked.blamed)
        elif looked.asks_who_is_late:
            self._ask_nodes(Trouble.DONE, now)
            return
        self._let_go(now)

    def _ask_nodes(self, trouble: Trouble, now: Instant) -> None:
        # Lateness asks about a run that went well: it must not use up the wait of a later failure.
        self._has_waited |= trouble is not Trouble.DONE
        self._effects.append(AskNodes(trouble))
        self._await(HoldStep.ASKING_NODES, NODES_PATIENCE, now)

    def _on_nodes_answered(self, now: Instant) -> None:
        hold, hang = self.hold, self._hang
        if hang is not None and hang.step is HangStep.ASKING_NODES:
            self._look_for_progress(hang, now)
        if hold is not None and hold.step is HoldStep.ASKING_NODES:
            if hold.of_a_part is not None:
                self._accuse(hold.of_a_part)
            self._let_go(now)

    def _accuse(self, blamed: RanksBlamed) -> None:
        """Tell the gang which ranks are to blame before the facts that follow from it."""
        assert self.hold is not None, "ranks are accused in a hold"
        self.hold.accused = blamed.accused
        self._effects.append(PassOn(blamed))

    def _let_go(self, now: Instant, *, is_stop: bool = False) -> None:
        """End the hold. The gang gets the facts one by one, since one may end it."""
        # Cleared first: passing a fact on may begin the next hold.
        hold, self.hold = self.hold, None
        assert hold is not None, "there is something to let go"
        self._note(hold, now, is_stop=is_stop)
        if hold.error is None:
            self._facts[0].is_judged = True
        if is_stop and hold.reason is HoldReason.STOP:
            self._let_exits_follow_stop(now)
        if hold.accused:
            return  # the gang gets that first
        if hold.error is None and hold.reason is not HoldReason.STOP:
            self._pass_unless_stop(now)
        else:
            self._examine_next(now)

    def _note(self, hold: Hold, now: Instant, *, is_stop: bool) -> None:
        held = between(hold.began_at, now)
        exits = tuple(
            HeldExit(each.fact.local_rank, between(max(each.received_at, hold.began_at), now))
            for each in self._facts
            if isinstance(each.fact, WorkerExited)
        )
        if exits and (held >= _NOTED_FROM or hold.reason is HoldReason.STOP):
            note = NoteHold(
                hold.attempt, hold.local_rank, hold.reason, exits, tuple(hold.awaited),
                hold.accused, is_stop,
            )  # fmt: skip
            self._effects.append(note)

    # A stop

    def _on_stop_requested(self, now: Instant) -> None:
        self._is_stop_asked = True
        if self.hold is not None and self.hold.reason is HoldReason.STOP:
            self._await_stop(now)

    def _await_stop(self, now: Instant) -> None:
        """It stops the gang when all nodes have agreed, and no later than it would be killed."""
        hold = self.hold
        assert hold is not None, "an exit is held back"
        hold.due = hold.ends_by = after(now, self._grace)

    def _let_exits_follow_stop(self, now: Instant) -> None:
        """The stop may have been ordered at this very instant: let exits be later than it."""
        at = after(now, Duration(1))
        # Starts first: a gang that stops waits only for the processes that it knows of. It would
        # sweep a rank, without its grace, if it got its start after the other ranks' ends.
        self._facts = deque(
            sorted(self._facts, key=lambda waiting: not isinstance(waiting.fact, WorkerSpawned))
        )
        for waiting in self._facts:
            waiting.is_judged = True
            if isinstance(waiting.fact, WorkerExited):
                waiting.fact = msgspec.structs.replace(waiting.fact, at=at)

    # A hang

    def _examine_look(self, looked: ProgressLooked, now: Instant) -> None:
        """Before ranks count as hung, find out for whom they wait."""
        hang = self._hang
        if hang is not None and hang.looked.attempt == looked.attempt:
            if hang.step is HangStep.LOOKING_AGAIN:
                self._hang = None
                self._pass_next()
            else:
                self._facts.popleft()  # what it says is being looked into
        elif self._is_too_long_ago(looked, now):
            self._facts.popleft()
            self._hang = Hang(looked, HangStep.FINDING, after(now, LOOK_PATIENCE))
            self._effects.append(FindAwaited(looked.attempt))
        else:
            self._pass_next()

    def _is_too_long_ago(self, looked: ProgressLooked, now: Instant) -> bool:
        hang_timeout = self._hang_timeout if self._spec.asks_about_hangs else None
        return hang_timeout is not None and between(looked.last_progress, now) >= hang_timeout

    def _on_awaited_found(self, found: AwaitedFound, now: Instant) -> None:
        hang = self._hang
        if hang is None or hang.step is not HangStep.FINDING:
            return
        if found.attempt != hang.looked.attempt:
            return
        if not found.awaited:
            self._ask_nodes_about(hang, now)
            return
        self._hang = None
        told = msgspec.structs.replace(hang.looked, awaited=found.awaited, accused=found.accused)
        self._effects.append(PassOn(told))

    def _ask_nodes_about(self, hang: Hang, now: Instant) -> None:
        hang.step, hang.due = HangStep.ASKING_NODES, after(now, NODES_PATIENCE)
        self._effects.append(AskNodes(Trouble.TIMED_OUT))

    def _look_for_progress(self, hang: Hang, now: Instant) -> None:
        hang.step, hang.due = HangStep.LOOKING_AGAIN, after(now, LOOK_PATIENCE)
        self._effects.append(LookForProgress(hang.looked.attempt))

    # Time

    def _on_deadline(self, now: Instant) -> None:
        hold, hang = self.hold, self._hang
        if hang is not None and now >= hang.due:
            self._on_hang_due(hang, now)
        if hold is not None and now >= hold.due:
            if now >= hold.ends_by:
                self._end_hold(hold, now)
            else:
                self._on_hold_due(hold, now)

    def _end_hold(self, hold: Hold, now: Instant) -> None:
        if hold.of_a_part is not None:
            self._accuse(hold.of_a_part)
        self._let_go(now)

    def _on_hold_due(self, hold: Hold, now: Instant) -> None:
        match hold.step:
            case HoldStep.STRAGGLING:
                self._look(hold)
                self._await(HoldStep.LOOKING_AGAIN, LOOK_PATIENCE, now)
            case HoldStep.ASKING_RANKS:
                self._has_waited = True
                self._judge(hold, now)
            case (
                HoldStep.LOOKING
                | HoldStep.LOOKING_AGAIN
                | HoldStep.JUDGING
                | HoldStep.ASKING_NODES
                | HoldStep.AWAITING_STOP
            ):
                self._end_hold(hold, now)

    def _on_hang_due(self, hang: Hang, now: Instant) -> None:
        match hang.step:
            case HangStep.FINDING:
                self._ask_nodes_about(hang, now)
            case HangStep.ASKING_NODES:
                self._look_for_progress(hang, now)
            case HangStep.LOOKING_AGAIN:
                self._hang = None
                self._effects.append(PassOn(hang.looked))

    def _on_suspended(self, duration: Duration) -> None:
        """Let no deadline count the time in which the node was suspended."""
        for waiting in self._facts:
            waiting.received_at = after(waiting.received_at, duration)
        if self.hold is not None:
            self.hold.due = after(self.hold.due, duration)
            self.hold.ends_by = after(self.hold.ends_by, duration)
            since = self.hold.straggling_since
            self.hold.straggling_since = postponed(since, duration)
        if self._hang is not None:
            self._hang.due = after(self._hang.due, duration)

    def _on_calls_began(self, began: CallsBegan) -> None:
        if began.attempt != self._calls_of:
            self._calls_of = began.attempt
            self._has_waited = self._has_looked_back = False
