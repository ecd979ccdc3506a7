"""Describes failures: adds to what a machine knows of one what only the world around it knows.

A machine knows when and how a rank ended. Where its logs are, what it last wrote, whether the
kernel's OOM killer was at work and what the clock on the wall said is looked up once, when the
failure is about to be told. A world, of processes or of simulated ranks, gathers the evidence;
what follows from that is decided here, for both.

Each failure is described once, and has a `host` from then on. The agent orders the description of
those that ranks have suffered by themselves (`DescribeFailures`), since other nodes and restarts
are told of them. Ranks that were stopped for it are described when the run is over: only its report
shows them, and the journal of a large run would be full of their last lines.
"""

import os
from collections.abc import Callable, Sequence

import msgspec

from rankwise.base.failure import ErrorRecord, Failure, FailureCause
from rankwise.drivers.real.logs.tail import KEPT_LINES_MAX
from rankwise.launch.run.job import Job
from rankwise.launch.run.log_layout import Destinations
from rankwise.launch.telling.failure_report.tracebacks import error_of_thread, without_traceback

STDOUT_LINES = 10
STDERR_LINES = 60
"""More than the twenty that are shown: a traceback that is told anyway is taken out of them."""


def _no_lines(_count: int) -> Sequence[str]:
    return ()


class RankEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a world knows of a failure.

    Attributes:
        host: the name of the machine that it happened on.
        rank: the number in the job; that of the failure where none is given.
        wall_ns: `Failure.at` by the calendar.
        pid: of the process; None where there is none of the rank's own.
        error: the exception, as far as the failure does not have it.
        printed: an exception whose traceback is not to be shown once more as the last lines.
        stderr, stdout: give the last lines that it wrote, as many as are asked for.
        destinations: the files of its attempt, and `file_key` what they know the rank by.
        detail: a sentence more.
        exit_place: the line of the program that has ended it.
        hang_stacks: where it stood when it hung or was out of step, and `waits_for` what for.
        fatal_stacks: where it stood at a fatal signal.
        was_stopped, out_of_memory, cpu_seconds_max, signal_sender, gpus: see `Failure`.
    """

    host: str
    rank: int | None = None
    wall_ns: int
    pid: int | None = None
    error: ErrorRecord | None = None
    printed: ErrorRecord | None = None
    stderr: Callable[[int], Sequence[str]] = _no_lines
    stdout: Callable[[int], Sequence[str]] = _no_lines
    destinations: Destinations = Destinations()
    file_key: int = -1
    detail: str = ""
    exit_place: str = ""
    hang_stacks: str = ""
    waits_for: str = ""
    fatal_stacks: str = ""
    was_stopped: bool = False
    out_of_memory: bool | None = None
    cpu_seconds_max: int | None = None
    signal_sender: str = ""
    gpus: tuple[str, ...] = ()


def describe_failure(
    failure: Failure,
    job: Job,
    gather: Callable[[Failure], RankEvidence],
    *,
    keeps_files: bool,
) -> Failure:
    """Describe a failure with all that can be found out about it; one with a host stays as it is.

    Args:
        failure: what a machine knows of it.
        job: whose role the rank has.
        gather: finds out what the world knows.
        keeps_files: whether error files survive the run, so that a report may point to them.
    """
    if failure.host:
        return failure  # perhaps by another node
    found = gather(failure)
    error = failure.error or found.error
    stderr = found.stderr(STDERR_LINES)
    if error is None and found.printed is not None:
        # Its message is the failure's; the report would show the same lines twice.
        stderr = without_traceback([*stderr], found.printed.traceback)
    stood = failure.cause in (FailureCause.HUNG, FailureCause.OUT_OF_STEP)
    files, key = found.destinations, found.file_key
    error_file = files.error_files.get(key, "")
    return msgspec.structs.replace(
        failure,
        rank=failure.rank if found.rank is None else found.rank,
        pid=found.pid,
        host=found.host,
        role="" if key < 0 else job.role,
        was_stopped=found.was_stopped,
        error=error,
        wall_ns=found.wall_ns if error is None else error.wall_ns,
        out_of_memory=found.out_of_memory,
        cpu_seconds_max=found.cpu_seconds_max,
        detail=found.detail or _exit_in_program(failure.cause, found.exit_place),
        signal_sender=found.signal_sender,
        stacks=found.hang_stacks if stood else found.fatal_stacks,
        waits_for=found.waits_for,
        thread_error=error_of_thread(found.stderr(KEPT_LINES_MAX)),
        stderr_tail=tuple(stderr),
        stdout_tail=tuple(found.stdout(STDOUT_LINES)),
        log_paths=tuple(filter(None, (files.stdouts.get(key), files.stderrs.get(key)))),
        # On a full disk the rank could not write it.
        error_file=error_file if keeps_files and os.path.exists(error_file) else "",
        gpus=found.gpus,
    )


def _exit_in_program(cause: FailureCause, place: str) -> str:
    """Which line of its program has ended a rank; empty where it ended in another way."""
    return f"SystemExit at {place}" if cause is FailureCause.EXITED and place else ""
