"""What became of the workers, in torch's words."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rankwise.base.failure import ErrorRecord, Failure, FailureCause
from rankwise.base.units import SECOND
from rankwise.compat.torch.elastic.multiprocessing.errors.process_failure import ProcessFailure

__all__ = ["RunProcsResult"]

KILLED = -9


@dataclass
class RunProcsResult:
    """The results of a run, by local rank.

    Attributes:
        return_values: what functions returned, or None for each program; empty after a failure.
        failures: the failures; empty after a success.
        stdouts, stderrs: the files that the streams went to.
    """

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Whether any worker failed."""
        return bool(self.failures)


def process_failures(
    failures: Iterable[Failure], error_files: Mapping[int, str]
) -> dict[int, ProcessFailure]:
    """Tell a gang's failures, given root cause first, in torch's words.

    The root cause stays the first by time as well, so that `ChildFailedError` names the same one:
    a signal's death is seen later than the exceptions that it causes elsewhere.
    """
    told = {
        failure.local_rank: _process_failure(failure, error_files.get(failure.local_rank, ""))
        for failure in failures
    }
    if told:
        root = next(iter(told.values()))
        earliest = min(failure.order() for failure in told.values())
        if root.order() > earliest:
            root.failed_at_ns, root.timestamp = earliest, earliest // SECOND
    return told


def _process_failure(failure: Failure, error_file: str) -> ProcessFailure:
    told = ProcessFailure(
        local_rank=failure.local_rank,
        pid=failure.pid or -1,
        exitcode=_exit_code(failure),
        error_file=error_file,
    )
    if failure.wall_ns and (not told.has_error_file or failure.wall_ns // SECOND == told.timestamp):
        told.failed_at_ns, told.timestamp = failure.wall_ns, failure.wall_ns // SECOND
    if failure.cause is FailureCause.OUT_OF_STEP and failure.error is None:
        told.message = failure.detail
    if failure.error is not None and not told.has_error_file:
        # There was no place for an error file, but the worker has told us.
        told.message = _message(failure.error)
        told.error_file_data = {"message": told.message}
    return told


def _exit_code(failure: Failure) -> int:
    if failure.exit is None:
        return KILLED
    if failure.cause is FailureCause.RAISED and failure.ended_by_us:
        return 1  # what it would have ended with; the signal came when it had failed
    if failure.cause is FailureCause.OUT_OF_STEP:
        return 1  # as the run does: it may have ended as a success
    return failure.exit.code


def _message(error: ErrorRecord) -> dict[str, Any]:
    return {
        "message": f"{error.type}: {error.message}",
        "extraInfo": {
            "py_callstack": error.traceback,
            "timestamp": str(error.wall_ns // SECOND),
        },
    }
