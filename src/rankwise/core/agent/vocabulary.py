"""The facts that an agent is told (stimuli), and its orders (effects).

An agent composes a rendezvous, an exit watch and, for each round, a gang, so most of its words are
theirs: facts about workers and orders for them are those of `core/gang/vocabulary.py`, with the
round's number as `attempt`; answers of the store and orders for it are those of
`core/rendezvous/vocabulary.py`; what the host is asked about calls is in
`core/watch/vocabulary.py`. The words here are what is left between the agent and its driver.

`StopRequested` and `Ticked` are the gang's words with the agent's meaning: the end of this node is
requested, a second time at once; the agent's deadline has come.
"""

import msgspec

from rankwise.base.failure import NO_RANK, Failure, FailureCause, Outcome, OutcomeStatus
from rankwise.base.machine import Ticked
from rankwise.base.root_cause import may_follow_from_loss
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.gang import vocabulary as gang
from rankwise.core.rendezvous import vocabulary as rendezvous
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig
from rankwise.core.rendezvous.records import Verdict
from rankwise.core.rendezvous.vocabulary import Answer, Order, World
from rankwise.core.watch.vocabulary import (
    UNWATCHED,
    HostAnswer,
    LookOrder,
    NoteHold,
    WatchSpec,
)

AGENT = "agent"
"""The machine's name in journals, in a simulation followed by the node's id."""
LOSSES_OF_STORE = (rendezvous.RefusalKind.STORE, rendezvous.RefusalKind.FORGOTTEN)
"""Of a node that has taken part: the store has gone, or can no longer be used."""


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The properties of an agent.

    Attributes:
        run_id: names the run; all that the nodes share lies under it.
        rendezvous: which nodes may join, how long one waits, and which failures the job survives.
        offer: what this node brings along.
        gang: the workers of this node.
        watch: what may hold facts about them back.
        is_alone: whether this node is the only one, so that there is no rendezvous and no store.
        leaves_alone: whether a request to stop this node (SIGTERM) concerns it alone, so that the
            others go on without it; otherwise the whole job stops at one step.
        prepare_timeout: how long making this node fit for a round may take.
        describe_timeout: how long finding out more about failures may take.
    """

    run_id: str
    rendezvous: RendezvousConfig
    offer: NodeOffer
    gang: gang.GangSpec
    watch: WatchSpec = UNWATCHED
    is_alone: bool = False
    leaves_alone: bool = False
    prepare_timeout: Duration = Duration(120 * SECOND)
    describe_timeout: Duration = Duration(5 * SECOND)

    def __post_init__(self) -> None:
        if self.gang.size != self.offer.slots:
            raise ValueError(
                f"the gang has {self.gang.size} workers and the offer says {self.offer.slots} slots"
            )
        if not self.run_id or not self.run_id.isprintable() or "/" in self.run_id:
            raise ValueError(f"run_id is {self.run_id!r}, expected printable characters and no '/'")


class AgentStarted(msgspec.Struct, frozen=True, tag=True):
    """The agent starts, with the spec that it was made with."""

    spec: AgentSpec


class RoundPrepared(msgspec.Struct, frozen=True, tag=True):
    """The answer to `PrepareRound`: this node can take part in it.

    `port` is what its worker 0 would listen on, bound or reserved by the driver.
    """

    round: int
    port: int


class PreparationFailed(msgspec.Struct, frozen=True, tag=True):
    """The other answer to `PrepareRound`: a check of this node failed."""

    round: int
    reason: str
    hint: str = ""


class FailuresDescribed(msgspec.Struct, frozen=True, tag=True):
    """The answer to `DescribeFailures`: the same failures in the same order, with their world."""

    round: int
    failures: tuple[Failure, ...]


class StepReported(msgspec.Struct, frozen=True, tag="StepTold"):
    """The last step of the workers of that round, sent only on request.

    The driver tells the last one before the last `WorkerExited` of a round.
    """

    round: int
    step: int


class RanksStood(msgspec.Struct, frozen=True, tag=True):
    """The ranks of this node wait at their next step to learn at which step to stop.

    `step` is the first one that none of them had begun.
    """

    round: int
    step: int


class LeaveRequested(msgspec.Struct, frozen=True, tag=True):
    """This node must leave the job; the others continue without it (scale down)."""


NodeStimulus = (
    AgentStarted
    | gang.StopRequested
    | Ticked
    | gang.WorkerSpawned
    | gang.WorkerRefused
    | gang.WorkerReported
    | gang.WorkerExited
    | gang.RecoveryMessageSent
    | gang.Swept
    | gang.ProgressLooked
    | gang.DumpsLooked
    | gang.RanksBlamed
    | gang.StacksDumped
    | gang.Suspended
    | gang.GuardianLost
    | RoundPrepared
    | PreparationFailed
    | FailuresDescribed
    | StepReported
    | RanksStood
    | LeaveRequested
    | rendezvous.TroubleReported
    | rendezvous.CallRecordsReported
    | HostAnswer
)
"""All facts that do not come from the store."""
Stimulus = NodeStimulus | Answer


class PrepareRound(msgspec.Struct, frozen=True, tag=True):
    """Make this node fit for a round: check it, reserve a port. `RoundPrepared` or its opposite."""

    round: int


class BeginAttempt(msgspec.Struct, frozen=True, tag=True):
    """The world of the next workers. Comes before their `SpawnWorker`s."""

    world: World


class AskRanksToStop(msgspec.Struct, frozen=True, tag=True):
    """Let `should_stop` hold the ranks; answer `RanksStood`, if any of them counts its steps."""

    round: int
    signal: int | None


class StopRanksAt(msgspec.Struct, frozen=True, tag=True):
    """Let the ranks continue to that step and stop there."""

    round: int
    step: int


class DescribeFailures(msgspec.Struct, frozen=True, tag=True):
    """Add facts of the system to these failures; answer `FailuresDescribed`."""

    round: int
    failures: tuple[Failure, ...]


class AnnounceRestart(msgspec.Struct, frozen=True, tag=True):
    """Tell the user that a gang failed and that another one is started after `pause`."""

    attempt: int
    """The gang that failed."""
    restarts_left: int
    pause: Duration
    failures: tuple[Failure, ...]
    """Root cause first."""
    kept: int = 0
    """How many of its workers live on, and are called again."""


class AnnounceRoundEnd(msgspec.Struct, frozen=True, tag=True):
    """Announce that the round is over for this node, and why; its gang is being ended."""

    round: int
    why: str


class AnnounceRound(msgspec.Struct, frozen=True, tag=True):
    """Announce that a round begins, with its members."""

    world: World
    kept: int = 0
    """How many ranks of this node live on, and are called again."""


class AnnounceStop(msgspec.Struct, frozen=True, tag=True):
    """Announce that this node must leave, and the consequence."""

    signal: int | None
    what_follows: str


class FinishRun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The agent ends: no order follows.

    Attributes:
        verdict: what became of the job, the same on every node; None if this node never learned.
        outcome: what became of this node's last gang; None if it never had one. Its `detail` says
            why this node could have no other one.
        last_round: the last round that this node was a member of; -1 if there was none.
        at: when it was over.
        refusal: why this node may not take part; None if it may, or if the job was over first.
        detail: one sentence more: why there is no verdict.
        stop_signal: what this node was told to go by, if there is no verdict.
    """

    verdict: Verdict | None = None
    outcome: Outcome | None = None
    last_round: int = -1
    at: Instant = Instant(0)
    refusal: rendezvous.Refused | None = None
    detail: str = ""
    stop_signal: int | None = None

    @property
    def has_taken_part(self) -> bool:
        """True if this node was ever a member of a round."""
        return self.last_round >= 0

    def as_outcome(self, size: int | None = None) -> Outcome:
        """The outcome of a run on this node: the job's verdict, with this node's own failures.

        The root cause of the job comes first on every node, wherever it happened.

        Args:
            size: how many workers the job had on all nodes; None where this node is the only one.
        """
        own = self.outcome.failures if self.outcome is not None else ()
        survivors = self.outcome.survivors if self.outcome is not None else ()
        verdict = self.verdict
        if verdict is None:
            refusal = self.refusal
            detail = self.detail
            if refusal is not None:
                detail = f"{refusal.why} ({refusal.hint})" if refusal.hint else refusal.why
            # A node stopped before its first round has no gang outcome.
            stop_signal = self.stop_signal
            was_stopped = stop_signal is not None
            # Of a run that refuses this node, the agent has ended the gang unasked.
            is_gang_stopped = (
                self.outcome is not None and self.outcome.status is OutcomeStatus.STOPPED
            )
            if refusal is None and self.outcome is not None and is_gang_stopped:
                was_stopped, stop_signal = True, stop_signal or self.outcome.stop_signal
            failures = () if is_gang_stopped else own
            is_explained = self._has_lost_store and all(map(may_follow_from_loss, failures[:1]))
            if is_explained and not was_stopped:
                failures, detail = (self._loss_of_store(detail), *failures), ""
            return Outcome(
                status=OutcomeStatus.STOPPED if was_stopped else OutcomeStatus.FAILED,
                attempts=self.last_round + 1,
                failures=failures,
                stop_signal=stop_signal if was_stopped else None,
                survivors=survivors,
                detail=detail,
                size=size,
            )
        root = verdict.root
        failures = () if verdict.status is OutcomeStatus.SUCCEEDED else own
        if root is not None:
            failures = (root, *(failure for failure in own if failure.rank != root.rank))
        return Outcome(
            status=verdict.status,
            attempts=verdict.restarts + 1,
            failures=failures,
            stop_signal=verdict.signal,
            survivors=survivors,
            detail=verdict.detail,
            size=size,
            failed=None if size is None else verdict.failure_count,
        )

    @property
    def _has_lost_store(self) -> bool:
        """True if this node took part, and ended since its store was gone."""
        refusal = self.refusal
        return refusal is not None and refusal.kind in LOSSES_OF_STORE and self.has_taken_part

    def _loss_of_store(self, detail: str) -> Failure:
        """The explanation of the failures of this node's ranks then; the instant of the first."""
        own = () if self.outcome is None else self.outcome.failures
        return Failure(
            local_rank=NO_RANK,
            attempt=self.last_round,
            cause=FailureCause.STORE_LOST,
            at=own[0].at if own else self.at,
            detail=detail,
        )


Announcement = (
    rendezvous.AnnounceWaiting
    | rendezvous.MadeSpare
    | AnnounceRound
    | AnnounceRoundEnd
    | AnnounceRestart
    | AnnounceStop
    | gang.AnnounceKill
    | gang.AnnounceStuck
)
GangOrder = (
    gang.SpawnWorker
    | gang.SignalWorker
    | gang.TellWorker
    | gang.LookForProgress
    | gang.LookForDumps
    | gang.DumpStacks
    | gang.Sweep
)
NodeEffect = (
    GangOrder
    | PrepareRound
    | BeginAttempt
    | AskRanksToStop
    | StopRanksAt
    | DescribeFailures
    | rendezvous.CallRecordsWanted
    | rendezvous.InquiryAnswered
    | LookOrder
    | NoteHold
    | Announcement
    | FinishRun
)
"""All orders that do not go to the store."""
Effect = NodeEffect | Order
