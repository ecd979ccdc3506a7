"""A simulated machine and its agents, one after the other. Its workers are its host's."""

from collections.abc import Callable
from functools import partial
from random import Random

from rankwise.core.agent.machine import Agent
from rankwise.core.agent.vocabulary import AGENT, AgentSpec, Announcement, LeaveRequested, Stimulus
from rankwise.core.gang.vocabulary import StopRequested
from rankwise.core.rendezvous.vocabulary import Answer
from rankwise.drivers.agent_dispatch import AgentDispatch
from rankwise.drivers.virtual.agenda import Agenda
from rankwise.drivers.virtual.cluster.cluster_plan import ClusterPlan
from rankwise.drivers.virtual.cluster.gang_checker import GangChecker, WatchedJournal
from rankwise.drivers.virtual.cluster.host import SimulatedHost
from rankwise.drivers.virtual.cluster.simulated_store import SimulatedStore, SimulatedStoreClient
from rankwise.drivers.virtual.cluster.simulated_worker import Witness
from rankwise.drivers.virtual.cluster.skewed_clocks import SkewedClock
from rankwise.ports.journal import Journal


class SimulatedNode:
    """One machine.

    Args:
        number: counts the nodes; the machine's name is `h<number>`.
        plan: of the cluster.
        agenda: of the world.
        clock: this node's.
        store: which its agents ask.
        spec_of: the spec of an agent with the given id.
        make_agent: makes the agents.
        journal: remembers what the agents are told and order; by machine name.
        witness: is told the truth.
        on_step: is called when an agent has taken a step: its deadline may have changed.
        chance: decides durations and habits on this node.
    """

    def __init__(
        self,
        *,
        number: int,
        plan: ClusterPlan,
        agenda: Agenda,
        clock: SkewedClock,
        store: SimulatedStore,
        spec_of: Callable[[int, str], AgentSpec],
        make_agent: Callable[[AgentSpec], Agent],
        journal: Journal | None,
        witness: Witness,
        on_step: Callable[["SimulatedNode"], None],
        chance: Random,
    ) -> None:
        self.number = number
        self.clock = clock
        self.agent: Agent | None = None
        self.dispatch: AgentDispatch | None = None
        self.gang_checker: GangChecker | None = None
        self.lives = 0
        self.announcements: list[Announcement] = []
        self._plan = plan
        self._agenda = agenda
        self._store = store
        self._spec_of = spec_of
        self._make_agent = make_agent
        self._journal = journal
        self._on_step = on_step
        self._witness = witness
        self._client: SimulatedStoreClient | None = None
        self.workers = SimulatedHost(
            self,
            agenda=agenda,
            clock=clock,
            habits=plan.workers,
            guardian=plan.guardian,
            chance=chance,
            deliver=self._deliver,
            witness=witness,
        )

    @property
    def host(self) -> str:
        """The machine's name."""
        return f"h{self.number}"

    @property
    def node_id(self) -> str:
        """The id of the present or last agent."""
        return f"n{self.number}.{self.lives - 1}"

    @property
    def is_up(self) -> bool:
        """Whether an agent lives here."""
        return self._client is not None and self._client.is_alive

    def start_agent(self) -> None:
        """Start an agent; the first, or another one."""
        assert not self.is_up, "one agent per node"
        self.lives += 1
        self.workers.begin_life()
        agent = self.agent = self._make_agent(self._spec_of(self.number, self.node_id))
        client = self._client = SimulatedStoreClient(self.number, self._deliver)
        journal = self._journal
        is_alone = self._plan.is_alone
        if is_alone:
            self.gang_checker = GangChecker(agent, self.workers)
            journal = WatchedJournal(journal, self.gang_checker)
        self.dispatch = AgentDispatch(
            agent,
            host=self.workers,
            ask_store=None if is_alone else partial(self._store.ask, client),
            clock=self.clock,
            journal=journal,
            name=AGENT if is_alone else f"{AGENT} {self.node_id}",
            on_announcement=self.announcements.append,
        )
        self.dispatch.start()
        self._on_step(self)

    def kill_agent(self) -> None:
        """SIGKILL: nothing more comes of the agent, and the guardian kills the workers."""
        if not self.is_up:
            return
        self._forget_agent()
        self.dispatch = self.gang_checker = None
        self._witness.vanished(self)
        self.workers.end_life(kills=True)

    def end_agent(self) -> None:
        """The agent's process has ended, with its job done.

        One that is alone goes on hearing what was on its way to it, and must not answer.
        """
        self._forget_agent()
        if not self._plan.is_alone:
            self.dispatch = None
            self.workers.end_life(kills=False)

    def _forget_agent(self) -> None:
        assert self._client is not None, "an agent lives here"
        self._store.forget_client(self._client)

    def ask_to_stop(self, signal: int | None) -> None:
        """Send a signal to the agent; None asks it from within the program."""
        self._deliver(StopRequested(signal))

    def ask_to_leave(self) -> None:
        """Ask the agent to leave the job."""
        self._deliver(LeaveRequested())

    def wake(self) -> None:
        """Let the agent's deadline take effect."""
        if self.dispatch is not None:
            self.dispatch.wake()
            self._on_step(self)

    def _deliver(self, stimulus: Stimulus | Answer) -> None:
        if self.dispatch is not None:
            self.dispatch.deliver(stimulus)
            self._on_step(self)
