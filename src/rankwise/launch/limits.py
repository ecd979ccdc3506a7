"""What a run may be at most, and what its names may look like, for every interface.

The command line and the Python functions ask here, each with its own name for the value, so that
a value is refused by both or by neither.
"""

import os

from rankwise.base.errors import ConfigError
from rankwise.base.units import DURATION_MAX, SECOND, Duration, duration_from_seconds
from rankwise.drivers.real.interrupts import came_from_handler, gate_here
from rankwise.drivers.real.segments import WORKERS_MAX

RESTARTS_MAX = 1_000_000_000
RUN_ID_LENGTH_MAX = 128
_SHOWN_MAX = 60


def shown(value: object) -> str:
    """A value as Python writes it, cut short: it may be a million digits, or break its `repr`."""
    try:
        with gate_here().handlers_replaced():
            text = repr(value)
    except Exception as error:  # a foreign `__repr__` may raise anything
        if came_from_handler(error):
            raise
        text = f"<a {type(value).__qualname__} that cannot be shown>"
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


def check_worker_count(count: int, label: str) -> None:
    """Refuse less than one worker, and more than share one segment of memory."""
    if count < 1:
        raise ConfigError(f"{label} is {shown(count)}, expected 1 or more workers")
    if count > WORKERS_MAX:
        raise ConfigError(f"{label} is {shown(count)}, expected at most {WORKERS_MAX} workers")


def check_restarts(count: int, label: str) -> None:
    """Refuse what is no number of restarts, or one that no run lives to see."""
    if not 0 <= count <= RESTARTS_MAX:
        at_most = f", at most {RESTARTS_MAX}" if count > 0 else ""
        raise ConfigError(f"{label} is {shown(count)}, expected 0 or more{at_most}")


def duration_of(seconds: float, label: str) -> Duration:
    """Convert seconds; refuses the negative, the infinite, what is no number and ten years."""
    if not 0 <= seconds <= DURATION_MAX / SECOND:  # false for nan, too
        raise ConfigError(
            f"{label} is {shown(seconds)}, expected seconds, from 0 to ten years "
            f"({DURATION_MAX // SECOND})"
        )
    return duration_from_seconds(seconds)


def check_positive(duration: Duration, label: str, *, given: object) -> None:
    """Refuse a time of 0, or less than a nanosecond; `given` is what it was made of."""
    if duration <= 0:
        raise ConfigError(f"{label} is {shown(given)}, expected more than 0 seconds")


def check_run_id(run_id: str, label: str) -> None:
    """Refuse a name that cannot be part of a file's name or of a line of `rankwise ps`."""
    is_long = len(run_id) > RUN_ID_LENGTH_MAX
    if not run_id or "/" in run_id or not run_id.isprintable() or is_long:
        raise ConfigError(
            f"{label} is {shown(run_id)}, expected a name that can be part of a file's name: no "
            f"slash, at most {RUN_ID_LENGTH_MAX} characters"
        )


def check_role(role: str, label: str) -> None:
    """Refuse a role that would break the lines whose prefix it is."""
    if not role.isprintable():
        raise ConfigError(
            f"{label} is {shown(role)}, expected a word for prefixes: no line breaks or other "
            "control characters"
        )


def check_working_directory() -> None:
    """Refuse to start anything in a directory that has been removed: no worker could follow."""
    try:
        os.getcwd()  # pathlib costs milliseconds
    except OSError as error:
        raise ConfigError(
            f"the working directory cannot be used: {error.strerror}",
            hint="it was removed or moved away; change to one that exists",
        ) from None
