"""The nodes of a run on simulated ranks, and the virtual time in which they and the ranks live.

Theory of operation
===================

A *node* is an agent machine whose processes are simulated ranks (`SimulatedRanks`). Without faults
of nodes and with a fixed number of them one agent, which is alone, stands for all: nothing could
come of their meeting. Otherwise each node has an agent of its own, and they meet in the store of
`rankwise sim cluster`, behind a network that takes time and loses nothing.

There is one virtual time, that of the ranks' scheduler. Three things wait for it: ranks that sleep
(the scheduler's own agenda), messages between agents and the store, faults and starts of nodes
(the agenda here), and the deadlines of the agents. `run` lets the ranks go on until the next
instant that one of the latter two waits for; whatever adds a nearer one meanwhile, such as the
exception of a rank, which its agent tells the store, brings that instant forward
(`Scheduler.return_by`). So nothing happens late, and ranks never wait for agents at a time when
real ones would not.

What dies with a node
---------------------

Its ranks, at once: their agent is gone and tells nothing of them. If another rank fails of that in
the end, the loss is told here as the root cause. The store notices when the
node's lease ends. Ranks of other nodes that wait for them in `rankwise.collectives` fail before, as
their connections would break; ranks in torch's collectives wait until their agents end the round.

A hang
------

When no rank can go on, ever, the agents' timers are all that is left. A death that has not been
noticed yet, or a node that joins, ends the round within `_patience_of` the agents. If it is not
over by then it has hung. Where ranks can go on, but with a limit to how long without progress, the
gangs look more often than that: `records.look_interval` is theirs, `records.patience` the world's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from rankwise.base.failure import Failure, FailureCause, Outcome, OutcomeStatus
from rankwise.base.root_cause import tells_of_lost_peer
from rankwise.base.units import MILLISECOND, SECOND, ZERO, Duration, Instant, format_duration
from rankwise.core.agent.alone import spec_alone
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.vocabulary import AGENT, AgentSpec, Announcement, FinishRun, Stimulus
from rankwise.core.gang.vocabulary import GangSpec, StopRequested
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig, RestartPolicy
from rankwise.drivers.agent_dispatch import AgentDispatch
from rankwise.drivers.virtual.agenda import Agenda
from rankwise.drivers.virtual.cluster.cluster_plan import Network
from rankwise.drivers.virtual.cluster.simulated_store import SimulatedStore, SimulatedStoreClient
from rankwise.drivers.virtual.random_streams import stream
from rankwise.launch.run.job import Job
from rankwise.ports.journal import Journal
from rankwise.sim.faults.vocabulary import KillNode, LateNode
from rankwise.simranks.run.rank_records import RankRecords
from rankwise.simranks.run.ranks import SimulatedRanks, WorldClock
from rankwise.simranks.world.faults import FaultInjector
from rankwise.simranks.world.ranks import Rank
from rankwise.simranks.world.scheduler import Scheduler
from rankwise.simranks.world.world import SimulatedWorld

_PATIENCE = Duration(60 * SECOND)
"""Of virtual time: how long no rank can go on before it counts as a hang."""
_PEERS_NOTICE = Duration(5 * MILLISECOND)
"""What a process takes to end, so that its connections close: longer than news of its failure."""


class Setting(NamedTuple):
    """Where nodes live: what they share.

    Attributes:
        job: what each node runs.
        world: of the ranks.
        records: what is kept of the ranks.
        clock: of all nodes.
        journal: of all agents.
        describe: adds to a failure on a host what only this run knows of it.
        announce: tells people what the agent of a host announces.
        note_loss: is told of a host that is lost, and in which round.
        note_failures: is told of the ranks of a node that have failed, described.
    """

    job: Job
    world: SimulatedWorld
    records: RankRecords
    clock: WorldClock
    journal: Journal | None
    describe: Callable[[Failure, str], Failure]
    announce: Callable[[str, Announcement], None]
    note_loss: Callable[[int, str], None]
    note_failures: Callable[[tuple[Failure, ...]], None]


class RehearsedNode:
    """A simulated machine: its agents, one after the other.

    Args:
        number: counts the nodes.
        host: the machine's name.
        setting: where it lives.
        spec_of: the spec of its next agent, with this id.
        store: where it meets others; None if it is alone.
        stands_for: how many nodes it is.
    """

    def __init__(
        self,
        number: int,
        host: str,
        setting: Setting,
        spec_of: Callable[[str], AgentSpec],
        store: SimulatedStore | None,
        *,
        represented_count: int = 1,
    ) -> None:
        self.number = number
        self.host = host
        self._setting = setting
        self._spec_of = spec_of
        self._store = store
        self._represented_count = represented_count
        self._client: SimulatedStoreClient | None = None
        self._agent: Agent | None = None
        self._dispatch: AgentDispatch | None = None
        self._ranks: SimulatedRanks | None = None
        self._lives = 0

    @property
    def is_up(self) -> bool:
        """Whether an agent lives here."""
        return self._dispatch is not None and self._dispatch.finished is None

    @property
    def finished(self) -> FinishRun | None:
        """What its last agent told in the end, if it was not killed."""
        return None if self._dispatch is None else self._dispatch.finished

    @property
    def next_deadline(self) -> Instant | None:
        """When `wake` wants to be called next."""
        return self._dispatch.next_deadline if self.is_up and self._dispatch is not None else None

    def start(self) -> None:
        """Start an agent; the first, or another one."""
        # An id of its own for each life: to the other nodes a machine that is back is another
        # node.
        node_id = f"n{self.number}.{self._lives}"
        self._lives += 1
        setting, deliver = self._setting, partial(self._deliver, self._lives)
        self._ranks = SimulatedRanks(
            setting.job,
            node=self.number,
            node_count=self._represented_count,
            world=setting.world,
            records=setting.records,
            clock=setting.clock,
            describe=lambda failure: setting.describe(failure, self.host),
            note_failures=setting.note_failures,
            deliver=deliver,
        )
        self._agent = Agent(self._spec_of(node_id))
        store, client = self._store, SimulatedStoreClient(self.number, deliver)
        self._client = client
        self._dispatch = AgentDispatch(
            self._agent,
            host=self._ranks,
            clock=setting.clock,
            journal=setting.journal,
            name=AGENT if store is None else f"{AGENT} {node_id}",
            on_announcement=partial(setting.announce, self.host),
            ask_store=None if store is None else partial(store.ask, client),
        )
        self._dispatch.start()
        self._hasten()

    def kill(self) -> None:
        """Let the agent and its ranks be gone at once."""
        assert self._client is not None, "a node is killed while it is up"
        assert self._ranks is not None, "the same"
        if self._store is not None:
            self._store.forget_client(self._client)
        self._dispatch = None
        self._ranks.kill_all()

    def wake(self) -> None:
        """Let a deadline that has passed take effect."""
        if self._dispatch is not None:
            self._dispatch.wake()
            self._forget_client_at_end()

    def stop(self, signal: int | None) -> None:
        """The agent gets a signal."""
        self._deliver(self._lives, StopRequested(signal))

    def notice_ends(self) -> None:
        """Look which of its ranks have ended."""
        if self._ranks is not None:
            self._ranks.notice_ends()

    def find_stuck(self, rank: Rank) -> None:
        """A rank lets no other run."""
        gang = None if self._agent is None else self._agent.gang
        if self._ranks is not None and gang is not None and gang.spec.hang_timeout is not None:
            self._ranks.find_stuck(rank, gang.spec.hang_timeout)

    def described(self, failures: Sequence[Failure]) -> tuple[Failure, ...]:
        """Failures of its last gang, with all that is known of them."""
        assert self._ranks is not None, "its ranks have failed"
        return tuple(self._ranks.described(failure) for failure in failures)

    def losses(self, now: Instant) -> list[Failure]:
        """What a power cut now is to its ranks; no agent will be left to report it."""
        gang = None if self._agent is None else self._agent.gang
        assert self._ranks is not None, "it is up"
        return [] if gang is None else self._ranks.losses(now)

    def _deliver(self, life: int, stimulus: Stimulus) -> None:
        """Tell the agent of that life; a killed one gets nothing more."""
        if life == self._lives and self._dispatch is not None and self.is_up:
            self._dispatch.deliver(stimulus)
            self._hasten()
            self._forget_client_at_end()

    def _hasten(self) -> None:
        deadline = self.next_deadline
        if deadline is not None:
            # Ranks must give the token back in time, or the agent's deadline would be late.
            self._setting.world.scheduler.return_by(deadline)

    def _forget_client_at_end(self) -> None:
        if self._store is not None and self._client is not None and not self.is_up:
            self._store.forget_client(self._client)


class SimulatedNodes:
    """All nodes of a run; as `Nodes` of faults, too.

    Args:
        setting: where they live.
        gang: of each agent, with its ranks.
        node_count: how many nodes there are.
        rendezvous: how they meet; None lets one agent stand for all of them.
        policy: which failures an agent that is alone survives.
        host: the name of the machine of one that is alone.
        seed: decides how long messages take.
        faults: of ranks and nodes.
    """

    def __init__(
        self,
        setting: Setting,
        gang: GangSpec,
        *,
        node_count: int,
        rendezvous: RendezvousConfig | None,
        policy: RestartPolicy,
        host: str,
        seed: int,
        faults: FaultInjector | None,
    ) -> None:
        self._world = setting.world
        self._records = setting.records
        self._faults = faults
        self._starts_pending = 0
        self._lost: list[Failure] = []
        self._note_loss = setting.note_loss
        self._is_alone = rendezvous is None
        clock = _WorldTime(setting.clock, self._world.scheduler)
        self._agenda = _HasteningAgenda(clock, self._world.scheduler)
        records, patience = setting.records, _patience_of(rendezvous)
        records.look_interval = min(records.watch.look_interval, patience)
        records.patience = patience
        # In virtual time: the user's hang timeout is real time, and limits who holds the token.
        gang = msgspec.structs.replace(gang, hang_timeout=records.look_interval)
        if rendezvous is None:
            # Nothing can happen to one node alone, so one agent for all costs less, and no
            # message.
            whole = msgspec.structs.replace(gang, size=node_count * gang.size)
            spec = spec_alone(whole, policy, run_id=setting.job.run_id)
            alone = RehearsedNode(
                0, host, setting, lambda _: spec, None, represented_count=node_count
            )
            self._nodes = [alone]
            return
        setting.records.when_peers_notice = partial(self._agenda.after, _PEERS_NOTICE)
        store = SimulatedStore(
            agenda=self._agenda,
            clock=clock,
            network=Network(),
            request_timeout=rendezvous.request_timeout,
            chance=stream(seed, "network"),
            on_change=_nothing,
        )
        self._nodes = [
            RehearsedNode(
                number,
                f"h{number}",
                setting,
                partial(_spec_of, number, setting.job.run_id, rendezvous, gang),
                store,
            )
            for number in range(node_count)
        ]

    @property
    def next_instant(self) -> Instant | None:
        """When something happens that is not a rank's; None for never."""
        instants = [node.next_deadline for node in self._nodes] + [self._agenda.next_instant]
        return min((each for each in instants if each is not None), default=None)

    @property
    def is_over(self) -> bool:
        """Whether no agent lives, nor will one start."""
        return not (self._starts_pending or any(node.is_up for node in self._nodes))

    def start(self) -> None:
        """Let the nodes start, each at its time."""
        late: dict[int, Duration] = {}
        if self._faults is not None:
            self._faults.nodes = self
            for fault in self._faults.of_nodes():
                if isinstance(fault, LateNode):
                    late[fault.node] = fault.by
                    self._faults.strike_node(fault, "")
                elif fault.at is not None:
                    when = f"after {format_duration(fault.at)}"
                    self._agenda.after(fault.at, partial(self._faults.strike_node, fault, when))
        for node in self._nodes:
            self._start_after(node, late.get(node.number, ZERO))
        self.pass_time()

    def run(self, patience_s: float | None) -> Rank | None:
        """Let the ranks run until a node has something to do; see `Scheduler.run`."""
        scheduler, horizon = self._world.scheduler, self.next_instant
        coming = scheduler.next_instant
        stuck = scheduler.run(horizon, patience_s)
        # Only if a rank could run: time that agents alone let pass is no sign of life.
        if coming is not None and (horizon is None or coming <= horizon):
            self._records.last_alive = scheduler.now
        return stuck

    def find_stuck(self, rank: Rank) -> None:
        """A rank has let no other run: its gang has hung."""
        for node in self._nodes:
            node.find_stuck(rank)

    def stop(self, signal: int | None) -> None:
        """All agents get a signal."""
        for node in self._nodes:
            node.stop(signal)

    def go_on(self) -> None:
        """Tell the agents of ranks that have ended; if no rank can go on now, let time pass."""
        for node in self._nodes:
            # Before time passes: an exit that is told late would look younger than it is.
            node.notice_ends()
        coming, own = self._world.scheduler.next_instant, self.next_instant
        assert self.is_over or (own, coming) != (None, None), "an agent waits for ever"
        if own is not None and (coming is None or coming > own):
            # No rank goes on before that: what agents wait for, such as a lease, is next.
            self._world.scheduler.now = max(self._world.scheduler.now, own)
            self.pass_time()

    def pass_time(self) -> None:
        """Let happen what is due."""
        scheduler = self._world.scheduler
        while (due := self._agenda.next_instant) is not None and due <= scheduler.now:
            self._agenda.run_next()
        for node in self._nodes:
            deadline = node.next_deadline
            if deadline is not None and deadline <= scheduler.now:
                node.wake()

    def node_of(self, rank: int) -> int:
        """The number of the node that a rank of the present attempt runs on."""
        return self._records.nodes[rank]

    def is_up(self, node: int) -> bool:
        """Whether an agent lives on that node."""
        return self._nodes[node].is_up

    def kill(self, fault: KillNode) -> None:
        """Let a node die, which is up, and come back if the fault says so."""
        node = self._nodes[fault.node]
        losses = node.losses(self._world.scheduler.now)
        if losses:
            self._note_loss(losses[0].attempt, node.host)
        # Taken down before the kill: afterwards no agent is left that could report them.
        self._lost += losses
        node.kill()
        if fault.back_after is not None:
            self._start_after(node, fault.back_after)

    def outcome(self) -> Outcome:
        """What the run came to, when it is over."""
        ends = [node.finished for node in self._nodes if node.finished is not None]
        if not ends:
            return Outcome(
                status=OutcomeStatus.FAILED,
                attempts=1,
                detail="every node was killed, and none comes back",
            )
        # A node that was cut off at the end knows no verdict.
        told = next((end for end in ends if end.verdict is not None), ends[0])
        outcome = told.as_outcome()
        if outcome.status is OutcomeStatus.SUCCEEDED or not outcome.failures:
            return outcome
        return msgspec.structs.replace(outcome, failures=self._all_failures(outcome))

    def _all_failures(self, outcome: Outcome) -> tuple[Failure, ...]:
        """The root cause, then what else failed in its round, then who was stopped for it."""
        if self._is_alone:
            return self._nodes[0].described(outcome.failures)
        root = outcome.failures[0]
        all_failures = (
            failure
            for node in self._nodes
            if node.finished is not None and node.finished.outcome is not None
            for failure in node.described(node.finished.outcome.failures)
        )
        others = sorted(
            (each for each in all_failures if each.attempt == root.attempt),
            # All clocks are one here, so that instants of different nodes can be compared.
            key=lambda failure: (failure.cause is FailureCause.STOPPED, failure.at, failure.rank),
        )
        if root.error is not None and tells_of_lost_peer(root.error):
            lost = [each for each in self._lost if each.attempt == root.attempt]
            if lost:  # that explains the lost peer
                ranks = {each.rank for each in lost}
                return (*lost, *(each for each in others if each.rank not in ranks))
        return (root, *(each for each in others if each.rank != root.rank))

    def _start_after(self, node: RehearsedNode, delay: Duration) -> None:
        self._starts_pending += 1
        self._agenda.after(delay, partial(self._start, node))

    def _start(self, node: RehearsedNode) -> None:
        self._starts_pending -= 1
        node.start()


