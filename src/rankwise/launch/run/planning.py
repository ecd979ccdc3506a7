"""From a job to each worker: its command, its environment, its descriptors, its streams.

The planner owns what a run's workers share and processes cannot: the payload of a function, the
memory segment of an attempt, the log files. Everything that differs between start methods is
decided here, so that neither the gang nor the process host knows about them.

An order is what goes to the guardian or to the fork server (docs/development/architecture.md,
"Frames"). A guardian executes a command line; a fork server already is a Python process and is
told which program to become.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any, Self, cast

from rankwise.drivers.real.hosting.connection import MARK_VARIABLE
from rankwise.drivers.real.hosting.environments import (
    LISTENER_VARIABLE,
    VARIABLES_AMONG_NODES,
    inherited_environment,
)
from rankwise.drivers.real.logs.console import Console
from rankwise.drivers.real.logs.file import DiskComplaints
from rankwise.drivers.real.logs.pump import StreamPump
from rankwise.drivers.real.recall_line import MASTER_VARIABLE
from rankwise.drivers.real.segments import SEGMENT_VARIABLE, STOP_VARIABLE, Segment
from rankwise.drivers.real.worker import boot_program
from rankwise.drivers.real.worker_link import CallPlan, WorkerPlan, WorkerStream
from rankwise.launch.looking.log_readers import FollowedStream, LogReaders, StreamName
from rankwise.launch.run.compiled_script import compiled_script
from rankwise.launch.run.environment import (
    VARIABLES_OF_RANKS,
    worker_environment,
)
from rankwise.launch.run.job import Executable, Function, Job, Module, Script, StartMethod, Streams
from rankwise.launch.run.log_layout import Destinations, LogPlaces
from rankwise.launch.run.master_port import listen_at
from rankwise.launch.run.node_ranks import NodeRanks
from rankwise.launch.run.open_files import ORIGINAL_NOFILE
from rankwise.launch.run.private_places import NESTED_RUNS_VARIABLE
from rankwise.launch.run.rank_sinks import RankSinks

if TYPE_CHECKING:
    import socket


class JobPlanner:
    """Plans the workers of one run.

    Args:
        job: what they run.
        layout: where their files go.
        console: where the rest goes.
        complaints: tells of disks that are full.
        mark: what finds stray processes of this run.
        nested_runs: where runs inside the workers put their private directories.
        ranks: where this node stands among the others; changed between attempts.
    """

    def __init__(
        self,
        job: Job,
        *,
        layout: LogPlaces,
        console: Console,
        complaints: DiskComplaints,
        mark: str,
        nested_runs: str,
        ranks: NodeRanks,
    ) -> None:
        self.ranks = ranks
        self._job = job
        self._layout = layout
        self._sinks = RankSinks(job.logs, job.role, console, complaints)
        self._mark = mark
        self._nested_runs = nested_runs
        self._inherited = inherited_environment()
        self._attempt = -1
        self._exit = ExitStack()
        self._exit.callback(self._sinks.end_attempt)
        self._attempt_exit = self._exit.enter_context(ExitStack())
        self._segment: Segment | None = None
        self.stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Is readable when a rank was sent SIGTERM and asks for the whole run to be stopped."""
        self._exit.callback(os.close, self.stop_fd)
        self.log_readers = LogReaders()
        """Those who read along what ranks write."""
        self.collectives_fd = -1
        """The socket where ranks of all nodes come to be connected, if rank 0 is on this one."""
        self._listener: socket.socket | None = None
        """Listens at MASTER_PORT until rank 0 has it, where ranks of the last attempt live on."""
        self._recovers = job.restarts_allowed > 0
        self._payload_fd = self._store_payload()
        self.destinations = self._earlier = Destinations()
        self._sigterm_takers: set[int] = set()
        """The ranks of the attempt before that took SIGTERM for a request to stop, and still do."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_listener()
        self._attempt_exit.close()
        self._exit.close()

    @property
    def private_path(self) -> str:
        """A folder of this run's own, perhaps yet to be made; it vanishes with the agent."""
        return self._nested_runs

    def prepare_attempt(self, attempt: int) -> None:
        """Make what the workers of an attempt share: directories, memory, filters.

        Raises:
            ConfigError: the run's log directory cannot be made.
        """
        self._close_listener()
        self._attempt_exit.close()
        self._attempt = attempt
        self.destinations = self._layout.prepare(attempt)
        self._segment = self._attempt_exit.enter_context(Segment.create(self._job.gang.size))
        self._sinks.begin_attempt(self.destinations)

    def plan(self, local_rank: int, attempt: int) -> WorkerPlan:
        """Say how to make a worker; the first of an attempt prepares what all of it share.

        Raises:
            ConfigError: the worker cannot get what the job promises it.
            OSError: the attempt's directories or memory could not be made.
        """
        if attempt != self._attempt:
            self.prepare_attempt(attempt)
        job = self._job
        environment = worker_environment(
            job,
            self.ranks,
            local_rank=local_rank,
            attempt=attempt,
            inherited=self._inherited,
        )
        environment[MARK_VARIABLE] = self._mark
        environment[NESTED_RUNS_VARIABLE] = self._nested_runs
        environment["TORCHELASTIC_ERROR_FILE"] = self.destinations.error_files.get(local_rank, "")
        order = _order(job, local_rank, environment)
        is_function = isinstance(job.program, Function)
        return WorkerPlan(
            order=order,
            descriptors=self._descriptors(local_rank),
            stream_count=2 * job.gang.size,
            reports=not isinstance(job.program, Executable),
            returns=is_function,
            gives=self._take_listener(local_rank),
            recovers=self._recovers,
        )

    def call_again(self, local_rank: int, attempt: int) -> CallPlan:
        """Say in which world a worker that lives on is called again.

        It goes on writing to the files of the attempt that it was made for; workers that are made
        for this attempt get files of their own.

        Raises:
            OSError: there is no memory for the workers to share.
        """
        if attempt != self._attempt:
            self._continue_as(attempt)
        assert self._segment is not None, "made with the attempt"
        if local_rank in self._sigterm_takers:
            self._segment.note_sigterm_taker(local_rank)
        for new, old in zip(_files_of(self.destinations), _files_of(self._earlier), strict=True):
            if local_rank in old:
                new[local_rank] = old[local_rank]
        environment = worker_environment(
            self._job, self.ranks, local_rank=local_rank, attempt=attempt, inherited={}
        )
        descriptors = {SEGMENT_VARIABLE: self._segment.fd}
        if self.collectives_fd >= 0 and local_rank == 0:
            descriptors[LISTENER_VARIABLE] = self.collectives_fd
        names = (*sorted(VARIABLES_OF_RANKS & environment.keys()), *VARIABLES_AMONG_NODES)
        variables = {name: environment.get(name) for name in names}
        return CallPlan(variables, descriptors, self._take_listener(local_rank))

    def _continue_as(self, attempt: int) -> None:
        """Begin an attempt some of whose workers are those of the one before."""
        assert self._segment is not None, "there was an attempt before"
        segment = self._attempt_exit.enter_context(Segment.create(self._job.gang.size))
        self._sigterm_takers = self._segment.sigterm_takers()
        self._segment.close()
        self._segment = segment
        self._close_listener()
        if self.ranks.node_rank == 0:
            self._listener = listen_at(self.ranks.master_port)
        self._attempt = attempt
        self._earlier = self.destinations
        fresh = self._layout.prepare(attempt)
        self.destinations = Destinations(
            stdouts=dict(fresh.stdouts),
            stderrs=dict(fresh.stderrs),
            tee_stdouts=dict(fresh.tee_stdouts),
            tee_stderrs=dict(fresh.tee_stderrs),
            error_files=dict(fresh.error_files),
            filtered_stdout=self._earlier.filtered_stdout,
            filtered_stderr=self._earlier.filtered_stderr,
        )
        self._sinks.continue_with(self.destinations)

    def _take_listener(self, local_rank: int) -> dict[str, int]:
        """Let go of what rank 0 is given, so that ranks that wait there see its death."""
        listener = self._listener if local_rank == 0 else None
        if listener is None:
            return {}
        self._listener = None
        return {MASTER_VARIABLE: listener.detach()}

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def make_pumps(
        self, local_rank: int, stdout_fd: int, stderr_fd: int
    ) -> tuple[WorkerStream, WorkerStream]:
        """Make the pumps of a worker's streams, with every sink that the log plan asks for."""
        return (
            self._make_stream(local_rank, stdout_fd, Streams.OUT),
            self._make_stream(local_rank, stderr_fd, Streams.ERR),
        )

    @property
    def segment(self) -> Segment | None:
        """The memory that the workers of the present attempt share."""
        return self._segment

    def variable(self, name: str) -> str | None:
        """What all ranks find in their environment under that name, if anything."""
        return self._job.environment.get(name, self._inherited.get(name))

    def on_worker_over(self, local_rank: int) -> None:
        """Wake the ranks that wait for this one in a collective."""
        if self._segment is not None:
            self._segment.mark_dead(local_rank)

    def _descriptors(self, local_rank: int) -> Mapping[int | str, int]:
        assert self._segment is not None, "an attempt is prepared before its workers are planned"
        descriptors: dict[int | str, int] = {
            "RANKWISE_SEGMENT_FD": self._segment.fd,
            STOP_VARIABLE: self.stop_fd,
        }
        if self.collectives_fd >= 0 and local_rank == 0:
            descriptors[LISTENER_VARIABLE] = self.collectives_fd
        if self._payload_fd >= 0:
            descriptors["RANKWISE_PAYLOAD_FD"] = self._payload_fd
        return descriptors

    def _store_payload(self) -> int:
        """Put what workers share of their program where they can read it: a function, or code."""
        program = self._job.program
        if isinstance(program, Function):
            payload = program.payload
        elif isinstance(program, Script) and program.source is not None:
            payload = program.source or b"\n"  # an empty program is one, too
        elif isinstance(program, Script) and self._job.gang.size > 1:
            payload = compiled_script(program.path)
        else:
            payload = b""
        if not payload:
            return -1
        fd = os.memfd_create("rankwise-payload", os.MFD_CLOEXEC)
        self._exit.callback(os.close, fd)
        rest = memoryview(payload)
        while rest:
            rest = rest[os.write(fd, rest) :]
        return fd

    def _make_stream(self, local_rank: int, fd: int, stream: Streams) -> WorkerStream:
        rank, name = self.ranks.rank(local_rank), "stdout" if stream is Streams.OUT else "stderr"
        followed = FollowedStream(self.log_readers, StreamName(rank, self._attempt, name))
        sinks = self._sinks.make(rank, local_rank, stream)
        return WorkerStream(StreamPump(fd, [followed, *sinks.all()]), sinks.tail)


