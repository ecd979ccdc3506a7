"""Simulated ranks as the processes of one node: a `rankwise.drivers.agent_dispatch.NodeHost`.

The machines cannot tell: they order ranks to be spawned and signalled, and are told of their
ends. Their clock is the world's virtual time, which every look moves on by a nanosecond, so that
what comes later is later.

A rank that waits for what never happens shows no sign of life. When the world has come to rest,
virtual time jumps to the gang's next look for one, which at once finds that the gang has hung.
"""

import os
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.failure import ErrorRecord, ExitStatus, Failure
from rankwise.base.units import Instant
from rankwise.core.agent.vocabulary import (
    FailuresDescribed,
    RanksStood,
    RoundPrepared,
    StepTold,
    Stimulus,
)
from rankwise.core.gang.vocabulary import (
    ProgressLooked,
    StacksDumped,
    Swept,
    WorkerExited,
    WorkerReported,
    WorkerSpawned,
)
from rankwise.core.rendezvous.vocabulary import World as AgreedWorld
from rankwise.drivers.real.worker import bootstrap
from rankwise.launch.environment import inherited_environment, worker_environment
from rankwise.launch.job import Executable, Function, Job, Module, Script
from rankwise.launch.log_layout import Destinations, LogPlaces
from rankwise.launch.on_sim.output import Output
from rankwise.launch.search_path import search_path
from rankwise.launch.world import World as Place
from rankwise.sim.rehearsal.belongings import RankProcess
from rankwise.sim.rehearsal.meetings import lost
from rankwise.sim.rehearsal.places import places_of
from rankwise.sim.rehearsal.scheduler import SIGKILL, Rank, RankEnded
from rankwise.sim.rehearsal.world import SIMULATED_VARIABLE, World

MASTER_PORT = 29500
"""Nothing listens there: torch's, for programs that print it."""


class VirtualClock:
    """The time of a simulated world; a `rankwise.ports.Clock`."""

    def __init__(self, world: World, begun_wall_ns: int) -> None:
        self._scheduler = world.scheduler
        self._begun_wall_ns = begun_wall_ns

    def now(self) -> Instant:
        """Virtual time; later at each look."""
        self._scheduler.now = Instant(self._scheduler.now + 1)
        return self._scheduler.now

    def wall_ns(self) -> int:
        """The calendar at the begin of the run, and virtual time since."""
        return self._begun_wall_ns + self._scheduler.now


