"""The workers of a simulated node and their guardian, in virtual time.

Between the agent and its workers stands a guardian, as on a real machine (`guardian_line`). The
host knows the truth about every process, of which the agent only gets facts. The checkers compare
the two.
"""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from rankwise.base.errors import SimulationError
from rankwise.base.failure import ErrorRecord, ExitStatus, Failure
from rankwise.base.root_cause import names_lost_connection, tells_of_lost_peer
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant
from rankwise.core.agent.vocabulary import (
    FailuresDescribed,
    LeaveRequested,
    RanksStood,
    RoundPrepared,
    Stimulus,
)
from rankwise.core.gang.vocabulary import (
    DumpsLooked,
    GuardianLost,
    ProgressLooked,
    RanksBlamed,
    RecoveryMessage,
    RecoveryMessageSent,
    RecoveryOrder,
    StacksDumped,
    Swept,
    WorkerExited,
    WorkerRefused,
    WorkerReported,
    WorkerSpawned,
)
from rankwise.core.ledger import Group, Sheet, pack
from rankwise.core.rendezvous.records import Trouble
from rankwise.core.rendezvous.vocabulary import (
    CallRecordsReported,
    CallRecordsWanted,
    InquiryAnswered,
    TroubleReported,
    World,
)
from rankwise.core.watch.vocabulary import (
    AskRanks,
    CallsBegan,
    CallsJudged,
    EndLooked,
    FindAwaited,
    JudgeCalls,
    LookAtEnd,
    LookAtPast,
    LookOrder,
    PastLooked,
    RanksAnswered,
)
from rankwise.drivers.virtual.agenda import VIRTUAL_EPOCH_NS, Agenda
from rankwise.drivers.virtual.cluster.cluster_plan import Guardian, Workers
from rankwise.drivers.virtual.cluster.guardian_line import GUARDIAN, Channel, GuardianLine
from rankwise.drivers.virtual.cluster.simulated_calls import call_record_of, packed_times
from rankwise.drivers.virtual.cluster.simulated_worker import SimulatedWorker, Witness
from rankwise.drivers.virtual.cluster.skewed_clocks import SkewedClock
from rankwise.drivers.virtual.random_streams import happens
from rankwise.drivers.virtual.worker_behaviour import (
    PEER_IS_GONE,
    Dies,
    Exits,
    Lives,
    Raises,
    RunsForever,
    WorkerProgram,
    program_of,
)
from rankwise.sim.faults.vocabulary import FailWorker

if TYPE_CHECKING:
    from rankwise.drivers.virtual.cluster.node import SimulatedNode

SIGKILL, SIGTERM = 9, 15
FIRST_PID = 1001
MASTER_PORT = 29500
KILL_TAKES = Duration(20 * MILLISECOND)
"""At most, from SIGKILL to the end of a process that has no program of its own."""
LOOK_TAKES = Duration(100 * MILLISECOND)
"""How much later than another node one notices, at most, that its ranks stand in a call."""
GOING_TAKES = Duration(100 * MILLISECOND)
"""At most, from the success of a node's last worker until its agent goes, if it does."""
RECALL_PATIENCE = Duration(2 * SECOND)
"""How long a worker may take to leave a function that can be called again."""
BLAME = "has not come to all_reduce #1"


