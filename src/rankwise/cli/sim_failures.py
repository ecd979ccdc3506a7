"""What is told of a simulation that failed: the user's lines, and never ours."""

import errno
import sys
import traceback

from rankwise.base.errors import ConfigError, RankwiseError, SimulationError
from rankwise.launch.failure_report.text import printable_lines
from rankwise.sim.kernel.places import line_of, lines_of_traceback
from rankwise.sim.runtime.multiprocessing import SpawnException

_OUTPUT_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})


def tell_failure(error: Exception) -> int:
    """Tell what a simulation failed with on stderr; returns the exit code."""
    if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_ERRORS:
        raise error  # standard output: the command line knows what to do then
    if isinstance(error, MemoryError):
        error = SimulationError(
            f"there is not enough memory to simulate this: {error}",
            hint="take smaller sizes; --timing-only keeps no data",
        )
    if not isinstance(error, RankwiseError):
        _show_traceback(error)
        return 1
    if isinstance(error, SpawnException):
        raised = (error.errors.get(failure.rank, error) for failure in error.failures)
        foreign = next((each for each in raised if not isinstance(each, RankwiseError)), None)
        if foreign is not None:
            _show_traceback(foreign)  # the root cause's, unless that is ours
    else:
        _add_place(error)
    tell_error(str(error))
    return 2 if isinstance(error, ConfigError) else 1


def tell_error(message: str) -> None:
    """Tell an error on stderr, in as many lines as it has."""
    # Names of files may be no UTF-8, and hold what a terminal would obey.
    lines = printable_lines(f"rankwise sim: error: {message}")
    sys.stderr.write("\n".join(lines) + "\n")


def _add_place(error: RankwiseError) -> None:
    """Tell the line of the user's code that it came through, unless the message has one."""
    line = line_of(error)
    if line is not None and line.file not in error.message:
        error.message = f"{error.message}, at {line}"


def _show_traceback(error: BaseException) -> None:
    """The traceback of the user's own lines, as Python would have shown it."""
    users = [line.is_users for line in lines_of_traceback(error.__traceback__)]
    shown = traceback.TracebackException.from_exception(error)
    if any(users):
        entries = zip(shown.stack, users, strict=True)
        shown.stack = traceback.StackSummary.from_list(
            [entry for entry, is_users in entries if is_users]
        )
    sys.stderr.write("".join(shown.format()))
