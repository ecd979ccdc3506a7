"""A simulated machine: its agents, one after the other, and their workers.

The node knows the truth about its workers, which its agent only hears of; the checkers compare the
two. Between them stands a guardian, as on a real machine: orders and news take a little time, and
when the agent is killed the guardian kills the workers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Protocol

from rankwise.base.errors import SimulationError
from rankwise.base.failure import ErrorRecord, ExitStatus, Failure
from rankwise.base.units import MICROSECOND, MILLISECOND, SECOND, Duration, Instant
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.vocabulary import (
    AGENT,
    AgentSpec,
    Announcement,
    FailuresDescribed,
    LeaveRequested,
    RanksStood,
    RoundPrepared,
    Stimulus,
)
from rankwise.core.gang.state import Phase as GangPhase
from rankwise.core.gang.vocabulary import (
    ProgressLooked,
    RecallRequested,
    Resumed,
    Said,
    StacksDumped,
    Started,
    StopRequested,
    Swept,
    Told,
    WorkerExited,
    WorkerRefused,
    WorkerReported,
    WorkerSaid,
    WorkerSpawned,
)
from rankwise.core.gang.vocabulary import Stimulus as GangStimulus
from rankwise.core.rendezvous.requests import Answer
from rankwise.core.rendezvous.vocabulary import World
from rankwise.drivers.agent_dispatch import AgentDispatch
from rankwise.drivers.sim.agenda import VIRTUAL_EPOCH_NS, Agenda
from rankwise.drivers.sim.cluster.clocks import SkewedClock
from rankwise.drivers.sim.cluster.faults import FailWorker, Workers
from rankwise.drivers.sim.cluster.store import SimulatedStore, StoreClient
from rankwise.drivers.stop_window import StopWindow
from rankwise.ports.journal import Journal

SIGKILL, SIGTERM = 9, 15
NEWS_TAKE = Duration(200 * MICROSECOND)
"""How long orders to the guardian and news from it travel."""
KILL_TAKES = Duration(20 * MILLISECOND)
"""At most, from SIGKILL to the end of a process."""
GOING_TAKES = Duration(100 * MILLISECOND)
"""At most, from the success of a node's last worker until its agent goes, if it does."""
MASTER_PORT = 29500
RECALL_PATIENCE = Duration(2 * SECOND)
"""How long a worker may take to leave a function that can be called again."""


@dataclass(slots=True, eq=False)
class Worker:
    """A worker's process, and the whole truth about it."""

    node: "SimulatedNode"
    round: int
    local_rank: int
    rank: int
    pid: int
    is_alive: bool = True
    failed_at: Instant | None = None
    """When it failed by itself, as opposed to somebody's signal; true time."""
    died_by: int | None = None
    """The signal that ended it when it failed by itself."""
    lost_peer: bool = False
    """Whether it failed since a peer's connection had closed."""
    succeeded: bool = False
    is_told_to_die: bool = False
    was_signalled: bool = False
    """Whether somebody else than its agent told it to end."""
    ended_at: Instant | None = None
    """True time."""
    recovers: bool = False
    """Whether it runs a function that can be called again."""
    fell_at: Instant | None = None
    """Since when it holds the exception of its function, if it does; true time."""
    held: str = ""
    """That exception."""
    is_recalled: bool = False
    called_again_as: "Worker | None" = None
    """What the same process is in the next round."""
    news_of: int | None = None
    """The attempt that the news of its end names, if its agent has called it again meanwhile."""


class Witness(Protocol):
    """Who is told the truth as it happens."""

    def born(self, worker: Worker) -> None:
        """A worker has come into being."""
        ...

    def ended(self, worker: Worker) -> None:
        """A worker has ended."""
        ...

    def vanished(self, node: "SimulatedNode") -> None:
        """A node's agent was killed."""
        ...

    def began(self, node: "SimulatedNode", world: World) -> None:
        """A node's agent has begun a round."""
        ...