class SimulatedHost:
    """A node's workers: a `rankwise.drivers.agent_dispatch.NodeHost`.

    Args:
        node: whose workers they are.
        agenda: of the world.
        clock: of the node.
        habits: of all workers.
        guardian: how slow it is.
        chance: decides latencies and habits.
        deliver: tells the agent.
        witness: is told the truth.
    """

    def __init__(
        self,
        node: "SimulatedNode",
        *,
        agenda: Agenda,
        clock: SkewedClock,
        habits: Workers,
        guardian: Guardian,
        chance: Random,
        deliver: Callable[[Stimulus], None],
        witness: Witness,
    ) -> None:
        self.workers: dict[tuple[int, int], SimulatedWorker] = {}
        """By round and local rank."""
        self.living: set[tuple[int, int]] = set()
        """Those of them that hold a rank."""
        self.waiting: dict[int, SimulatedWorker] = {}
        """Processes that have left their functions and wait to be called again, by local rank."""
        self.refuses_until = Instant(0)
        self._node = node
        self._agenda = agenda
        self.clock = clock
        self._habits = habits
        self._lives: Lives = habits.lives or [[_program_of_habits(habits)] * habits.per_node]
        self._guardian = guardian
        self._chance = chance
        self._deliver = deliver
        self._witness = witness
        self._line = GuardianLine(agenda, guardian, chance)
        self._world: World | None = None
        self._pids_given = 0
        self._unspawned: set[tuple[int, int]] = set()
        self._strays: list[SimulatedWorker] = []
        self._asked_in = -1

    def processes(self) -> list[SimulatedWorker]:
        """Every process that is alive in truth: ranks, those that wait to be one, strays."""
        ranks = [self.workers[key] for key in sorted(self.living)]
        waiting = [worker for _, worker in sorted(self.waiting.items()) if worker.is_alive]
        return ranks + waiting + self._strays

    # The agent's life

    def begin_life(self) -> None:
        """Another agent has begun; nothing that was ordered or told before concerns it."""
        self._line.life += 1
        self._unspawned.clear()
        self._line.is_lost = False

    def end_life(self, *, kills: bool) -> None:
        """The agent has gone. If it was killed, its guardian kills the workers."""
        self._line.life += 1
        self._unspawned.clear()
        if kills:
            for worker in self.processes():
                self._take_signal(worker, SIGKILL)

    def lose_guardian(self) -> None:
        """The guardian is killed: its workers die with it, and no fact about them follows."""
        if self._line.is_lost:
            return
        self._line.is_lost = True
        self._unspawned.clear()
        for worker in self.processes():
            if self._habits.lives:
                self._take_signal(worker, SIGKILL)  # which may take long, if programs say so
            else:
                self._end(worker, -SIGKILL)
        self._tell(GUARDIAN, GuardianLost("the guardian was killed"))

    # What the agent orders about a round

    def prepare_round(self, number: int) -> None:
        """A simulated node is always fit."""
        self._tell_after(
            self._habits.prepare_takes, RoundPrepared(number, MASTER_PORT + number % 1000)
        )

    def begin_attempt(self, world: World) -> None:
        """The next workers live in this world."""
        self._world = world
        self._witness.began(self._node, world)

    def ask_ranks_to_stop(self, number: int, signal: int | None) -> None:
        """Let the ranks stand at their next step."""
        del signal
        self._asked_in = number
        if self._habits.asks_to_stop:
            step = 1 + self._chance.randrange(1000)
            self._later(self._up_to(self._habits.stop_takes), RanksStood(number, step))

    def stop_ranks_at(self, number: int, step: int) -> None:
        """Let the ranks stop at that step."""
        del step
        for key in sorted(key for key in self.living if key[0] == number):
            takes = self._up_to(self._habits.stop_takes)
            self._agenda.after(takes, partial(self._end, self.workers[key], 143))

    def describe_failures(self, number: int, failures: tuple[Failure, ...]) -> None:
        """Nothing more is known than the machine says."""
        described = FailuresDescribed(number, failures)
        if self._guardian.describe_takes:
            self._later(self._guardian.describe_takes, described)
        else:
            self._deliver(described)

    def tell_call_records(self, wanted: CallRecordsWanted) -> None:
        """Tell which ranks stand in the one call that there is."""
        world = self._world
        if world is None:
            return
        members = tuple(range(world.first_rank, world.first_rank + world.slots))
        group = Group(size=world.size, members=members)
        workers = [each for each in self.workers.values() if each.round == wanted.round]
        takes, asked_at = self._up_to(LOOK_TAKES), self.clock.now()

        def tell_times() -> None:
            late = self._habits.late
            sheet = packed_times(workers, group, self.clock, late=late, asked_at=asked_at)
            self._deliver(CallRecordsReported(wanted.inquiry, sheet))

        if wanted.trouble is Trouble.DONE:
            self._line.later(takes, tell_times)
            return
        records = tuple(call_record_of(worker, group, self.clock) for worker in workers)
        self._later(takes, CallRecordsReported(wanted.inquiry, pack(Sheet(records), asked_at)))

    def on_inquiry_answered(self, answered: InquiryAnswered) -> None:
        """Let the ranks fail whose time-outs were held back."""
        self._fail_of_time_out(answered.round)

    def look_at_ranks(self, order: LookOrder) -> None:
        """Answer that call records show nothing, but that other nodes may know who is late."""
        match order:
            case LookAtEnd():
                self._deliver(EndLooked(order.attempt, order.local_rank))
            case AskRanks():
                self._deliver(RanksAnswered(order.attempt, were_asked=False))
            case JudgeCalls():
                self._deliver(CallsJudged(order.attempt, order.local_rank))
            case LookAtPast():
                asks = self._habits.late > 0 and self._is_done(order.attempt)
                self._deliver(PastLooked(order.attempt, asks_who_is_late=asks))
            case FindAwaited():
                raise SimulationError("a simulated node was asked for whom its ranks wait")

    # What the agent orders about its workers

    def spawn(self, local_rank: int, attempt: int) -> None:
        """Make a worker's process after a while, or refuse to."""
        if self._agenda.now() < self.refuses_until:
            refused = WorkerRefused(local_rank, attempt, "no space left on device")
            self._tell((attempt, local_rank), refused)
            return
        self._unspawned.add((attempt, local_rank))
        self._line.order(partial(self._begin_start, local_rank, attempt))

    def signal(self, local_rank: int, attempt: int, signal: int) -> None:
        """Send a signal to a worker; its strays have sessions of their own and do not get it."""
        self._line.order(partial(self._pass_signal, (attempt, local_rank), signal))

    def look_for_progress(self, attempt: int) -> None:
        """Answer with the last sign of life of any living worker."""
        now = self.clock.now()
        seen = [
            worker.last_progress(now)
            for worker in self.processes()
            if worker.round == attempt and not worker.is_stray
        ]
        self._tell(GUARDIAN, ProgressLooked(attempt, max(seen, default=now)))

    def look_for_dumps(self, attempt: int) -> None:
        """Answer that no core is written: simulated workers leave none."""
        self._tell(GUARDIAN, DumpsLooked(attempt))

    def dump_stacks(self, attempt: int) -> None:
        """Let the workers print their stacks, which takes them a while."""
        told = partial(self._tell, GUARDIAN, StacksDumped(attempt))
        self._line.order(lambda: self._line.later(self._guardian.stacks_take, told))

    def sweep(self, attempt: int, spares: Sequence[int] = ()) -> None:
        """Kill what is left of a round, and let nothing more come of it."""
        self._line.order(partial(self._begin_sweep, attempt, tuple(spares)))

    def tell(self, local_rank: int, attempt: int, word: str) -> None:
        """Say a word to a worker that can be called again, if it is still there."""
        if word == RecoveryOrder.AGAIN:
            self._call_again(local_rank, attempt)
            return
        worker = self.workers.get((attempt, local_rank))
        if worker is None or not worker.is_alive:
            return
        assert worker.recovers, f"{word} for rank {local_rank} of {attempt}, which offers nothing"
        if word == RecoveryOrder.RELEASE:
            assert worker.exception_held_at is not None, "it holds an exception"
            assert worker.held is not None, "it holds an exception"
            self._raise(worker, worker.held, worker.exception_held_at)
            return
        worker.is_recalled = True
        if not happens(self._chance, self._habits.stuck):
            takes = self._up_to(self._habits.stop_takes)
            self._agenda.after(takes, partial(self._yield, worker))

    # What happens to the workers

    def fail_worker(self, fate: FailWorker) -> None:
        """A worker fails by itself, if there is one."""
        keys = sorted(key for key in self.living if key[1] == fate.local_rank)
        if not keys:
            return
        worker = self.workers[keys[-1]]
        if fate.raises and worker.failed_at is None:
            self._raise_or_hold(worker, Raises("simulated", fate.raises, KILL_TAKES))
        elif fate.code and not fate.raises:
            self._fail(worker, fate.code)

    def blame(self, local_rank: int) -> None:
        """Blame a worker of whatever round there was last."""
        latest = max((number for number, _ in self.workers), default=0)
        self._deliver(RanksBlamed((local_rank,), latest, BLAME))

    def latest(self, local_rank: int) -> SimulatedWorker | None:
        """The worker that holds this rank now, if one does."""
        keys = [key for key in self.living if key[1] == local_rank]
        return self.workers[max(keys)] if keys else None

    def stand_already(self, round_number: int) -> bool:
        """Whether ranks of a round have come to a collective that another one has missed."""
        return any(
            worker.round == round_number and worker.stands_since is not None
            for worker in self.workers.values()
        )

    def let_ranks_wait_for(self, absent: SimulatedWorker, patience: Duration) -> None:
        """The ranks of that worker's round wait for it in a collective, and not for ever."""
        keys = [key for key in self.living if key[0] == absent.round]
        standing = [self.workers[key] for key in keys if self.workers[key] is not absent]
        for worker in standing:
            worker.stands_since = self._agenda.now()
        if standing:
            self._later(self._up_to(LOOK_TAKES), TroubleReported(absent.round, Trouble.STANDS))
            over = Duration(patience + self._up_to(LOOK_TAKES))
            self._line.later(over, partial(self._time_out, absent.round))

    def _time_out(self, round_number: int) -> None:
        """A rank has waited for too long: hold that back until the other nodes have been asked."""
        agent = self._node.agent
        self._deliver(TroubleReported(round_number, Trouble.TIMED_OUT))
        if agent is None or not agent.has_workers:
            self._fail_of_time_out(round_number)

    def _fail_of_time_out(self, round_number: int) -> None:
        for key in sorted(key for key in self.living if key[0] == round_number):
            worker = self.workers[key]
            may_raise = worker.failed_at is None and not worker.must_die
            may_raise = may_raise and worker.exception_held_at is None and not worker.is_recalled
            if worker.stands_since is not None and may_raise:
                text = "the connection timed out"
                timed_out = Raises(text, "TimeoutError", KILL_TAKES, blames_peer=True)
                self._raise_or_hold(worker, timed_out)

    def signal_ranks(self) -> None:
        """Send the living ranks SIGTERM, as a scheduler that signals every process does."""
        for key in sorted(self.living):
            worker = self.workers[key]
            if not self._habits.asks_to_stop:
                worker.must_die = worker.was_signalled = True
                self._agenda.after(self._up_to(KILL_TAKES), partial(self._end, worker, -SIGTERM))

    def on_peer_vanished(self, round_number: int) -> None:
        """A peer's connection has closed: some of this node's workers raise an exception."""
        for key in sorted(key for key in self.living if key[0] == round_number):
            worker = self.workers[key]
            may_raise = worker.failed_at is None and not worker.must_die
            may_raise = may_raise and worker.exception_held_at is None and not worker.is_recalled
            if may_raise and happens(self._chance, self._habits.cascade):
                closed = Raises(PEER_IS_GONE, "RuntimeError", KILL_TAKES, blames_peer=True)
                self._raise_or_hold(worker, closed)

    # Starts of workers

    def _begin_start(self, local_rank: int, attempt: int) -> None:
        program = program_of(self._lives, local_rank, attempt)
        start = partial(self._start_process, local_rank, attempt, program)
        self._line.later(self._takes(program.start_takes), start)

    def _start_process(self, local_rank: int, attempt: int, program: WorkerProgram) -> None:
        key = (attempt, local_rank)
        world = self._world
        if key not in self._unspawned or world is None:
            return
        self._unspawned.remove(key)
        if program.refusal:
            self._tell(key, WorkerRefused(local_rank, attempt, program.refusal))
            return
        rank = world.first_rank + local_rank
        worker = self._new_process(attempt, local_rank, rank, program)
        recovers = self._habits.recovers
        worker.recovers = bool(recovers) and happens(self._chance, recovers)
        for _ in range(program.strays):
            stray = self._new_process(attempt, local_rank, rank, program)
            stray.is_stray = True
            self._strays.append(stray)
        self._tell(key, WorkerSpawned(local_rank, attempt, worker.pid))
        if worker.recovers:
            self._say(worker, RecoveryMessage.OFFERS)
        self._begin(worker)

    def _new_process(
        self, attempt: int, local_rank: int, rank: int, program: WorkerProgram
    ) -> SimulatedWorker:
        pid = FIRST_PID + self._pids_given
        self._pids_given += 1
        now = self.clock.now()
        return SimulatedWorker(
            self._node, attempt, local_rank, rank, pid, program, now, self._line.life
        )

    def _begin(self, worker: SimulatedWorker) -> None:
        """A process is a rank of a round: it was made for it, or is called again in it."""
        self.workers[worker.round, worker.local_rank] = worker
        self.living.add((worker.round, worker.local_rank))
        worker.is_rank = True
        if self._habits.late:
            self._deliver(CallsBegan(worker.round))
        self._witness.started(worker)
        takes = Duration(worker.program.after + self._up_to(self._habits.uneven))
        if not isinstance(worker.program.ending, RunsForever):
            self._agenda.after(takes, partial(self._come_to_its_end, worker))

    # Ends

    def _come_to_its_end(self, worker: SimulatedWorker) -> None:
        if (
            not worker.is_alive
            or worker.failed_at is not None
            or worker.exception_held_at is not None
        ):
            return
        if not worker.is_rank or worker.stands_since is not None:
            return  # it was recalled before, or waits
        match worker.program.ending:
            case Exits(0):
                self._succeed(worker)
            case Exits(code):
                self._fail(worker, code)
            case Dies(signal):
                self._fail(worker, -signal)
            case Raises() as ending:
                self._raise_or_hold(worker, ending)
            case RunsForever():
                raise AssertionError("what runs for ever comes to no end")

    def _succeed(self, worker: SimulatedWorker) -> None:
        if worker.recovers:
            self._say(worker, RecoveryMessage.WITHDRAWS)
        worker.succeeded = not worker.must_die
        self._end(worker, 0)
        self._go_if_done(worker.round)

    def _go_if_done(self, round_number: int) -> None:
        """Let the agent leave or die soon after its last worker has succeeded, if plans say so."""
        habits = self._habits
        if not self._is_done(round_number):
            return
        if habits.leaves_when_done and happens(self._chance, habits.leaves_when_done):
            self._later(self._up_to(GOING_TAKES), LeaveRequested())
        if habits.dies_when_done and happens(self._chance, habits.dies_when_done):
            self._line.later(self._up_to(GOING_TAKES), self._node.kill_agent)

    def _is_done(self, round_number: int) -> bool:
        """Whether all workers of this node have succeeded in that round."""
        ranks = [each for each in self.workers.values() if each.round == round_number]
        slots = None if self._world is None else self._world.slots
        return len(ranks) == slots and all(each.succeeded for each in ranks)

    def _fail(self, worker: SimulatedWorker, code: int) -> None:
        if worker.failed_at is None:  # or it has raised, and is still there
            worker.failed_at = self._agenda.now()
            worker.died_by = -code if code < 0 else None
            worker.is_silent = code > 0
        self._end(worker, code)

    def _raise(self, worker: SimulatedWorker, ending: Raises, at: Instant) -> None:
        worker.failed_at = at
        now = self.clock.shown_at(at)
        error = ErrorRecord(
            type=ending.exception,
            message=ending.message,
            traceback=f"{ending.exception}: {ending.message}",
            raised_at=now,
            wall_ns=VIRTUAL_EPOCH_NS + now,
        )
        worker.blames_peer = ending.blames_peer
        worker.lost_peer = names_lost_connection(error)
        worker.may_have_lost_peer = tells_of_lost_peer(error)
        reported = WorkerReported(worker.local_rank, worker.round, error)
        self._tell_of(worker, partial(self._deliver, reported))
        self._agenda.after(self._takes(ending.exit_takes), partial(self._end, worker, 1))

    def _pass_signal(self, key: tuple[int, int], signal: int) -> None:
        worker = self.workers.get(key)
        if worker is not None:
            self._take_signal(worker, signal)

    def _take_signal(self, worker: SimulatedWorker, signal: int) -> None:
        if not worker.is_alive:
            return
        worker.must_die = True
        program, delay, code = worker.program, worker.program.stop_takes, -signal
        if signal == SIGKILL:
            delay = program.stray_kill_takes if worker.is_stray else program.kill_takes
        elif self._habits.asks_to_stop and self._asked_in == worker.round:
            return  # it stops at the step that is agreed upon
        elif happens(self._chance, self._habits.stubborn):
            return
        elif program.stop_code is not None and worker.failed_at is None:
            code = program.stop_code
        if delay is not None:
            self._agenda.after(self._takes(delay), partial(self._end, worker, code))

    def _end(self, worker: SimulatedWorker, code: int) -> None:
        while worker.called_again_as is not None:  # it was so when the signal came
            worker = worker.called_again_as
        if not worker.is_alive:
            return
        worker.is_alive, worker.ended_at = False, self._agenda.now()
        if worker.is_stray:
            self._strays.remove(worker)
            return
        if worker.is_rank:
            self._give_up_rank(worker)
        if not self._line.is_lost:
            exited = partial(self._tell_exit, worker, ExitStatus(code), self.clock.now())
            self._tell_of(worker, exited)

    def _give_up_rank(self, worker: SimulatedWorker) -> None:
        key = (worker.round, worker.local_rank)
        worker.is_rank = False
        if self.workers[key] is worker:  # and not one of a later agent's round of that number
            self.living.discard(key)
        self._witness.ended(worker)

    def _tell_exit(self, worker: SimulatedWorker, status: ExitStatus, at: Instant) -> None:
        attempt = worker.round if worker.news_of is None else worker.news_of
        exited = WorkerExited(worker.local_rank, attempt, status, at)
        self._deliver(exited)

    def _begin_sweep(self, attempt: int, spares: tuple[int, ...]) -> None:
        self._unspawned = {key for key in self._unspawned if key[0] != attempt}
        doomed = self._left_of(attempt, spares)
        for worker in doomed:
            self._take_signal(worker, SIGKILL)
        takes = self._guardian.sweep_takes
        if takes is None:
            takes = KILL_TAKES if doomed else self._guardian.latency_min
        self._line.later(takes, partial(self._end_sweep, attempt, spares))

    def _end_sweep(self, attempt: int, spares: tuple[int, ...]) -> None:
        if not self._line.is_lost:
            survivors = sorted(worker.pid for worker in self._left_of(attempt, spares))
            self._tell(GUARDIAN, Swept(attempt, tuple(survivors), spares))

    def _left_of(self, attempt: int, spares: tuple[int, ...]) -> list[SimulatedWorker]:
        """The living processes of a round and those that wait to be called again, save spares."""
        return [
            process
            for process in self.processes()
            if (process.round == attempt or process is self.waiting.get(process.local_rank))
            and process.local_rank not in spares
        ]

    # Recovery

    def _say(self, worker: SimulatedWorker, word: RecoveryMessage) -> None:
        said = RecoveryMessageSent(worker.local_rank, worker.round, word, RECALL_PATIENCE)
        self._tell_of(worker, partial(self._deliver, said))

    def _yield(self, worker: SimulatedWorker) -> None:
        """It has left its function, and is a rank of that round no more."""
        if not worker.is_alive or worker.succeeded:
            return
        self._give_up_rank(worker)
        self.waiting[worker.local_rank] = worker
        self._say(worker, RecoveryMessage.YIELDED)

    def _call_again(self, local_rank: int, attempt: int) -> None:
        before, world = self.waiting.pop(local_rank, None), self._world
        if before is None:
            raise SimulationError(f"{local_rank} on {self._node.host} is called, and did not wait")
        if not before.is_alive:
            before.news_of = attempt
            return
        assert world is not None, "called again in a world"
        rank = world.first_rank + local_rank
        worker = SimulatedWorker(
            self._node,
            attempt,
            local_rank,
            rank,
            before.pid,
            before.program,
            self.clock.now(),
            self._line.life,
        )
        worker.recovers, worker.must_die = True, before.must_die
        before.called_again_as = worker
        self._begin(worker)

    def _raise_or_hold(self, worker: SimulatedWorker, ending: Raises) -> None:
        """Raise, or hold the exception back until the agent says whose it is."""
        if not worker.recovers:
            self._raise(worker, ending, self._agenda.now())
        elif worker.exception_held_at is None and not worker.is_recalled:
            worker.exception_held_at, worker.held = self._agenda.now(), ending
            self._say(worker, RecoveryMessage.EXCEPTION_HELD)

    # On the way to the guardian and back

    def _tell(self, channel: Channel, stimulus: Stimulus) -> None:
        self._line.send(channel, partial(self._deliver, stimulus))

    def _tell_of(self, worker: SimulatedWorker, tell: Callable[[], None]) -> None:
        """Send news of a worker on their way, if the agent lives that it was made for."""
        if worker.life == self._line.life:
            self._line.send((worker.round, worker.local_rank), tell)

    def _tell_after(self, delay: Duration, stimulus: Stimulus) -> None:
        """Tell it within that time at most; if it takes none, from within the order."""
        if delay:
            self._later(self._up_to(delay), stimulus)
        else:
            self._deliver(stimulus)

    def _later(self, delay: Duration, stimulus: Stimulus) -> None:
        self._line.later(delay, partial(self._deliver, stimulus))

    def _takes(self, told: Duration) -> Duration:
        """Exactly so long if programs say it; where habits do, that long at most."""
        return told if self._habits.lives else self._up_to(told)

    def _up_to(self, longest: Duration) -> Duration:
        return Duration(int(self._chance.random() * longest))


def _program_of_habits(habits: Workers) -> WorkerProgram:
    """What every worker does where plans do not say it of each; durations are the longest."""
    return WorkerProgram(
        after=habits.work,
        start_takes=habits.start_takes,
        stop_takes=habits.stop_takes,
        kill_takes=KILL_TAKES,
        progress_every=Duration(MILLISECOND),
    )
