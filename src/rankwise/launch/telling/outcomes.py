"""Turns the outcome of a run into the exception, or the signal, that it means to a caller."""

import os
import signal
from typing import TYPE_CHECKING, NoReturn

from rankwise.base.errors import GangError, RunTimeout, WorkersFailed
from rankwise.base.failure import (
    SIGNAL_NAMES,
    TIME_LIMIT_SIGNAL,
    FailureCause,
    Outcome,
    OutcomeStatus,
)
from rankwise.base.units import format_duration
from rankwise.launch.inside.function_results import exceptions_by_rank
from rankwise.launch.run.job import Streams
from rankwise.launch.run.log_layout import console_streams
from rankwise.launch.telling.failure_report.composing import compose_report
from rankwise.launch.telling.failure_report.model import ReportContext
from rankwise.launch.telling.failure_report.rendering import plain_text

if TYPE_CHECKING:
    from rankwise.launch.run.supervision import Supervision


def raise_unless_succeeded(outcome: Outcome, supervision: "Supervision") -> None:
    """Return after a success.

    Raises:
        WorkersFailed: workers failed.
        RunTimeout: the run took longer than it was allowed to.
        KeyboardInterrupt: the run was stopped by SIGINT.
        GangError: it was stopped in another way that this process survived.
    """
    __tracebackhide__ = True  # a failed test shows the test and the report, not us
    match outcome.status:
        case OutcomeStatus.SUCCEEDED:
            return
        case OutcomeStatus.STOPPED if is_out_of_time(outcome, supervision):
            raise RunTimeout(stop_in_words(outcome, supervision), outcome.stood)
        case OutcomeStatus.STOPPED:
            raise_stopped(supervision)
        case OutcomeStatus.FAILED:
            raise workers_failed(outcome, supervision)


def raise_stopped(supervision: "Supervision") -> NoReturn:
    """Let the signal that stopped a run take the effect that it would have had without us.

    Raises:
        KeyboardInterrupt: it was SIGINT, and the caller has not installed another handler.
        GangError: the process survives the signal, or there was none.
    """
    signum = supervision.caught_signal
    if signum is None:
        raise GangError("the run was stopped on request before it had finished")
    signal.raise_signal(signum)
    name = signal.Signals(signum).name
    raise GangError(f"the run was stopped by {name} before it had finished")


def is_out_of_time(outcome: Outcome, supervision: "Supervision") -> bool:
    """Whether a time limit has stopped the run: its own, or that of another node."""
    is_limit = supervision.job.timeout is not None or supervision.caught_signal is None
    return is_limit and outcome.stop_signal == TIME_LIMIT_SIGNAL  # or a SIGALRM to this process


def end_in_words(outcome: Outcome, supervision: "Supervision") -> str:
    """`failed after 3.2 s`, `stopped by SIGTERM after 3.2 s`."""
    elapsed = format_duration(supervision.elapsed)
    if outcome.status is not OutcomeStatus.STOPPED:
        return f"{outcome.status} after {elapsed}"
    return f"stopped {who_stopped(outcome, supervision)} after {elapsed}"


def who_stopped(outcome: Outcome, supervision: "Supervision") -> str:
    """`by SIGTERM`, `by its time limit of 8 h`, for a run that was stopped."""
    signum, timeout = outcome.stop_signal, supervision.job.timeout
    if is_out_of_time(outcome, supervision):
        if timeout is None or supervision.elapsed < timeout:
            return "by the time limit of another node"
        return f"by its time limit of {format_duration(timeout)}"
    if signum is not None:
        return f"by {SIGNAL_NAMES.get(signum, f'signal {signum}')}"
    return "on request"


def stop_in_words(outcome: Outcome, supervision: "Supervision") -> str:
    """How a run was stopped.

    Of one that its time limit has stopped, further lines tell where its ranks stood, unless all
    have ended well when they were asked to.
    """
    text = end_in_words(outcome, supervision)
    if not outcome.stood or not outcome.failures:
        return text
    from rankwise.launch.telling.failure_report.composing import blocks_of_ranks  # noqa: PLC0415
    from rankwise.launch.telling.failure_report.rendering import lines_of_blocks  # noqa: PLC0415

    awaited = f": {outcome.awaited}" if outcome.awaited else ""
    return "\n".join([text + awaited, *lines_of_blocks(blocks_of_ranks(outcome.stood))])


def workers_failed(outcome: Outcome, supervision: "Supervision") -> WorkersFailed:
    """The exception for a failed run; its cause is the root cause's real exception, if it came."""
    from rankwise.base.exception_pickle import tell_traceback  # noqa: PLC0415  # only for failures

    exceptions = exceptions_by_rank(supervision.results)
    if not outcome.failures:  # no worker failed: its node could not take part, or not go on
        return WorkersFailed(outcome.detail, ())
    root = outcome.failures[0]
    failed = WorkersFailed(report_of(outcome, supervision), outcome.failures, exceptions)
    for failure in outcome.failures:
        exception = exceptions.get(failure.rank)
        if exception is not None and failure.error is not None:
            exception.add_note(f"raised on rank {failure.rank}")
            tell_traceback(exception, failure.error.traceback)
    # The rank that kept the others waiting has raised nothing: its effect is the exception to
    # catch.
    told = outcome.failures if root.cause is FailureCause.OUT_OF_STEP else (root,)
    failed.__cause__ = next(
        (exceptions[each.rank] for each in told if each.rank in exceptions), None
    )
    return failed


def report_of(outcome: Outcome, supervision: "Supervision") -> str:
    """The failure report as text."""
    return plain_text(compose_report(outcome, report_context(supervision)))


def report_context(supervision: "Supervision") -> ReportContext:
    """What a failure report tells about the run as a whole."""
    job, places = supervision.job, supervision.places
    directory = (places.directory or "") if places.keep else ""
    return ReportContext(
        program=job.program_name,
        nprocs=supervision.size,
        run_id=job.run_id,
        duration=supervision.elapsed,
        attempts_max=job.restarts_allowed + 1,
        log_directory=directory if os.path.isdir(directory) else "",
        stderr_shown=frozenset(
            local_rank
            for local_rank in range(job.gang.size)
            if console_streams(job.logs, local_rank) & Streams.ERR
        ),
    )
