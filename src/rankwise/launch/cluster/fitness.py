"""Whether a node is fit to take part: checked before each round, in a thread.

A node that is not fit would be the root cause of every attempt. What it checks: the directory for
temporary files and the log directory can be written and have room, there is some memory and shared
memory left, the calendar is not absurd, and whatever commands the user names succeed.
"""

import os
import shutil
import subprocess
import time
from typing import NamedTuple

from rankwise.base.units import format_bytes

DISK_BYTES_MIN = 64 << 20
MEMORY_BYTES_MIN = 128 << 20
SHARED_MEMORY_BYTES_MIN = 16 << 20
CALENDAR_BEGIN_S = 1_700_000_000
"""A clock before this date (November 2023) has never been set."""
COMMAND_PATIENCE_S = 60.0


class Unfit(NamedTuple):
    """Why a node is not fit, and what to do about it."""

    reason: str
    hint: str


def unfitness(checks: tuple[str, ...], places: tuple[str, ...]) -> Unfit | None:
    """Look at this node.

    Args:
        checks: commands for the shell; each must end with 0 within a minute.
        places: directories that need room, those that exist.

    Returns:
        The first thing that is wrong; None if nothing is.
    """
    return (
        _disk_trouble(places)
        or _memory_trouble()
        or _calendar_trouble()
        or next((trouble for check in checks if (trouble := _command_trouble(check))), None)
    )


def _disk_trouble(places: tuple[str, ...]) -> Unfit | None:
    wanted = [(place, DISK_BYTES_MIN) for place in places]
    for place, needed in [*wanted, ("/dev/shm", SHARED_MEMORY_BYTES_MIN)]:  # noqa: S108  # looked at
        try:
            free = shutil.disk_usage(place).free
        except OSError:
            continue  # it is not there yet, or not on this system; whoever needs it will say so
        if free < needed:
            return Unfit(
                f"{place} has only {format_bytes(free)} left, expected {format_bytes(needed)}",
                "make room there, or name another directory",
            )
    return None


def _memory_trouble() -> Unfit | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as table:
            fields = dict(line.split(":", 1) for line in table)
        free = int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None  # no such table on this system
    if free >= MEMORY_BYTES_MIN:
        return None
    return Unfit(
        f"only {format_bytes(free)} of memory are available, expected "
        f"{format_bytes(MEMORY_BYTES_MIN)}",
        "end what else uses the machine",
    )


def _calendar_trouble() -> Unfit | None:
    if time.time() >= CALENDAR_BEGIN_S:
        return None
    year = time.strftime("%Y-%m-%d")
    return Unfit(f"the clock says {year}, so it was never set", "is the time service running?")


def _command_trouble(check: str) -> Unfit | None:
    try:
        done = subprocess.run(  # noqa: S602  # the user's own words for the user's own shell
            check,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Unfit(f"the node check {check!r} could not be completed: {error}", "run it by hand")
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
    said = f": {lines[-1].strip()}" if lines else ""
    return Unfit(
        f"the node check {check!r} ended with {done.returncode}{said}",
        "this node takes part again when the check succeeds and rankwise is started again",
    )


def places_to_check(log_directory: str | None) -> tuple[str, ...]:
    """Where this run will write."""
    import tempfile  # noqa: PLC0415  # asked once per round

    places = [tempfile.gettempdir()]
    if log_directory and log_directory != os.devnull:
        places.append(log_directory)
    return tuple(places)
