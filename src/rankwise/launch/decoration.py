"""Adds to a gang's failures what only the world around it knows.

The machine knows when and how a worker ended. Where its logs are, what it last wrote, whether the
kernel's OOM killer was at work and what the clock on the wall said is looked up here, at the
moment when a failure is about to be told to somebody.
"""

import os
import resource
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from rankwise.base.failure import (
    NO_RANK,
    Failure,
    FailureCause,
    Outcome,
    OutcomeStatus,
    Stood,
    exit_in_program,
)
from rankwise.drivers.real.logs.tail import KEPT_LINES_MAX
from rankwise.drivers.real.oom import OomWatch
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.worker_link import WorkerLink
from rankwise.launch.job import Job
from rankwise.launch.log_layout import Destinations
from rankwise.launch.planning import JobPlanner

if TYPE_CHECKING:
    from rankwise.launch.gpu_watch import GpuWatch

SIGKILL, SIGXCPU = 9, 24
STDOUT_LINES = 10
SECTION_IS_STUCK = "rankwise: section "
"""How a rank says which one, see `rankwise.launch.sections`."""
TAIL_LINES = 60
"""More than the twenty that are shown: a traceback that is told anyway is taken out of them."""


class FailureDecorator:
    """Decorates the failures of one run.

    Args:
        job: whose role and program they belong to.
        host: knows each worker's streams.
        planner: knows each worker's files and its place in the world.
        wall_offset: nanoseconds from the monotonic clock to the calendar.
        keeps_files: whether error files survive the run, so that a report may point to them.

    Attributes:
        gpus: know what the node's GPUs have reported; None where there are none.
    """

    def __init__(
        self,
        job: Job,
        host: RealProcessHost,
        planner: JobPlanner,
        wall_offset: int,
        *,
        keeps_files: bool,
    ) -> None:
        self._job = job
        self._host = host
        self._planner = planner
        self._oom = OomWatch()
        self._wall_offset = wall_offset
        self._keeps_files = keeps_files
        self._stacks: dict[int, str] = {}
        self._waits: Mapping[int, str] = {}
        self._verdict = ""
        self._importing = ""
        self._stood: tuple[Stood, ...] = ()
        self._awaited = ""
        self._hostname = socket.gethostname()
        self.gpus: GpuWatch | None = None

    def begin_attempt(self) -> None:
        """Forget what belongs to an earlier attempt, such as its count of OOM kills."""
        self._oom = OomWatch()
        self._stacks = {}
        self._waits, self._verdict = {}, ""
        self._importing = ""

    def remember_stacks(self, stacks: dict[int, str]) -> None:
        """Keep the stacks that were printed when the gang was found hanging."""
        self._stacks = stacks

    def remember_import(self, module: str) -> None:
        """Keep which module the fork server was importing when it was to make no more ranks."""
        self._importing = module

    def remember_waits(self, verdict: str, waits: Mapping[int, str]) -> None:
        """Keep what the ranks' books told then: who is to blame, and what each rank waits for."""
        self._verdict, self._waits = verdict, waits

    def remember_stand(
        self, verdict: str, waits: Mapping[int, str], stacks: Mapping[int, str]
    ) -> None:
        """Keep where the ranks stood when the time limit was over, and who kept them waiting."""
        self._awaited = verdict
        self._stood = stood_of(waits, stacks, self._planner.ranks.rank)

    def decorate_outcome(self, outcome: Outcome, lateness: str = "") -> Outcome:
        """The same outcome with all that can be found out about it, and a sentence on lateness."""
        failures = self.decorate(outcome.failures)
        outcome = msgspec.structs.replace(outcome, failures=failures, lateness=lateness)
        if outcome.status is not OutcomeStatus.STOPPED or not self._stood:
            return outcome
        return msgspec.structs.replace(outcome, stood=self._stood, awaited=self._awaited)

    def decorate(self, failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
        """The same failures, in the same order, with all that can be found out about them."""
        return tuple(self._decorate(failure) for failure in failures)

    def _decorate(self, failure: Failure) -> Failure:
        from rankwise.launch.failure_report.tracebacks import (  # noqa: PLC0415  # rare
            error_of_thread,
            without_traceback,
        )

        destinations = self._planner.destinations
        if failure.host:
            return failure  # described already, perhaps on another node
        if failure.local_rank == NO_RANK:
            wall_ns = failure.at + self._wall_offset
            return msgspec.structs.replace(failure, host=self._hostname, wall_ns=wall_ns)
        rank = failure.local_rank
        is_hung = failure.cause is FailureCause.HUNG
        link = self._host.links.get(rank)
        place = "" if link is None or link.exiting is None else link.exiting.place
        error_file = destinations.error_files.get(rank, "")
        told = None if link is None else link.error
        error = failure.error
        if error is None and told is None and error_file:  # torch's `record` may have written it
            from rankwise.launch.error_file import read_error_file  # noqa: PLC0415  # rare

            error = read_error_file(error_file)
        stderr = [] if link is None else link.stderr.tail.lines(TAIL_LINES)
        kept = [] if link is None else link.stderr.tail.lines(KEPT_LINES_MAX)
        if error is None and told is not None:  # it raised that when it was to blame already
            stderr = without_traceback([*stderr], told.traceback)
        out_of_memory, evidence = self._memory_verdict(failure)
        return msgspec.structs.replace(
            failure,
            rank=self._planner.ranks.rank(rank),
            host=self._hostname,
            role=self._job.role,
            was_stopped=link is not None and link.was_stopped,
            error=error,
            wall_ns=error.wall_ns if error is not None else failure.at + self._wall_offset,
            out_of_memory=out_of_memory,
            cpu_seconds_max=_cpu_limit(failure),
            detail=evidence or self._detail_of(failure, stderr) or exit_in_program(failure, place),
            stacks=self._stacks_of(failure, link),
            waits_for=self._wait_of(rank) if is_hung else "",
            thread_error=error_of_thread(kept),
            stderr_tail=tuple(stderr),
            stdout_tail=() if link is None else link.stdout.tail.lines(STDOUT_LINES),
            log_paths=_log_paths(rank, destinations),
            # On a full disk the worker could not write it.
            error_file=error_file if self._keeps_files and os.path.exists(error_file) else "",
            gpus=() if self.gpus is None else self.gpus.lines(failure.at),
        )

    def _wait_of(self, rank: int) -> str:
        """What a rank that hangs waits for: in a collective, or for its GPU."""
        from rankwise.launch.failure_report.stacks import copy_to_host, is_in_cuda  # noqa: PLC0415  # rare

        stacks = self._stacks.get(rank, "")
        if known := self._waits.get(rank, ""):
            return known
        if is_in_cuda(stacks):
            return "its GPU"
        # On a CPU, such a call does not wait: it is named only for ranks that use a GPU.
        if self.gpus is not None and self.gpus.has_gpu(rank) and (call := copy_to_host(stacks)):
            return f"its GPU, probably: {call} waits for it"
        return ""

    def _stacks_of(self, failure: Failure, link: WorkerLink | None) -> str:
        if failure.cause in (FailureCause.HUNG, FailureCause.OUT_OF_STEP):
            return self._stacks.get(failure.local_rank, "")
        return "" if link is None else link.reports.fatal_stacks

    def _detail_of(self, failure: Failure, stderr: Sequence[str]) -> str:
        if failure.cause is FailureCause.HUNG and self._verdict:
            return f"{failure.detail}; {self._verdict}"
        if failure.cause is FailureCause.NOT_STARTED and failure.detail and self._importing:
            return f"{failure.detail}: the fork server was importing {self._importing}"
        segment = self._planner.segment
        if failure.cause is not FailureCause.EXITED or segment is None:
            return failure.detail
        if failure.detail or not segment.is_stuck_in_section(failure.local_rank):
            return failure.detail
        # A rank that holds the interpreter in C could not say which one.
        said = next((line for line in reversed(stderr) if line.startswith(SECTION_IS_STUCK)), "")
        told = said.removeprefix("rankwise: ").partition("; here are")[0]
        return told or "the limit of a section was over"

    def _memory_verdict(self, failure: Failure) -> tuple[bool | None, str]:
        from rankwise.launch.failure_report.loaders import lost_loader  # noqa: PLC0415  # rare

        if lost_loader(failure):
            verdict = self._oom.verdict()
            return (True, verdict.evidence) if verdict.was_oom else (None, "")
        was_killed = failure.exit is not None and failure.exit.signal_number == SIGKILL
        if failure.cause is not FailureCause.SIGNALED or not was_killed:
            return None, ""
        verdict = self._oom.verdict()
        return verdict.was_oom, verdict.evidence


def stood_of(
    waits: Mapping[int, str], stacks: Mapping[int, str], rank_of: Callable[[int], int]
) -> tuple[Stood, ...]:
    """Where each rank stood, from what it waited for and its stacks, by local rank."""
    return tuple(
        Stood(
            rank=rank_of(local_rank),
            waits_for=waits.get(local_rank, ""),
            stacks=stacks.get(local_rank, ""),
        )
        for local_rank in sorted(waits.keys() | stacks.keys())
    )


def _cpu_limit(failure: Failure) -> int | None:
    """The limit of CPU time (`ulimit -t`) that may have killed it, which workers have from us."""
    if failure.cause is not FailureCause.SIGNALED or failure.exit is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = {SIGXCPU: soft, SIGKILL: hard}.get(failure.exit.signal_number or 0)
    return None if limit == resource.RLIM_INFINITY else limit


def _log_paths(rank: int, destinations: Destinations) -> tuple[str, ...]:
    paths = (destinations.stdouts.get(rank, ""), destinations.stderrs.get(rank, ""))
    return tuple(path for path in paths if path)
