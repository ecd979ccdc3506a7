"""Simulated ranks as the processes of one node: a `rankwise.drivers.agent_dispatch.NodeHost`.

The machines cannot tell: they order ranks to be spawned and signalled, and are told of their
ends. Their clock is the world's virtual time, which every look moves on by a nanosecond, so that
what comes later is later.

A rank that waits for what never happens shows no sign of life. When no rank of the world can run,
only the nodes' timers are left; virtual time jumps from one to the next, until the gangs look for
a sign of life. Then the ledger is asked who is to blame, as it is when a rank dies of what another
has done; only where it cannot tell the gangs have hung.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from signal import SIGINT

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.failure import ErrorRecord, ExitStatus, Failure, FailureCause
from rankwise.base.root_cause import may_be_of_others, tells_of_time
from rankwise.base.units import MICROSECOND, Duration, Instant, after, between, format_duration
from rankwise.core.agent.vocabulary import (
    FailuresDescribed,
    RanksStood,
    RoundPrepared,
    StepReported,
    Stimulus,
)
from rankwise.core.gang.vocabulary import (
    DumpsLooked,
    ProgressLooked,
    RanksBlamed,
    RecoveryMessage,
    RecoveryMessageSent,
    RecoveryOrder,
    StacksDumped,
    Swept,
    WorkerExited,
    WorkerReported,
    WorkerSpawned,
)
from rankwise.core.ledger import Blame
from rankwise.core.rendezvous.vocabulary import CallRecordsWanted, InquiryAnswered, World
from rankwise.core.watch.vocabulary import LookOrder
from rankwise.drivers.real.hosting.environments import inherited_environment
from rankwise.drivers.real.recall_line import AgentWord
from rankwise.drivers.real.report_pipe import ErrorReported, Exiting, ReportPipe
from rankwise.drivers.real.worker import bootstrap
from rankwise.drivers.real.worker.call_ring import SWITCH_VARIABLE
from rankwise.launch.options import MASTER_PORT
from rankwise.launch.run.environment import (
    VARIABLES_OF_RANKS,
    worker_environment,
)
from rankwise.launch.run.job import Executable, Function, Job, Module, Script
from rankwise.launch.run.node_ranks import NodeRanks
from rankwise.launch.run.search_path import search_path
from rankwise.simranks.run.rank_records import RankRecords
from rankwise.simranks.run.recovery import SimulatedLine, line_of
from rankwise.simranks.world.equals import NotEqual
from rankwise.simranks.world.per_rank_state import RankProcess
from rankwise.simranks.world.ranks import SIGKILL, Rank, RankEnded
from rankwise.simranks.world.world import SIMULATED_VARIABLE, SimulatedWorld

_LONG_AGO = Instant(0)
_ERROR_FILE = bootstrap.ERROR_FILE_VARIABLE


class WorldClock:
    """The time of a simulated world; a `rankwise.ports.Clock`.

    Its calendar is the real one: it tells people when something happened, and the virtual time that
    a rank has slept, or in which a hang was found, has not passed for people.
    """

    def __init__(self, world: SimulatedWorld, wall_ns: Callable[[], int]) -> None:
        self._scheduler = world.scheduler
        self._wall_ns = wall_ns

    def now(self) -> Instant:
        """Virtual time; later at each look."""
        self._scheduler.now = Instant(self._scheduler.now + 1)
        return self._scheduler.now

    def wall_ns(self) -> int:
        """The calendar of this machine."""
        return self._wall_ns()


class SimulatedRanks:
    """Makes, signals and ends the ranks of one agent.

    Args:
        job: what each node runs; its gang has the ranks of one node.
        node: the number of the agent's node.
        node_count: how many nodes the agent stands for; more than one if it is alone.
        world: where the ranks live.
        records: what the run keeps of them.
        describe: adds to a failure what only this world knows of it.
        note_failures: is told of all that a gang has, described.
        deliver: is told what becomes of them.
    """

    def __init__(
        self,
        job: Job,
        *,
        node: int,
        node_count: int,
        world: SimulatedWorld,
        records: RankRecords,
        clock: WorldClock,
        describe: Callable[[Failure], Failure],
        note_failures: Callable[[tuple[Failure, ...]], None],
        deliver: Callable[[Stimulus], None],
    ) -> None:
        self._job = job
        self._node = node
        self._node_count = node_count
        self._world = world
        self._records = records
        self._clock = clock
        self._describe = describe
        self._note_failures = note_failures
        self._deliver = deliver
        self._place: World | None = None
        self._inherited = inherited_environment()
        self._path = tuple(search_path(Function("", b""), os.environ))
        self._ranks: dict[int, Rank] = {}
        self._over: set[int] = set()
        self._is_collecting = False

    def prepare_round(self, number: int) -> None:
        """Simulated ranks are always fit."""
        # Nothing listens there: it is for programs that print it.
        self._deliver(RoundPrepared(number, self._job.master_port or MASTER_PORT))

    def begin_attempt(self, world: World) -> None:
        """Let the next ranks live in this world."""
        self._place = world
        # Those that have yielded are called again; all others are of the attempt that is over.
        self._ranks = {place: rank for place, rank in self._ranks.items() if rank.is_between_worlds}
        self._over = set()
        self._is_collecting = False
        self._records.begin_attempt(world.round, world.size)
        self._records.accused.append(self._accuse)

    def spawn(self, local_rank: int, attempt: int) -> None:
        """Make a rank."""
        assert self._place is not None, "ranks are spawned in a world"
        number, process = self._settle(local_rank, self._place)

        def note(error: BaseException) -> None:
            if rank.is_given_up:  # it goes on in a world that is over: its end is of no interest
                raise RankEnded(-SIGKILL)
            self._records.note_origin(rank.number, error)

        def note_exit(place: str) -> None:
            self._records.exits[rank.number] = place

        reporter = _Reporter(note, partial(self._report, local_rank), note_exit)
        rank = self._world.spawn(number, process, lambda: self._live(rank, reporter))
        if self._job.restarts_allowed:
            SimulatedLine(rank, partial(self._on_recovery_message, local_rank))
        self._ranks[local_rank] = rank
        self._deliver(WorkerSpawned(local_rank, attempt, os.getpid()))

    def _settle(self, local_rank: int, world: World) -> tuple[int, RankProcess]:
        """The number of a rank in a world, and what its process has there."""
        number = world.first_rank + local_rank
        self._records.nodes[number] = self._node + local_rank // self._job.gang.size
        environment = self._environment(number, world)
        return number, RankProcess(environment=environment, path=self._path)

    def _report(self, local_rank: int, error: ErrorRecord) -> None:
        """A rank dies of this exception: tell who is to blame, if it is another one."""
        assert self._place is not None, "ranks report in a world"
        clock = self._clock
        error = msgspec.structs.replace(error, raised_at=clock.now(), wall_ns=clock.wall_ns())
        rank = self._place.first_rank + local_rank
        self._records.errors[rank] = error
        if may_be_of_others(error):
            # Before the exception is told: the first failure that the gang gets is its root cause.
            self._records.judge(rank, patience_is_over=tells_of_time(error))
        self._deliver(WorkerReported(local_rank, self._place.round, error))

    def _on_recovery_message(
        self, local_rank: int, word: RecoveryMessage, recall_timeout: Duration
    ) -> None:
        assert self._place is not None, "ranks speak in a world"
        self._deliver(RecoveryMessageSent(local_rank, self._place.round, word, recall_timeout))

    def signal(self, local_rank: int, attempt: int, signal: int) -> None:
        """Send a rank a signal, unless it is on its way to a step to stop at."""
        if self._place is None or attempt != self._place.round:
            return
        rank = self._ranks[local_rank]
        # One that counts its steps learns of the stop by `should_stop`: SIGTERM would end it
        # earlier.
        if signal == SIGKILL or not (self._is_collecting and rank.number in self._world.steps):
            rank.signal(signal)

    def kill_all(self) -> None:
        """The node is gone, and all its ranks with it."""
        for rank in self._ranks.values():
            rank.signal(SIGKILL)

    def losses(self, now: Instant) -> list[Failure]:
        """What a power cut now is to those of its ranks that live."""
        if self._place is None:
            return []
        return [
            msgspec.structs.replace(
                self.described(
                    Failure(
                        local_rank=local_rank,
                        attempt=self._place.round,
                        cause=FailureCause.SIGNALED,
                        at=now,
                        exit=ExitStatus(-SIGKILL),
                    )
                ),
                signal_sender=f"a fault (--faults) that killed node {self._node}",
            )
            for local_rank, rank in self._ranks.items()
            if not rank.is_over
        ]

    def ask_ranks_to_stop(self, number: int, signal: int | None) -> None:  # noqa: ARG002  # the gang's
        """Have the ranks that count their steps all stop before the same one.

        Until the nodes have agreed on it time passes: so the first node that asks chooses for all.
        """
        world = self._world
        if world.steps:
            self._is_collecting = True
            if world.last_step is None:
                # The farthest step: a rank cannot go back, and the others can still reach it.
                world.last_step = max(world.steps.values())
            self._deliver(RanksStood(number, world.last_step))

    def stop_ranks_at(self, number: int, step: int) -> None:  # noqa: ARG002  # there is one round
        """Let the ranks go on to that step."""
        self._world.last_step = step

    def describe_failures(self, number: int, failures: tuple[Failure, ...]) -> None:
        """Find out what only this world knows."""
        described = tuple(self.described(failure) for failure in failures)
        self._note_failures(described)
        self._deliver(FailuresDescribed(number, described))

    def tell_call_records(self, wanted: CallRecordsWanted) -> None:
        """Not asked: who waits for whom is known here without any exchange."""

    def on_inquiry_answered(self, answered: InquiryAnswered) -> None:
        """Nothing is asked, so nothing is answered."""

    def look_at_ranks(self, order: LookOrder) -> None:
        """Never ordered: who waits for whom is known here when it comes about."""

    def look_for_progress(self, attempt: int) -> None:
        """If no rank can continue or makes progress, they have hung, and one may be to blame."""
        now, records = self._clock.now(), self._records
        # The gang asks again when its time-out, the records' interval, has passed since.
        last_progress = after(now, Duration(records.watch.look_interval - records.look_interval))
        if self._world.scheduler.next_instant is None:
            spare = Duration(records.patience - records.look_interval)
            last_progress = after(records.last_alive, spare)
        elif (still := records.watch.hung_for(now)) is not None:
            told = format_duration(still)
            records.hang = f"no progress for {told} of virtual time: ranks sleep, poll or wait"
            last_progress = _LONG_AGO
        # The gang compares a bit later: then it must not be first to find that time is over.
        is_over = between(last_progress, now) + MICROSECOND >= records.look_interval
        if is_over and records.judge(None, patience_is_over=True) is not None:
            return  # the agents of those that are to blame know it
        self._deliver(ProgressLooked(attempt, last_progress))

    def look_for_dumps(self, attempt: int) -> None:
        """Answer that no core is written: a rank that is killed has died at once."""
        self._deliver(DumpsLooked(attempt))

    def dump_stacks(self, attempt: int) -> None:
        """Find out where each rank stands, and what it waits for."""
        for rank in self._ranks.values():
            self._records.note_place(rank)
            self._records.note_wait(rank)
        self._deliver(StacksDumped(attempt))

    def find_stuck(self, rank: Rank, hang_timeout: Duration) -> None:
        """A rank does not let others run: if it is one of these, they have hung."""
        if self._place is not None and rank in self._ranks.values():
            self._records.note_place(rank)
            silent_since = Instant(self._clock.now() - hang_timeout)
            self._deliver(ProgressLooked(self._place.round, silent_since))

    def tell(self, local_rank: int, attempt: int, word: str) -> None:  # noqa: ARG002  # the world's
        """Say a word to a rank that can be called again; with AGAIN it enters the present world."""
        rank = self._ranks.get(local_rank)
        # A rank may end while the word is on its way: then nothing is left to read it.
        line = None if rank is None or rank.is_over else line_of(rank)
        if rank is None or line is None:
            return
        told = AgentWord(RecoveryOrder(word))
        if told.word is RecoveryOrder.AGAIN:
            assert self._place is not None, "ranks are called in a world"
            number, process = self._settle(local_rank, self._place)
            self._world.rejoin(rank, number, process)
            names = (*sorted(VARIABLES_OF_RANKS & process.environment.keys()), _ERROR_FILE)
            variables = {name: process.environment.get(name) for name in names}
            told = AgentWord(RecoveryOrder.AGAIN, variables)
        line.tell(told)

    def sweep(self, attempt: int, spares: Sequence[int] = ()) -> None:
        """Nothing outlives a rank that is a thread."""
        self._deliver(Swept(attempt, (), tuple(spares)))

    def notice_ends(self) -> None:
        """Tell of the ranks that have ended since the last look."""
        if self._place is None:
            return
        attempt = self._place.round  # the next one may begin with the last word about this one
        ended = [
            (local_rank, rank.number, rank.exit_code)
            for local_rank, rank in self._ranks.items()
            if rank.exit_code is not None and local_rank not in self._over
        ]
        for local_rank, number, code in ended:
            self._over.add(local_rank)
            self._records.end_rank(number, code)
            if len(self._over) == self._place.slots and self._world.steps:
                # Before the last exit: with that the gang is over, and its progress must be known.
                self._deliver(StepReported(attempt, max(self._world.steps.values())))
            self._deliver(WorkerExited(local_rank, attempt, ExitStatus(code), self._clock.now()))

    def described(self, failure: Failure) -> Failure:
        """The same failure with its rank, and with what only this world knows of it."""
        if failure.host or self._place is None:
            return failure  # described already
        rank = self._place.first_rank + failure.local_rank
        return self._describe(msgspec.structs.replace(failure, rank=rank))

    def _accuse(self, blame: Blame) -> None:
        """Blame those that are ours."""
        assert self._place is not None, "they live in a world"
        ours = tuple(
            local_rank for local_rank, rank in self._ranks.items() if rank.number in blame.blamed
        )
        if ours:
            self._deliver(
                RanksBlamed(ours, self._place.round, blame.text, blame.blamed, blame.mismatch)
            )

    def _environment(self, rank: int, world: World) -> Mapping[str, str]:
        job, per_node = self._job, self._job.gang.size
        node = rank // per_node
        place = NodeRanks(
            node_rank=node,
            node_count=self._node_count * len(world.members),
            first_rank=node * per_node,
            size=world.size,
            master_addr=job.master_addr,
            master_port=job.master_port or MASTER_PORT,
            restarts=world.restarts,
        )
        environment = worker_environment(
            job,
            place,
            local_rank=rank % per_node,
            attempt=world.round,
            inherited=self._inherited,
        )
        return {
            **environment,
            SIMULATED_VARIABLE: "1",
            SWITCH_VARIABLE: "0",  # the simulation knows itself who waits for whom
            _ERROR_FILE: self._records.destinations.error_files.get(rank, ""),
        }

    def _live(self, rank: Rank, reporter: "_Reporter") -> int:
        """Run the program, in the thread of the rank; returns its exit code."""
        match self._job.program:
            case Script(path=path, args=args, source=bytes(source)):
                descriptors = {bootstrap.PAYLOAD_VARIABLE: os.memfd_create("program")}
                os.write(descriptors[bootstrap.PAYLOAD_VARIABLE], source)
                return self._run(("script", path, list(args)), descriptors, reporter)
            case Script(path=path, args=args):
                return self._run(("script", path, list(args)), {}, reporter)
            case Module(name=name, args=args):
                return self._run(("module", name, list(args)), {}, reporter)
            case Function(payload=payload):
                return self._call(rank, payload, reporter)
            case Executable(path=path):
                raise ConfigError(f"{path} is not a Python program: it cannot be simulated")

    def _call(self, rank: Rank, payload: bytes, reporter: "_Reporter") -> int:
        """Call a function as workers do, with files in memory where they have pipes."""
        question, answer = os.memfd_create("payload"), os.memfd_create("result")
        os.write(question, payload)
        sending = os.dup(answer)
        descriptors = {bootstrap.PAYLOAD_VARIABLE: question, bootstrap.RESULT_VARIABLE: sending}
        try:
            return self._run(("function",), descriptors, reporter)
        finally:
            # From the beginning: both descriptors share one offset, which the sender has moved.
            frame = os.pread(answer, os.fstat(answer).st_size, 0)
            os.close(answer)
            if frame:
                self._records.results[rank.number] = frame
            else:
                os.close(sending)  # the sender of a result closes it

    @staticmethod
    def _run(
        program: "bootstrap.Program", descriptors: Mapping[str, int], reporter: "_Reporter"
    ) -> int:
        code, uncaught = bootstrap.run_to_code(
            program, descriptors, reporter, (RankEnded, NotEqual)
        )
        # As Python ends a process: a shell tells Ctrl-C by the signal, not by a code.
        return -SIGINT if isinstance(uncaught, KeyboardInterrupt) else code


class _Reporter(bootstrap.Reporter):
    """Tells of exceptions in the words of a real worker, without a pipe."""

    def __init__(
        self,
        on_exception: Callable[[BaseException], None],
        on_error: Callable[[ErrorRecord], None],
        on_exiting: Callable[[str], None],
    ) -> None:
        super().__init__(0)
        self._on_exception = on_exception
        self._on_error = on_error
        self._on_exiting = on_exiting

    def report(self, error: BaseException) -> None:
        """Tell of an exception, whose frames tell where."""
        self._on_exception(error)
        super().report(error)

    def announce(self) -> None:
        """Do nothing: a thread's stacks need no signal."""

    def tell_exiting(self, ending: SystemExit) -> None:
        """Tell of a program's own; what stands for the end of a process leaves no place."""
        if not isinstance(ending, RankEnded):
            super().tell_exiting(ending)

    def _write(self, record: str) -> None:
        for report in ReportPipe().feed(f"\x1e{record}\n".encode("ascii")):
            if isinstance(report, ErrorReported):
                self._on_error(report.error)
            elif isinstance(report, Exiting):
                self._on_exiting(report.place)