class SimulatedRanks:
    """Makes, signals and ends the ranks of one run.

    Args:
        job: what each node runs; its gang has the ranks of one node.
        node_count: how many nodes there are.
        world: where the ranks live.
        output: what they write to.
        places: where their log files go.
        describe: adds to a failure what only this world knows of it.
        deliver: is told what becomes of them.

    Attributes:
        results: the result frame of each function rank, by number.
        stacks: where hanging ranks stood, and `waits` what for, by number.
        destinations: the files of the present attempt.
    """

    def __init__(
        self,
        job: Job,
        node_count: int,
        *,
        world: World,
        output: Output,
        places: LogPlaces,
        clock: VirtualClock,
        describe: Callable[[Failure], Failure],
        deliver: Callable[[Stimulus], None],
    ) -> None:
        self._job = job
        self._node_count = node_count
        self._world = world
        self._output = output
        self._places = places
        self._clock = clock
        self._describe = describe
        self._deliver = deliver
        self._attempt = -1
        self._restarts = 0
        self._inherited = inherited_environment()
        self._path = tuple(search_path(Function("", b""), os.environ))
        self._over: set[int] = set()
        self._is_stuck = False
        self._is_gathering = False
        self.size = node_count * job.gang.size
        self.results: dict[int, bytes] = {}
        self.stacks: dict[int, str] = {}
        self.waits: dict[int, str] = {}
        self.destinations = Destinations()

    def prepare_round(self, number: int) -> None:
        """Simulated ranks are always fit."""
        self._deliver(RoundPrepared(number, self._job.master_port or MASTER_PORT))

    def begin_attempt(self, world: AgreedWorld) -> None:
        """Let the next ranks live in this world."""
        self._attempt, self._restarts = world.round, world.restarts
        self._over = set()
        self._is_stuck = self._is_gathering = False
        self.results, self.stacks, self.waits = {}, {}, {}
        self._world.begin_attempt()
        self.destinations = self._places.prepare(world.round)
        self._output.begin_attempt(self.size, self.destinations, self._job.role, self.local_rank)

    def spawn(self, local_rank: int, attempt: int) -> None:
        """Make a rank."""
        process = RankProcess(environment=self._environment(local_rank), path=self._path)
        reporter = _Reporter(
            lambda error: self._deliver(
                WorkerReported(
                    local_rank,
                    attempt,
                    msgspec.structs.replace(error, raised_at=self._clock.now()),
                )
            )
        )
        self._world.spawn(local_rank, process, lambda: self._live(local_rank, reporter))
        self._deliver(WorkerSpawned(local_rank, attempt, os.getpid()))

    def signal(self, local_rank: int, attempt: int, signal: int) -> None:
        """Send a rank a signal, unless it is on its way to a step to stop at."""
        is_stepping = self._is_gathering and local_rank in self._world.steps
        if attempt == self._attempt and (signal == SIGKILL or not is_stepping):
            self._world.scheduler.ranks[local_rank].signal(signal)

    def ask_ranks_to_stop(self, number: int, signal: int | None) -> None:  # noqa: ARG002  # the gang's
        """Have the ranks that count their steps all stop before the same one."""
        if self._world.steps:
            self._is_gathering = True
            self._deliver(RanksStood(number, max(self._world.steps.values())))

    def stop_ranks_at(self, number: int, step: int) -> None:  # noqa: ARG002  # there is one round
        """Let the ranks go on to that step."""
        self._world.last_step = step

    def describe_failures(self, number: int, failures: tuple[Failure, ...]) -> None:
        """Find out what only this world knows."""
        described = tuple(self._describe(failure) for failure in failures)
        self._deliver(FailuresDescribed(number, described))

    def look_for_progress(self, attempt: int) -> None:
        """As long as anything can happen there is progress; a rank that is stuck prevents it."""
        now = self._clock.now()
        is_alive = self._world.scheduler.next_instant is not None and not self._is_stuck
        self._deliver(ProgressLooked(attempt, now if is_alive else Instant(0)))

    def dump_stacks(self, attempt: int) -> None:
        """Find out where each rank stands, and what it waits for."""
        self._world.note_circle()
        for number, rank in self._world.scheduler.ranks.items():
            self._note_place(rank)
            if rank.waits_for is not None:
                self.waits[number] = rank.waits_for.told()
            elif not rank.has_begun:
                self.waits[number] = "its first turn"
        self._deliver(StacksDumped(attempt))

    def find_stuck(self, rank: Rank) -> None:
        """A rank does not let others run: that is no sign of life."""
        self._is_stuck = True
        self._note_place(rank)

    def _note_place(self, rank: Rank) -> None:
        """Note the user's part of a rank's stack, in the form that faulthandler has."""
        lines = [
            f'  File "{place.code.co_filename}", line {place.line} in {place.code.co_name}\n'
            for place in places_of(rank.stack())
        ]
        if lines:
            head = "Current thread 0x0 (most recent call first):\n"
            self.stacks[rank.number] = head + "".join(lines)

    def tell(self, local_rank: int, attempt: int, word: str) -> None:
        """None of these offers to be called again, so nothing is ever said to them."""
        raise AssertionError(f"{word} for rank {local_rank} of {attempt}, which offers nothing")

    def sweep(self, attempt: int, spares: Sequence[int] = ()) -> None:
        """Nothing outlives a rank that is a thread."""
        assert not spares, "only workers that offer to be called again are spared"
        self._deliver(Swept(attempt))

    def notice_ends(self) -> None:
        """Tell of the ranks that have ended since the last look."""
        for number, rank in self._world.scheduler.ranks.items():
            if rank.exit_code is None or number in self._over:
                continue
            self._over.add(number)
            self._output.end_rank(number)
            for group in self._world.groups.values():
                if group.gives_up:
                    group.lose(number, lost(number, rank.exit_code))
            if len(self._over) == self.size and self._world.steps:
                self._deliver(StepTold(self._attempt, max(self._world.steps.values())))
            status = ExitStatus(rank.exit_code)
            self._deliver(WorkerExited(number, self._attempt, status, self._clock.now()))

    def local_rank(self, rank: int) -> int:
        """A rank's number on its node."""
        return rank % self._job.gang.size

    def _environment(self, rank: int) -> Mapping[str, str]:
        job, per_node = self._job, self._job.gang.size
        node = rank // per_node
        place = Place(
            node_rank=node,
            node_count=self._node_count,
            first_rank=node * per_node,
            size=self.size,
            master_addr=job.master_addr,
            master_port=job.master_port or MASTER_PORT,
            restarts=self._restarts,
        )
        environment = worker_environment(
            job,
            place,
            local_rank=rank % per_node,
            attempt=self._attempt,
            inherited=self._inherited,
        )
        return {
            **environment,
            SIMULATED_VARIABLE: "1",
            bootstrap.ERROR_FILE_VARIABLE: self.destinations.error_files.get(rank, ""),
        }

    def _live(self, rank: int, reporter: "_Reporter") -> int:
        """Run the program, in the thread of the rank; returns its exit code."""
        match self._job.program:
            case Script(path=path, args=args):
                return self._run(("script", path, list(args)), {}, reporter)
            case Module(name=name, args=args):
                return self._run(("module", name, list(args)), {}, reporter)
            case Function(payload=payload):
                return self._call(rank, payload, reporter)
            case Executable(path=path):
                raise ConfigError(f"{path} is not a Python program: it cannot be simulated")

    def _call(self, rank: int, payload: bytes, reporter: "_Reporter") -> int:
        """Call a function as workers do, with files in memory where they have pipes."""
        question, answer = os.memfd_create("payload"), os.memfd_create("result")
        os.write(question, payload)
        sending = os.dup(answer)
        descriptors = {bootstrap.PAYLOAD_VARIABLE: question, bootstrap.RESULT_VARIABLE: sending}
        try:
            return self._run(("function",), descriptors, reporter)
        finally:
            frame = os.pread(answer, os.fstat(answer).st_size, 0)
            os.close(answer)
            if frame:
                self.results[rank] = frame
            else:
                os.close(sending)  # the sender of a result closes it

    @staticmethod
    def _run(
        program: "bootstrap.Program", descriptors: Mapping[str, int], reporter: "_Reporter"
    ) -> int:
        code, _ = bootstrap.run_to_code(program, descriptors, reporter, (RankEnded,))
        return code


class _Reporter(bootstrap.Reporter):
    """Tells of exceptions in the words of a real worker, without a pipe."""

    def __init__(self, on_error: Callable[[ErrorRecord], None]) -> None:
        super().__init__(0)
        self._on_error = on_error

    def announce(self) -> None:
        """Nobody asks a thread for its stacks."""

    def _write(self, record: str) -> None:
        self._on_error(msgspec.json.decode(record, type=ErrorRecord))