def _files_of(destinations: Destinations) -> tuple[dict[int, str], ...]:
    """Its files by local rank."""
    of = destinations
    each = (of.stdouts, of.stderrs, of.tee_stdouts, of.tee_stderrs, of.error_files)
    return cast("tuple[dict[int, str], ...]", each)


def _order(job: Job, local_rank: int, environment: dict[str, str]) -> dict[str, Any]:
    """The order for one worker, but for its descriptors."""
    order: dict[str, Any] = {
        "env": environment,
        "cwd": os.getcwd(),  # pathlib costs milliseconds
        "nofile": ORIGINAL_NOFILE,
        "fds": [],
    }
    if job.cpus_by_rank is not None and local_rank in job.cpus_by_rank:
        order["cpus"] = sorted(job.cpus_by_rank[local_rank])
    is_forked = job.start_method is StartMethod.FORKSERVER or job.is_automatic
    if is_forked and not isinstance(job.program, Executable):
        order["program"] = _program(job, local_rank)
    if "program" not in order or job.is_automatic:
        order["argv"] = _argv(job, local_rank)
    return order


def _argv(job: Job, local_rank: int) -> list[str]:
    python = job.python or os.environ.get("PYTHON_EXEC") or sys.executable
    boot = [python, "-u", _boot_program(python)]
    match job.program:
        case Script(path=path, args=args):
            return [*boot, path, *_substituted(args, local_rank)]
        case Module(name=name, args=args):
            return [*boot, "-m", name, *_substituted(args, local_rank)]
        case Executable(path=path, args_by_rank=own) if local_rank in own:
            return [path, *own[local_rank]]
        case Executable(path=path, args=args):
            return [path, *_substituted(args, local_rank)]
        case Function():
            return [*boot, "-f"]


_boot_program = cache(boot_program)


def _program(job: Job, local_rank: int) -> tuple[Any, ...]:
    match job.program:
        case Script(path=path, args=args):
            return ("script", path, _substituted(args, local_rank))
        case Module(name=name, args=args):
            return ("module", name, _substituted(args, local_rank))
        case Function():
            return ("function",)
        case Executable():
            raise AssertionError("an executable cannot be forked, and is never planned so")


def _substituted(args: tuple[str, ...], local_rank: int) -> list[str]:
    """Arguments with torchrun's macro `${local_rank}` filled in."""
    if not any("$" in arg for arg in args):
        return [*args]
    from string import Template  # noqa: PLC0415  # most scripts are given no macro

    return [
        Template(arg).safe_substitute(local_rank=local_rank) if "$" in arg else arg for arg in args
    ]
