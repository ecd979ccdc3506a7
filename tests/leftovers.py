"""Finds what a test has left behind: processes, shared memory, temporary directories.

Other test sessions may run on the same machine at the same time, so a test is known by what only
its own processes can have:

- a variable in the environment, which the kernel shows for every process, orphans included; and
  descent from this process, for those that were forked without exec or had their environment
  replaced;
- a directory of its own for temporary files;
- names in /dev/shm that are new, speak of rankwise, and that no process has open. (Semaphores and
  segments of other makes tell nobody whose they are.)

Processes are given a moment to end. They are waited for through pidfds, never polled.
"""

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK_VARIABLE = "RANKWISE_TEST_MARK"
SHARED_MEMORY = Path("/dev/shm")
PATIENCE_S = 60.0


def open_files() -> set[tuple[int, str]]:
    """The descriptors of this process, each with what it leads to.

    Compare with `<=`, never by their number: what an earlier test dropped may be collected, and so
    closed, at any moment.
    """
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists the folder
            found.add((int(descriptor.name), str(descriptor.readlink())))
    return found


@dataclass(frozen=True)
class LeftProcess:
    pid: int
    command: str

    def __str__(self) -> str:
        return f"process {self.pid}: {self.command}"


def marked_processes(mark: str) -> dict[int, LeftProcess]:
    """Living processes, this one excepted, that carry the mark or descend from this process."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for pid in _pids():
        try:
            state, parent = _state_and_parent(pid)
            if state in "ZX":  # dead; whoever is its parent has not looked yet
                continue
            parents[pid] = parent
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
    found |= {pid for pid in parents if _descends_from_us(pid, parents)}
    found.discard(os.getpid())
    processes = {pid: LeftProcess(pid, _command(pid)) for pid in sorted(found)}
    # multiprocessing starts it once per process and keeps it until the process ends.
    return {
        pid: process
        for pid, process in processes.items()
        if not (parents.get(pid) == os.getpid() and "resource_tracker" in process.command)
    }


def wait_until_gone(mark: str, already_there: frozenset[int]) -> list[LeftProcess]:
    """Wait until no marked process is left, or for `PATIENCE_S`; return (and kill) what is left."""
    deadline = time.monotonic() + PATIENCE_S
    while left := _newer(mark, already_there):
        if not _wait_for_one(left, deadline):
            break
    for process in left:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it ended just now
            continue
    return left


def shared_memory_names() -> frozenset[str]:
    """What lies in /dev/shm and can be told to be ours."""
    return frozenset(path.name for path in SHARED_MEMORY.glob("*rankwise*"))


def new_shared_memory(before: frozenset[str]) -> list[str]:
    """Names in /dev/shm that were not there before and that nobody is using."""
    new = shared_memory_names() - before
    if not new:
        return []
    in_use = set(_files_in_use())
    return sorted(name for name in new if str(SHARED_MEMORY / name) not in in_use)


def _newer(mark: str, already_there: frozenset[int]) -> list[LeftProcess]:
    return [p for pid, p in marked_processes(mark).items() if pid not in already_there]


def _wait_for_one(processes: list[LeftProcess], deadline: float) -> bool:
    """Whether the first of them ended before the deadline."""
    try:
        pidfd = os.pidfd_open(processes[0].pid)
    except ProcessLookupError:
        return True
    try:
        remaining = max(0.0, deadline - time.monotonic())
        return bool(select.select([pidfd], [], [], remaining)[0])
    finally:
        os.close(pidfd)


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _state_and_parent(pid: int) -> tuple[str, int]:
    # The command's name is in parentheses and may contain anything, so count from its end.
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[1])


def _descends_from_us(pid: int, parents: dict[int, int]) -> bool:
    while (pid := parents.get(pid, 0)) > 1:
        if pid == os.getpid():
            return True
    return False


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "(ended meanwhile)"
    return b" ".join(words).decode(errors="replace").strip()[:200]


def _files_in_use() -> Iterator[str]:
    for pid in _pids():
        try:
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                yield str(descriptor.readlink())
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                yield line.partition("/")[1] + line.partition("/")[2]
        except OSError:
            continue
