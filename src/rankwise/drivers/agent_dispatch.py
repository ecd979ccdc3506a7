"""Carries an agent's effects to its node and to the store, and what they answer to the agent.

The real driver and the simulated ones share it, so that all of them run the very same machine.
"""

from collections.abc import Callable
from typing import Protocol

from rankwise.base.failure import Failure
from rankwise.base.units import Instant
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.vocabulary import (
    AGENT,
    AgentStarted,
    Announcement,
    AnnounceRestart,
    AnnounceRound,
    AnnounceRoundEnd,
    AnnounceStop,
    AskRanksToStop,
    BeginAttempt,
    DescribeFailures,
    FinishRun,
    NodeEffect,
    PrepareRound,
    Stimulus,
    StopRanksAt,
)
from rankwise.core.gang.vocabulary import (
    AnnounceKill,
    AnnounceStuck,
    DumpStacks,
    LookForDumps,
    LookForProgress,
    SignalWorker,
    SpawnWorker,
    Sweep,
    TellWorker,
)
from rankwise.core.rendezvous.vocabulary import (
    AnnounceWaiting,
    CallRecordsWanted,
    InquiryAnswered,
    MadeSpare,
    Order,
    World,
)
from rankwise.core.watch.vocabulary import (
    AskRanks,
    FindAwaited,
    JudgeCalls,
    LookAtEnd,
    LookAtPast,
    LookOrder,
    NoteHold,
)
from rankwise.drivers.feed import Feeder
from rankwise.ports.clock import Clock
from rankwise.ports.journal import Journal
from rankwise.ports.processes import ProcessHost


class NodeHost(ProcessHost, Protocol):
    """A process host that also knows its node: the door to one machine of a cluster.

    As with processes, every call is an order and returns at once; answers come as stimuli of
    `rankwise.core.agent.vocabulary`. `attempt` is the number of the round.
    """

    def prepare_round(self, number: int) -> None:
        """Check the node and reserve a port: `RoundPrepared` or `PreparationFailed`."""
        ...

    def begin_attempt(self, world: World) -> None:
        """The workers that are spawned next live in this world."""
        ...

    def ask_ranks_to_stop(self, number: int, signal: int | None) -> None:
        """Hold the ranks for a common stop: `RanksStood`, unless none of them counts its steps."""
        ...

    def stop_ranks_at(self, number: int, step: int) -> None:
        """Let the ranks continue to that step and stop there."""
        ...

    def describe_failures(self, number: int, failures: tuple[Failure, ...]) -> None:
        """Find out what only the world knows about them: `FailuresDescribed`."""
        ...

    def tell_call_records(self, wanted: CallRecordsWanted) -> None:
        """Read the ranks' calls, and ask the ranks themselves if so told: `CallRecordsReported`."""
        ...

    def on_inquiry_answered(self, answered: InquiryAnswered) -> None:
        """The trouble that this node was in has been looked into on all nodes."""
        ...

    def look_at_ranks(self, order: LookOrder) -> None:
        """Find out for the exit watch what ranks have called; each order names its answer.

        None is ordered before the host has told `CallsBegan`, but `FindAwaited`, where the agent's
        `WatchSpec` says that the host answers it.
        """
        ...


def _nobody_listens(announcement: Announcement) -> None:
    del announcement


class AgentDispatch:
    """Runs one agent on one node.

    Args:
        agent: the machine; it has no other feeder.
        host: carries out its orders for the node.
        ask_store: carries out its orders for the store; answers are delivered as stimuli. None
            for an agent that is alone.
        clock: tells when a stimulus arrived.
        journal: remembers every stimulus and effect; None for nowhere.
        name: the agent's in the journal.
        on_announcement: gets the lines for the user; None in a simulation.

    Attributes:
        deliver: tells the agent a fact and carries out its answer.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        host: NodeHost,
        clock: Clock,
        journal: Journal | None,
        name: str = AGENT,
        on_announcement: Callable[[Announcement], None] = _nobody_listens,
        ask_store: Callable[[Order], None] | None = None,
    ) -> None:
        self._agent = agent
        self._host = host
        self._ask_store = ask_store
        self._on_announcement = on_announcement
        self._feeder: Feeder[Stimulus, NodeEffect | Order] = Feeder(
            name, agent, self._carry_out, clock, journal
        )
        self.deliver: Callable[[Stimulus], None] = self._feeder.deliver

    @property
    def finished(self) -> FinishRun | None:
        """What became of the run, once the agent's life is over."""
        return self._agent.finished

    @property
    def next_deadline(self) -> Instant | None:
        """When `wake` wants to be called next."""
        return self._agent.next_deadline

    def start(self) -> None:
        """Begin the agent's life."""
        self.deliver(AgentStarted(self._agent.spec))

    def wake(self) -> None:
        """Let a deadline that has passed take effect; too early, nothing happens."""
        self._feeder.wake()

    def _carry_out(self, effect: NodeEffect | Order) -> None:
        if isinstance(effect, Order):
            assert self._ask_store is not None, f"an agent that is alone has ordered {effect}"
            self._ask_store(effect)
        else:
            self._carry_out_here(effect)

    def _carry_out_here(self, effect: NodeEffect) -> None:
        host = self._host
        match effect:
            case SpawnWorker():
                host.spawn(effect.local_rank, effect.attempt)
            case SignalWorker():
                host.signal(effect.local_rank, effect.attempt, effect.signal)
            case LookForProgress():
                host.look_for_progress(effect.attempt)
            case LookForDumps():
                host.look_for_dumps(effect.attempt)
            case DumpStacks():
                host.dump_stacks(effect.attempt)
            case Sweep():
                host.sweep(effect.attempt, effect.spares)
            case TellWorker():
                host.tell(effect.local_rank, effect.attempt, effect.word)
            case PrepareRound():
                host.prepare_round(effect.round)
            case BeginAttempt():
                host.begin_attempt(effect.world)
            case AskRanksToStop():
                host.ask_ranks_to_stop(effect.round, effect.signal)
            case StopRanksAt():
                host.stop_ranks_at(effect.round, effect.step)
            case DescribeFailures():
                host.describe_failures(effect.round, effect.failures)
            case CallRecordsWanted():
                host.tell_call_records(effect)
            case InquiryAnswered():
                host.on_inquiry_answered(effect)
            case LookAtEnd() | AskRanks() | JudgeCalls() | LookAtPast() | FindAwaited():
                host.look_at_ranks(effect)
            case (
                AnnounceKill()
                | AnnounceStuck()
                | AnnounceRestart()
                | AnnounceRoundEnd()
                | AnnounceWaiting()
            ):
                self._on_announcement(effect)
            case MadeSpare() | AnnounceRound() | AnnounceStop():
                self._on_announcement(effect)
            case NoteHold():
                pass  # for the journal, which has it already
            case FinishRun():
                pass  # `finished` tells; the driver of the agent looks at it after every step
