"""Virtual processes, and the node that makes, signals and sweeps them.

Between the host and its processes stands a virtual guardian, as in the real driver: orders travel
to it, and news travel back, each with a latency of its own. Orders stay in order; so do the news
of one worker, because a real worker's report pipe is drained before its end is told. News of
different workers, which travel through different pipes, may overtake each other.

The host knows the truth about every process, which the machines only hear of. The checkers
compare the two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from rankwise.base.failure import ErrorRecord, ExitStatus, Failure
from rankwise.base.units import Duration, Instant, after, between
from rankwise.core.agent.vocabulary import FailuresDescribed, RoundPrepared, Stimulus
from rankwise.core.gang.vocabulary import (
    GuardianLost,
    ProgressLooked,
    StacksDumped,
    Swept,
    WorkerExited,
    WorkerRefused,
    WorkerReported,
    WorkerSpawned,
)
from rankwise.core.rendezvous.vocabulary import World
from rankwise.drivers.sim.agenda import VIRTUAL_EPOCH_NS, Agenda, VirtualClock
from rankwise.drivers.sim.faults import Faults
from rankwise.drivers.sim.programs import (
    Dies,
    Exits,
    Lives,
    Program,
    Raises,
    RunsForever,
    program_of,
)

SIGKILL = 9
FIRST_PID = 1001
MASTER_PORT = 29500

ORDERS = "orders"
GUARDIAN = "guardian"


@dataclass(slots=True, eq=False)
class VirtualProcess:
    """A process: what it is, and the whole truth about its life."""

    pid: int
    local_rank: int
    attempt: int
    program: Program
    born_at: Instant
    is_stray: bool = False
    is_alive: bool = True
    exit: ExitStatus | None = None
    failed_by_itself_at: Instant | None = None
    """When its own program failed it, as opposed to somebody's signal."""
    strays: list["VirtualProcess"] = field(default_factory=list)

    @property
    def kill_takes(self) -> Duration | None:
        """How long SIGKILL takes to end it; None for ever."""
        return self.program.stray_kill_takes if self.is_stray else self.program.kill_takes

    def last_progress(self, now: Instant) -> Instant:
        """When it last showed a sign of life."""
        every, silent_after = self.program.progress_every, self.program.silent_after
        if every is None:
            return self.born_at
        age = between(self.born_at, now)
        if silent_after is not None:
            age = min(age, silent_after)
        return Instant(self.born_at + age // every * every)


class SimulatedProcessHost:
    """A node in virtual time: a `rankwise.drivers.agent_dispatch.NodeHost`.

    Args:
        agenda, clock: of the world.
        lives: what each worker does in each attempt.
        faults: how slow, unordered and mortal the world is.
        chance: decides latencies.
        deliver: is told what happens.
    """

    def __init__(
        self,
        *,
        agenda: Agenda,
        clock: VirtualClock,
        lives: Lives,
        faults: Faults,
        chance: Random,
        deliver: Callable[[Stimulus], None],
    ) -> None:
        self._agenda = agenda
        self._clock = clock
        self._lives = lives
        self._faults = faults
        self._chance = chance
        self._deliver = deliver
        self._workers: dict[tuple[int, int], VirtualProcess] = {}
        self._unspawned: set[tuple[int, int]] = set()
        self._alive: dict[int, VirtualProcess] = {}
        self._last_arrival: dict[str | tuple[int, int], Instant] = {}
        self._pids_given = 0
        self.guardian_is_lost = False

    def spawn(self, local_rank: int, attempt: int) -> None:
        """Make a worker's process, or refuse to, as its program says."""
        program = program_of(self._lives, local_rank, attempt)
        self._unspawned.add((local_rank, attempt))
        self._order(
            lambda: self._agenda.after(
                program.start_takes, lambda: self._start_process(local_rank, attempt, program)
            )
        )

    def signal(self, local_rank: int, attempt: int, signal: int) -> None:
        """Send a signal to a worker; its strays have sessions of their own and do not get it."""
        self._order(lambda: self._take_signal(self._workers.get((local_rank, attempt)), signal))

    def look_for_progress(self, attempt: int) -> None:
        """Answer with the last sign of life of any living worker."""
        now = self._clock.now()
        seen = [
            process.last_progress(now)
            for process in self._alive.values()
            if process.attempt == attempt and not process.is_stray
        ]
        self._tell(GUARDIAN, ProgressLooked(attempt, max(seen, default=now)))

    def dump_stacks(self, attempt: int) -> None:
        """Let the workers print their stacks, which takes them a while."""
        self._order(
            lambda: self._agenda.after(
                self._faults.stacks_take, lambda: self._tell(GUARDIAN, StacksDumped(attempt))
            )
        )

    def tell(self, local_rank: int, attempt: int, word: str) -> None:
        """None of these offers to be called again, so nothing is ever said to them."""
        raise AssertionError(f"{word} for rank {local_rank} of {attempt}, which offers nothing")

    def sweep(self, attempt: int, spares: Sequence[int] = ()) -> None:
        """Kill what is left of the attempt, and what was yet to come of it."""
        assert not spares, "only workers that offer to be called again are spared"
        self._order(lambda: self._begin_sweep(attempt))

    def prepare_round(self, number: int) -> None:
        """The node is always fit."""
        self._deliver(RoundPrepared(number, MASTER_PORT))

    def begin_attempt(self, world: World) -> None:
        """Programs ask for no world."""

    def ask_ranks_to_stop(self, number: int, signal: int | None) -> None:
        """No program counts its steps: the signal is all that it is told."""

    def stop_ranks_at(self, number: int, step: int) -> None:
        """Nobody stands at a step."""

    def describe_failures(self, number: int, failures: tuple[Failure, ...]) -> None:
        """Nothing more is known than the machine says."""
        self._deliver(FailuresDescribed(number, failures))

    def lose_guardian(self) -> None:
        """The guardian is killed: its workers die with it, and nothing more is heard of them."""
        if self.guardian_is_lost:
            return
        self.guardian_is_lost = True
        self._unspawned.clear()
        for process in list(self._alive.values()):
            self._take_signal(process, SIGKILL)
        self._tell(GUARDIAN, GuardianLost("the guardian was killed"))

    def living(self) -> tuple[VirtualProcess, ...]:
        """Every process that is alive in truth, in the order of birth."""
        return tuple(self._alive.values())

    @property
    def latest_attempt(self) -> int:
        """Of all workers that there have been, the number of the last ones' attempt."""
        return max((attempt for _, attempt in self._workers), default=0)

    def worker(self, local_rank: int, attempt: int) -> VirtualProcess | None:
        """The truth about a worker; None if it was never born."""
        return self._workers.get((local_rank, attempt))

    def _order(self, action: Callable[[], None]) -> None:
        """Carry an order to the guardian, which obeys while it lives."""
        self._travel(ORDERS, lambda: None if self.guardian_is_lost else action())

    def _tell(self, channel: str | tuple[int, int], stimulus: Stimulus) -> None:
        self._travel(channel, lambda: self._deliver(stimulus))

    def _travel(self, channel: str | tuple[int, int], action: Callable[[], None]) -> None:
        latency = self._chance.randint(self._faults.latency_min, self._faults.latency_max)
        arrival = after(self._clock.now(), Duration(latency))
        arrival = max(arrival, self._last_arrival.get(channel, arrival))
        self._last_arrival[channel] = arrival
        self._agenda.at(arrival, action)

    def _start_process(self, local_rank: int, attempt: int, program: Program) -> None:
        key = (local_rank, attempt)
        if key not in self._unspawned:
            return
        self._unspawned.remove(key)
        if program.refusal:
            self._tell(key, WorkerRefused(local_rank, attempt, program.refusal))
            return
        process = self._new_process(local_rank, attempt, program, is_stray=False)
        self._workers[key] = process
        for _ in range(program.strays):
            process.strays.append(self._new_process(local_rank, attempt, program, is_stray=True))
        self._tell(key, WorkerSpawned(local_rank, attempt, process.pid))
        if not isinstance(program.ending, RunsForever):
            self._agenda.after(program.after, lambda: self._come_to_its_end(process))

    def _new_process(
        self, local_rank: int, attempt: int, program: Program, *, is_stray: bool
    ) -> VirtualProcess:
        pid = FIRST_PID + self._pids_given
        self._pids_given += 1
        now = self._clock.now()
        process = VirtualProcess(pid, local_rank, attempt, program, now, is_stray=is_stray)
        self._alive[pid] = process
        return process

    def _come_to_its_end(self, process: VirtualProcess) -> None:
        if not process.is_alive:
            return
        match process.program.ending:
            case Exits(code):
                if code != 0:
                    process.failed_by_itself_at = self._clock.now()
                self._end(process, code)
            case Dies(signal):
                process.failed_by_itself_at = self._clock.now()
                self._end(process, -signal)
            case Raises() as ending:
                self._raise(process, ending)
            case RunsForever():
                raise AssertionError("a program that runs for ever comes to no end")

    def _raise(self, process: VirtualProcess, ending: Raises) -> None:
        process.failed_by_itself_at = self._clock.now()
        error = ErrorRecord(
            type=ending.exception,
            message=ending.message,
            traceback=f"{ending.exception}: {ending.message}",
            raised_at=self._clock.now(),
            wall_ns=VIRTUAL_EPOCH_NS + self._clock.now(),
        )
        rank, attempt = process.local_rank, process.attempt
        self._tell((rank, attempt), WorkerReported(rank, attempt, error))
        self._agenda.after(ending.exit_takes, lambda: self._end(process, 1))

    def _take_signal(self, process: VirtualProcess | None, signal: int) -> None:
        if process is None or not process.is_alive:
            return
        if signal == SIGKILL:
            delay, code = process.kill_takes, -SIGKILL
        else:
            program = process.program
            delay = program.stop_takes
            code = -signal
            if program.stop_code is not None and process.failed_by_itself_at is None:
                code = program.stop_code
        if delay is not None:
            self._agenda.after(delay, lambda: self._end(process, code))

    def _end(self, process: VirtualProcess, code: int) -> None:
        if not process.is_alive:
            return
        process.is_alive = False
        process.exit = ExitStatus(code)
        del self._alive[process.pid]
        if process.is_stray or self.guardian_is_lost:
            return
        rank, attempt = process.local_rank, process.attempt
        exited = WorkerExited(rank, attempt, process.exit, self._clock.now())
        self._tell((rank, attempt), exited)

    def _begin_sweep(self, attempt: int) -> None:
        self._unspawned = {key for key in self._unspawned if key[1] != attempt}
        for process in list(self._alive.values()):
            if process.attempt == attempt:
                self._take_signal(process, SIGKILL)
        self._agenda.after(self._faults.sweep_takes, lambda: self._end_sweep(attempt))

    def _end_sweep(self, attempt: int) -> None:
        if self.guardian_is_lost:
            return
        survivors = sorted(p.pid for p in self._alive.values() if p.attempt == attempt)
        self._tell(GUARDIAN, Swept(attempt, tuple(survivors)))