class _WorldTime:
    """The ranks' virtual time as the clock of an agenda: a look does not move it."""

    def __init__(self, clock: WorldClock, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.wall_ns = clock.wall_ns

    def now(self) -> Instant:
        """The present instant."""
        return self._scheduler.now

    def advance_to(self, instant: Instant) -> None:
        """Let time pass."""
        self._scheduler.now = max(self._scheduler.now, instant)


class _HasteningAgenda(Agenda):
    """An agenda whose new entries bring forward when the ranks give the run token back."""

    def __init__(self, clock: _WorldTime, scheduler: Scheduler) -> None:
        super().__init__(clock)
        self._scheduler = scheduler

    def at(self, instant: Instant, action: Callable[[], None]) -> None:
        super().at(instant, action)
        self._scheduler.return_by(instant)


def _spec_of(
    number: int, run_id: str, rendezvous: RendezvousConfig, gang: GangSpec, node_id: str
) -> AgentSpec:
    host = f"h{number}"
    offer = NodeOffer(
        node_id=node_id, host=host, address="127.0.0.1", slots=gang.size, topology=host
    )
    return AgentSpec(run_id=run_id, rendezvous=rendezvous, offer=offer, gang=gang)


def _patience_of(rendezvous: RendezvousConfig | None) -> Duration:
    """Longer than the others take to notice a death, or to take a node in."""
    if rendezvous is None:
        return _PATIENCE
    noticed = rendezvous.lease_ttl + rendezvous.fence + rendezvous.settle_delay
    return Duration(max(_PATIENCE, 2 * (noticed + rendezvous.request_timeout)))


def _nothing() -> None:
    """No checker watches the store."""