class SimulatedNode:
    """One machine.

    Args:
        number: counts the nodes; the machine's name is `h<number>`.
        agenda: of the world.
        clock: this node's.
        store: which its agents ask.
        workers: what the workers do.
        spec_of: the spec of an agent with the given id.
        journal: remembers what the agents are told and order; by machine name.
        witness: is told the truth.
        on_step: is called when an agent has taken a step: its deadline may have changed.
        chance: decides durations and habits on this node.
    """

    def __init__(
        self,
        *,
        number: int,
        agenda: Agenda,
        clock: SkewedClock,
        store: SimulatedStore,
        workers: Workers,
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
        self.lives = 0
        self.workers: dict[tuple[int, int], Worker] = {}
        self.living: set[tuple[int, int]] = set()
        self.waiting: dict[int, Worker] = {}
        """Processes that have left their functions and wait to be called again, by local rank."""
        self.refuses_until = Instant(0)
        self._agenda = agenda
        self._store = store
        self._habits = workers
        self._spec_of = spec_of
        self._make_agent = make_agent
        self._journal = journal
        self._witness = witness
        self._on_step = on_step
        self._chance = chance
        self._client: StoreClient | None = None
        self._world: World | None = None
        self._pids_given = 0
        self._swept: set[int] = set()
        self._asked_in = -1
        self._stop_at: int | None = None
        self._stop_window = self._new_stop_window()
        self.announcements: list[Announcement] = []

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

    # The agent's life

    def start_agent(self) -> None:
        """Start an agent; the first, or another one."""
        assert not self.is_up, "one agent per node"
        self.lives += 1
        self._swept.clear()  # a store that has forgotten the run may begin at round 0 again
        spec = self._spec_of(self.number, self.node_id)
        self.agent = self._make_agent(spec)
        client = StoreClient(self.number, self._hear)
        self._client = client
        self.dispatch = AgentDispatch(
            self.agent,
            host=self,
            ask_store=lambda order: self._store.ask(client, order),
            clock=self.clock,
            journal=self._journal,
            name=f"{AGENT} {self.node_id}",
            on_announcement=self.announcements.append,
        )
        self._stop_window = self._new_stop_window()
        self.dispatch.start()
        self._on_step(self)

    def kill_agent(self) -> None:
        """SIGKILL: nothing more comes of the agent, and the guardian kills the workers."""
        if not self.is_up:
            return
        self._end_agent()
        self._witness.vanished(self)
        for key in sorted(self.living):
            self._kill(self.workers[key])
        for _, worker in sorted(self.waiting.items()):
            self._kill(worker)

    def end_agent(self) -> None:
        """The agent's process has ended, with its job done."""
        self._end_agent()

    def _end_agent(self) -> None:
        assert self._client is not None, "an agent lives here"
        self._store.forget_client(self._client)
        self.dispatch = None

    def ask_to_stop(self, signal: int) -> None:
        """Send a signal to the agent."""
        self._deliver(StopRequested(signal))

    def signal_ranks(self) -> None:
        """Send the living ranks SIGTERM, as somebody who signals every process."""
        for _, worker in sorted((key, self.workers[key]) for key in self.living):
            if not self._habits.asks_to_stop:
                worker.is_told_to_die = worker.was_signalled = True
                self._agenda.after(self._up_to(KILL_TAKES), partial(self._end, worker, -SIGTERM))

    def ask_to_leave(self) -> None:
        """Ask the agent to leave the job."""
        self._deliver(LeaveRequested())

    def wake(self) -> None:
        """Let the agent's deadline take effect."""
        if self.dispatch is not None:
            self.dispatch.wake()
            self._on_step(self)
            self._stop_window.look(self._gang_runs)

    def _hear(self, answer: Answer) -> None:
        self._deliver(answer)

    def _deliver(self, stimulus: Stimulus) -> None:
        if self.dispatch is None:
            return
        if not isinstance(stimulus, GangStimulus) or not self._stop_window.holds(
            stimulus, self._gang_runs
        ):
            self.dispatch.deliver(stimulus)
            self._on_step(self)
        self._stop_window.look(self._gang_runs)

    def _new_stop_window(self) -> StopWindow:
        pass_on = partial(self._pass_on, self.lives)
        return StopWindow(self.clock, self._call_at, (SIGTERM,), pass_on)

    def _pass_on(self, life: int, stimulus: GangStimulus) -> None:
        """Tell the agent of that life what the window has held back."""
        assert not isinstance(stimulus, Started | RecallRequested | Resumed), (
            "an agent starts its gangs itself"
        )
        if self.dispatch is not None and life == self.lives:
            self.dispatch.deliver(stimulus)
            self._on_step(self)

    @property
    def _gang_runs(self) -> bool:
        gang = None if self.agent is None else self.agent.gang
        return gang is not None and gang.phase in (GangPhase.STARTING, GangPhase.RUNNING)

    def _call_at(self, at: Instant, callback: Callable[[], None]) -> None:
        self._agenda.at(max(self.clock.truth_of(at), self._agenda_now()), callback)

    def _tell(self, stimulus: Stimulus, delay: Duration = NEWS_TAKE) -> None:
        """Tell the present agent something a little later; a later agent never hears of it."""
        life = self.lives
        self._agenda.after(delay, lambda: self._deliver(stimulus) if life == self.lives else None)

    # What the agent orders

    def prepare_round(self, number: int) -> None:
        """A simulated node is always fit."""
        prepared = RoundPrepared(number, MASTER_PORT + number % 1000)
        if self._habits.prepare_takes:
            self._tell(prepared, self._up_to(self._habits.prepare_takes))
        else:
            self._deliver(prepared)  # from within the order, as a real host may

    def begin_attempt(self, world: World) -> None:
        """The next workers live in this world."""
        self._world = world
        self._stop_at = None
        self._witness.began(self, world)

    def spawn(self, local_rank: int, attempt: int) -> None:
        """Make a worker, after a while."""
        if self._agenda_now() < self.refuses_until:
            self._tell(WorkerRefused(local_rank, attempt, "no space left on device"))
            return
        life = self.lives
        takes = self._up_to(self._habits.start_takes)
        self._agenda.after(takes, lambda: self._start_process(local_rank, attempt, life))

    def signal(self, local_rank: int, attempt: int, signal: int) -> None:
        """Send a signal to a worker."""
        worker = self.workers.get((attempt, local_rank))
        if worker is None or not worker.is_alive:
            return
        if signal == SIGKILL:
            self._kill(worker)
            return
        worker.is_told_to_die = True
        if self._habits.asks_to_stop and self._asked_in == attempt:
            return  # it stops at the step that is agreed upon
        if self._chance.randrange(100) >= self._habits.stubborn:
            self._agenda.after(
                self._up_to(self._habits.stop_takes), lambda: self._end(worker, -signal)
            )

    def look_for_progress(self, attempt: int) -> None:
        """Simulated workers always make progress."""
        self._tell(ProgressLooked(attempt, self.clock.now()))

    def dump_stacks(self, attempt: int) -> None:
        """They have no stacks."""
        self._tell(StacksDumped(attempt))

    def tell(self, local_rank: int, attempt: int, word: str) -> None:
        """Say a word to a worker that can be called again, if it is still there."""
        if word == Told.AGAIN:
            self._call_again(local_rank, attempt)
            return
        worker = self.workers.get((attempt, local_rank))
        if worker is None or not worker.is_alive:
            return
        assert worker.recovers, f"{word} for rank {local_rank} of {attempt}, which offers nothing"
        if word == Told.RELEASE:
            assert worker.fell_at is not None, "it holds an exception"
            self._raise(worker, worker.held, worker.fell_at)
            return
        worker.is_recalled = True
        if self._chance.randrange(100) >= self._habits.stuck:
            takes = self._up_to(self._habits.stop_takes)
            self._agenda.after(takes, lambda: self._yield(worker))

    def sweep(self, attempt: int, spares: Sequence[int] = ()) -> None:
        """Kill what is left of a round, and let nothing more come of it."""
        self._swept.add(attempt)
        left = [self.workers[key] for key in sorted(self.living) if key[0] == attempt]
        left += [worker for _, worker in sorted(self.waiting.items()) if worker.is_alive]
        doomed = [worker for worker in left if worker.local_rank not in spares]
        for worker in doomed:
            self._kill(worker)
        takes = Duration((KILL_TAKES if doomed else NEWS_TAKE) + NEWS_TAKE)
        self._tell(Swept(attempt, (), tuple(spares)), takes)

    def ask_ranks_to_stop(self, number: int, signal: int | None) -> None:
        """Let the ranks stand at their next step."""
        del signal
        self._asked_in = number
        if self._habits.asks_to_stop:
            step = 1 + self._chance.randrange(1000)
            self._tell(RanksStood(number, step), self._up_to(self._habits.stop_takes))

    def stop_ranks_at(self, number: int, step: int) -> None:
        """Let the ranks stop at that step."""
        self._stop_at = step
        for key in sorted(key for key in self.living if key[0] == number):
            worker = self.workers[key]
            takes = self._up_to(self._habits.stop_takes)
            self._agenda.after(takes, partial(self._end, worker, 143))

    def describe_failures(self, number: int, failures: tuple[Failure, ...]) -> None:
        """Nothing more is known than the machine says."""
        self._tell(FailuresDescribed(number, failures))

    # What happens to the workers

    def fail_worker(self, fate: FailWorker) -> None:
        """A worker fails by itself, if there is one."""
        worker = self._living_worker(fate.local_rank)
        if worker is None:
            return
        if fate.raises:
            self._raise_or_hold(worker, fate.raises)
        elif fate.code:
            worker.failed_at = self._agenda_now()
            worker.died_by = -fate.code if fate.code < 0 else None
            self._end(worker, fate.code)

    def hear_of_vanished_peer(self, round_number: int) -> None:
        """A peer's connection has closed: some of this node's workers raise an exception."""
        for key in sorted(key for key in self.living if key[0] == round_number):
            worker = self.workers[key]
            may_raise = worker.failed_at is None and not worker.is_told_to_die
            may_raise = may_raise and worker.fell_at is None and not worker.is_recalled
            if may_raise and self._chance.randrange(100) < self._habits.cascade:
                self._raise_or_hold(worker, "ConnectionResetError")

    def _living_worker(self, local_rank: int) -> Worker | None:
        keys = sorted(key for key in self.living if key[1] == local_rank)
        return self.workers[keys[-1]] if keys else None

    def _start_process(self, local_rank: int, attempt: int, life: int) -> None:
        world = self._world
        if life != self.lives or attempt in self._swept or world is None or not self.is_up:
            return
        pid = 1000 + self._pids_given
        self._pids_given += 1
        rank = world.first_rank + local_rank
        worker = Worker(self, attempt, local_rank, rank, pid)
        habits = self._habits
        worker.recovers = bool(habits.recovers) and self._chance.randrange(100) < habits.recovers
        self._tell(WorkerSpawned(local_rank, attempt, pid))
        if worker.recovers:
            self._say(worker, Said.OFFERS)
        self._begin(worker)

    def _begin(self, worker: Worker) -> None:
        """A process is a rank of a round: it was made for it, or is called again in it."""
        self.workers[worker.round, worker.local_rank] = worker
        self.living.add((worker.round, worker.local_rank))
        self._witness.born(worker)
        takes = Duration(self._habits.work + self._up_to(self._habits.uneven))
        self._agenda.after(takes, lambda: self._succeed(worker))

    def _succeed(self, worker: Worker) -> None:
        if worker.is_alive and worker.failed_at is None and worker.fell_at is None:
            if (worker.round, worker.local_rank) not in self.living:
                return  # it was recalled before
            if worker.recovers:
                self._say(worker, Said.WITHDRAWS)
            worker.succeeded = not worker.is_told_to_die
            self._end(worker, 0)
            self._go_if_done(worker.round)

    def _go_if_done(self, round_number: int) -> None:
        """Let the agent leave or die soon after its last worker has succeeded, if plans say so."""
        habits, world = self._habits, self._world
        done = [each for each in self.workers.values() if each.round == round_number]
        if world is None or len(done) < world.slots or not all(each.succeeded for each in done):
            return
        life = self.lives
        if habits.leaves_when_done and self._chance.randrange(100) < habits.leaves_when_done:
            self._tell(LeaveRequested(), self._up_to(GOING_TAKES))
        if habits.dies_when_done and self._chance.randrange(100) < habits.dies_when_done:
            self._agenda.after(
                self._up_to(GOING_TAKES), lambda: self.kill_agent() if life == self.lives else None
            )

    # Recovery

    def _say(self, worker: Worker, word: Said) -> None:
        self._tell(WorkerSaid(worker.local_rank, worker.round, word, RECALL_PATIENCE))

    def _yield(self, worker: Worker) -> None:
        """It has left its function, and is a rank of that round no more."""
        if not worker.is_alive or worker.succeeded:
            return
        self.living.discard((worker.round, worker.local_rank))
        self.waiting[worker.local_rank] = worker
        self._witness.ended(worker)
        self._say(worker, Said.YIELDED)

    def _call_again(self, local_rank: int, attempt: int) -> None:
        before, world = self.waiting.pop(local_rank, None), self._world
        if before is None:
            raise SimulationError(f"{local_rank} on {self.host} is called, and did not wait")
        if not before.is_alive:
            before.news_of = attempt
            return
        assert world is not None, "called again in a world"
        worker = Worker(self, attempt, local_rank, world.first_rank + local_rank, before.pid)
        worker.recovers, worker.is_told_to_die = True, before.is_told_to_die
        before.called_again_as = worker
        self._begin(worker)

    def _raise_or_hold(self, worker: Worker, exception: str) -> None:
        """Raise, or hold the exception back until the agent says whose it is."""
        if not worker.recovers:
            self._raise(worker, exception, self._agenda_now())
        elif worker.fell_at is None and not worker.is_recalled:
            worker.fell_at, worker.held = self._agenda_now(), exception
            self._say(worker, Said.FELL)

    def _raise(self, worker: Worker, exception: str, at: Instant) -> None:
        worker.failed_at = at
        worker.lost_peer = exception == "ConnectionResetError"
        now = self.clock.shown_at(at)
        error = ErrorRecord(
            type=exception,
            message="simulated",
            traceback=f"{exception}: simulated",
            raised_at=now,
            wall_ns=VIRTUAL_EPOCH_NS + now,
        )
        self._tell(WorkerReported(worker.local_rank, worker.round, error))
        self._agenda.after(self._up_to(KILL_TAKES), lambda: self._end(worker, 1))

    def _kill(self, worker: Worker) -> None:
        worker.is_told_to_die = True
        self._agenda.after(self._up_to(KILL_TAKES), lambda: self._end(worker, -SIGKILL))

    def _end(self, worker: Worker, code: int) -> None:
        while worker.called_again_as is not None:  # it was so when the signal came
            worker = worker.called_again_as
        if not worker.is_alive:
            return
        worker.is_alive, worker.ended_at = False, self._agenda_now()
        if (worker.round, worker.local_rank) in self.living:
            self.living.discard((worker.round, worker.local_rank))
            self._witness.ended(worker)
        at, life = self.clock.now(), self.lives
        self._agenda.after(NEWS_TAKE, lambda: self._tell_exit(worker, code, at, life))

    def _tell_exit(self, worker: Worker, code: int, at: Instant, life: int) -> None:
        if life == self.lives:
            attempt = worker.round if worker.news_of is None else worker.news_of
            self._deliver(WorkerExited(worker.local_rank, attempt, ExitStatus(code), at))

    def _up_to(self, longest: Duration) -> Duration:
        return Duration(int(self._chance.random() * longest))

    def _agenda_now(self) -> Instant:
        return self._agenda.now()
