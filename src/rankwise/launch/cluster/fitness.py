"""Whether a node is fit to take part: checked before each round, in a thread.

A node that is not fit would be the root cause of every attempt. It checks that the directory for
temporary files and the log directory can be written and have room, there is some memory and shared
memory left, the calendar is not absurd, and whatever commands the user names succeed.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

from rankwise.base.units import format_bytes
from rankwise.launch.run.private_places import temporary_directory

DISK_BYTES_MIN = 64 << 20
MEMORY_BYTES_MIN = 128 << 20
SHARED_MEMORY_BYTES_MIN = 16 << 20
CALENDAR_BEGIN_S = 1_700_000_000
"""A clock before this date (November 2023) has never been set."""
COMMAND_PATIENCE_S = 60.0
GPU_CHECK = "gpu"
"""The word by which users ask for rankwise's own check, in the place of a command."""
REAP_PATIENCE_S = 1.0
"""How long a command that was killed is waited for."""


class Unfit(NamedTuple):
    """Why a node is not fit, and what to do about it."""

    reason: str
    hint: str


class NodeCheck:
    """The user's commands, one at a time, each with all that it starts in a process group.

    A thread runs them; another one may end them, for good, when the agent needs no answer any more.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ended = False

    def run(self, command: str) -> Unfit | None:
        """Give the command to the shell: it must end with 0 in time, and is killed otherwise.

        The word `gpu` stands for rankwise's own check of GPUs.
        """
        try:
            process = self._start(command)
        except OSError as error:
            return Unfit(
                f"the node check {command!r} could not be started: {error}", "run it by hand"
            )
        if process is None:
            return Unfit(f"the node check {command!r} was not started: the agent ends", "")
        try:
            output, _ = process.communicate(timeout=COMMAND_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            if process.stdout is not None:
                process.stdout.close()
            return Unfit(
                f"the node check {command!r} did not end within {COMMAND_PATIENCE_S:g} s, and was "
                "killed",
                "run it by hand",
            )
        finally:
            self._process = None
        return _judged(command, process.returncode, output)

    def end(self) -> None:
        """Kill the command that runs, if one does, and start no more."""
        with self._lock:
            self._is_ended = True
        self._kill()

    def _start(self, command: str) -> "subprocess.Popen[bytes] | None":
        with self._lock:
            if self._is_ended:
                return None
            is_own = command == GPU_CHECK
            own = [sys.executable, "-m", "rankwise.launch.cluster.gpu_fitness"]
            self._process = subprocess.Popen(  # the user's words for the user's shell
                own if is_own else command,
                shell=not is_own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            return self._process

    def _kill(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it ends when it can
            process.wait(REAP_PATIENCE_S)


def unfitness(
    checks: tuple[str, ...], places: tuple[str, ...], node_check: NodeCheck
) -> Unfit | None:
    """Look at this node.

    Args:
        checks: commands for the shell; each must end with 0 within a minute.
        places: directories that need room, those that exist.
        node_check: runs the commands.

    Returns:
        The first thing that is wrong; None if nothing is.
    """
    return (
        _disk_trouble(places)
        or _memory_trouble()
        or _calendar_trouble()
        or next((trouble for check in checks if (trouble := node_check.run(check))), None)
    )


def _disk_trouble(places: tuple[str, ...]) -> Unfit | None:
    wanted = [(place, DISK_BYTES_MIN) for place in places]
    for place, needed in [*wanted, ("/dev/shm", SHARED_MEMORY_BYTES_MIN)]:  # noqa: S108  # looked at
        try:
            free = shutil.disk_usage(place).free
        except OSError:
            continue  # it is not there yet, or not on this system; its user will say so
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
        "end other programs on this machine",
    )


def _calendar_trouble() -> Unfit | None:
    if time.time() >= CALENDAR_BEGIN_S:
        return None
    year = time.strftime("%Y-%m-%d")
    return Unfit(f"the clock shows the year {year}: it is not set", "is the time service running?")


def _judged(command: str, code: int, output: bytes) -> Unfit | None:
    if code == 0:
        return None
    lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    said = f": {lines[-1].strip()}" if lines else ""
    how = f"ended with exit code {code}" if code > 0 else f"was ended by signal {-code}"
    return Unfit(
        f"the node check {command!r} {how}{said}",
        "fix what it reports, then start rankwise again on this node",
    )


def places_to_check(log_directory: str | None) -> tuple[str, ...]:
    """Where this run will write."""
    temporary = temporary_directory()
    places = [] if _is_read_only(temporary) else [temporary]
    if log_directory and log_directory != os.devnull:
        places.append(log_directory)
    return tuple(places)


def _is_read_only(place: str) -> bool:
    """Whether it is part of a read-only root: a run that is told to log nowhere needs no file."""
    with suppress(OSError):
        return bool(os.statvfs(place).f_flag & os.ST_RDONLY)
    return False
