"""What is told of a simulation that failed: the user's lines, and never ours.

Ranks that failed are told in the failure report, as those of `rankwise run`, and end with its exit
code; what is refused is a line.
"""

import errno
import os
import sys

import click

from rankwise.base.errors import ConfigError, Deadlock, RankwiseError, SimulationError, TimeLimit
from rankwise.base.failure import Outcome, OutcomeStatus
from rankwise.base.units import Duration
from rankwise.cli.exit_codes import EXIT_CODE_OF_A_TIMEOUT
from rankwise.cli.run import exit_code
from rankwise.launch.telling.failure_report.composing import compose_report
from rankwise.launch.telling.failure_report.model import FailureReport, ReportContext
from rankwise.launch.telling.failure_report.rendering import plain_text, write_report
from rankwise.launch.telling.failure_report.text import printable_lines
from rankwise.sim.kernel.places import line_of, traceback_in_text
from rankwise.sim.runtime.multiprocessing import SpawnException

_OUTPUT_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})


def tell_failure(error: Exception, program: str) -> int:
    """Tell what a simulation failed with on stderr; returns the exit code."""
    if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_ERRORS:
        raise error  # standard output: the command line knows what to do then
    if isinstance(error, SpawnException) and error.failures:
        write_report(_report_of(error, program), sys.stderr, os.environ)
        return exit_code(_outcome_of(error))
    if isinstance(error, MemoryError):
        error = SimulationError(
            f"there is not enough memory to simulate this: {error}",
            hint="take smaller sizes; --timing-only keeps no data",
        )
    if not isinstance(error, RankwiseError):
        sys.stderr.write(traceback_in_text(error))
        return 1
    _add_place(error)
    tell_error(str(error))
    if isinstance(error, Deadlock | TimeLimit):
        return EXIT_CODE_OF_A_TIMEOUT
    return 2 if isinstance(error, ConfigError) else 1


def in_text(error: RankwiseError, program: str) -> str:
    """What has been told, for a file."""
    if isinstance(error, SpawnException) and error.failures:
        return plain_text(_report_of(error, program))
    return str(error)


def _report_of(error: SpawnException, program: str) -> FailureReport:
    ended_at = max(failure.at for failure in error.failures)  # of the simulation
    context = ReportContext(
        program=program, nprocs=error.nprocs, duration=Duration(ended_at), is_simulated=True
    )
    return compose_report(_outcome_of(error), context)


def _outcome_of(error: SpawnException) -> Outcome:
    return Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=error.failures)


def tell_error(message: str) -> None:
    """Tell an error on stderr, in as many lines as it has."""
    # Names of files may be no UTF-8, and hold what a terminal would obey.
    context = click.get_current_context(silent=True)
    path = context.command_path if context else "rankwise sim"
    lines = printable_lines(f"{path}: error: {message}")
    sys.stderr.write("\n".join(lines) + "\n")


def _add_place(error: RankwiseError) -> None:
    """Tell the line of the user's code that it came through, unless the message has one."""
    line = line_of(error)
    if line is not None and line.file not in error.message:
        error.message = f"{error.message}, at {line}"
