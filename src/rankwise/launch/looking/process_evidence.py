"""What this machine knows of a worker that has failed, beyond what its gang does."""

import resource
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rankwise.base.failure import NO_RANK, Failure, FailureCause
from rankwise.base.units import SECOND
from rankwise.drivers.real.oom import OomWatch
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.section_ring import SectionReader
from rankwise.drivers.real.worker_link import WorkerLink
from rankwise.launch.run.planning import JobPlanner

if TYPE_CHECKING:
    from rankwise.launch.looking.gpu_watch import GpuWatch
    from rankwise.launch.telling.failure_description import RankEvidence

SIGKILL, SIGXCPU = 9, 24


class ProcessEvidence:
    """Gathers evidence about the workers of one run.

    Args:
        host: has each worker's streams.
        planner: has each worker's files and its place in the world.
        wall_offset: nanoseconds from the monotonic clock to the calendar.

    Attributes:
        gpus: what the node's GPUs have reported; None on a node without GPUs.
    """

    def __init__(self, host: RealProcessHost, planner: JobPlanner, wall_offset: int) -> None:
        self._host = host
        self._planner = planner
        self._oom = OomWatch()
        self._wall_offset = wall_offset
        self._stacks: dict[int, str] = {}
        self._waits: Mapping[int, str] = {}
        self._verdict = ""
        self._importing = ""
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
        """Keep what the call records told then: who is to blame, and what each rank waits for."""
        self._verdict, self._waits = verdict, waits

    def gather(self, failure: Failure) -> "RankEvidence":
        """All that is known of a failure of this node."""
        from rankwise.launch.telling.failure_description import RankEvidence  # noqa: PLC0415  # for failures

        wall_ns = failure.at + self._wall_offset
        rank = failure.local_rank
        if rank == NO_RANK:
            return RankEvidence(host=self._hostname, wall_ns=wall_ns, detail=failure.detail)
        destinations = self._planner.destinations
        link = self._host.links.get(rank)
        told = self._host.errors.get(rank)
        error_file = destinations.error_files.get(rank, "")
        error = None
        if failure.error is None and told is None and error_file:  # torch's `record` may have it
            from rankwise.launch.inside.error_file import read_error_file  # noqa: PLC0415  # rare

            error = read_error_file(error_file)
        out_of_memory, evidence = self._memory_verdict(failure)
        return RankEvidence(
            host=self._hostname,
            rank=self._planner.ranks.rank(rank),
            wall_ns=wall_ns,
            pid=failure.pid,
            error=error,
            printed=told,  # it raised that when it was to blame already
            destinations=destinations,
            file_key=rank,
            detail=evidence or self._detail_of(failure),
            hang_stacks=self._stacks.get(rank, ""),
            waits_for=self._wait_of(rank) if failure.cause is FailureCause.HUNG else "",
            out_of_memory=out_of_memory,
            cpu_seconds_max=_cpu_limit(failure),
            gpus=() if self.gpus is None else self.gpus.lines(failure.at),
            **_of_process(link),
        )

    def _wait_of(self, rank: int) -> str:
        """What a rank that hangs waits for: in a collective, or for its GPU."""
        from rankwise.launch.telling.failure_report.stacks import copy_to_host, is_in_cuda  # noqa: PLC0415  # rare

        stacks = self._stacks.get(rank, "")
        if known := self._waits.get(rank, ""):
            return known
        if is_in_cuda(stacks):
            return "its GPU"
        # On a CPU, such a call does not wait: it is named only for ranks that use a GPU.
        if self.gpus is not None and self.gpus.has_gpu(rank) and (call := copy_to_host(stacks)):
            return f"its GPU, probably: {call} waits for it"
        return ""

    def _detail_of(self, failure: Failure) -> str:
        if failure.cause is FailureCause.HUNG and self._verdict:
            return f"{failure.detail}; {self._verdict}"
        if failure.cause is FailureCause.NOT_STARTED and failure.detail and self._importing:
            return f"{failure.detail}: the fork server was importing {self._importing}"
        segment = self._planner.segment
        if failure.cause is not FailureCause.EXITED or segment is None:
            return failure.detail
        level = segment.stuck_section(failure.local_rank)
        if failure.detail or level is None:
            return failure.detail
        section = SectionReader(segment, failure.local_rank).open_at(level)
        if section is None:  # inside of more sections than have a place in the rank's memory
            return "the limit of a section was over"
        longest = f", its longest run took {section.longest / SECOND:.3g} s"
        return f"section {section.name!r} is stuck{longest if section.longest else ''}"

    def _memory_verdict(self, failure: Failure) -> tuple[bool | None, str]:
        from rankwise.launch.telling.failure_report.tracebacks import lost_loader  # noqa: PLC0415  # rare

        if lost_loader(failure):
            verdict = self._oom.verdict()
            return (True, verdict.evidence) if verdict.was_oom else (None, "")
        was_killed = failure.exit is not None and failure.exit.signal_number == SIGKILL
        if failure.cause is not FailureCause.SIGNALED or not was_killed:
            return None, ""
        verdict = self._oom.verdict()
        return verdict.was_oom, verdict.evidence


def _of_process(link: WorkerLink | None) -> "Mapping[str, Any]":
    """What the process itself has told and written, as fields of `RankEvidence`."""
    if link is None:  # there never was one
        return {}
    return {
        "stderr": link.stderr.tail.lines,
        "stdout": link.stdout.tail.lines,
        "exit_place": "" if link.exiting is None else link.exiting.place,
        "fatal_stacks": link.reports.fatal_stacks,
        "was_stopped": link.was_stopped,
    }


def _cpu_limit(failure: Failure) -> int | None:
    """The limit of CPU time (`ulimit -t`) that may have killed it, which workers have from us."""
    if failure.cause is not FailureCause.SIGNALED or failure.exit is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = {SIGXCPU: soft, SIGKILL: hard}.get(failure.exit.signal_number or 0)
    return None if limit == resource.RLIM_INFINITY else limit
