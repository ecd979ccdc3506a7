"""What processes have computed, read and written so far, as the kernel counts it in /proc.

One look reads a file per process of the machine (who is whose child), and for each rank two files
per process and two per thread: some 10 us each. A file that cannot be read counts as nothing.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from rankwise.base.units import SECOND, ZERO, Duration

_TICK = SECOND // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_WATCHERS = (b"pt_nccl_", b"NCCL ", b"cuda-EvtHandlr")
"""Threads that look after calls and compute nothing for the program; NCCL's spin while it waits."""
_BYTE_COUNTS = (b"rchar:", b"wchar:", b"read_bytes:")
"""What `read` and `write` have moved, and what a mapped file has brought in."""
_STOPPED = (b"T", b"t")


class ProcessWork(msgspec.Struct, frozen=True):
    """What a process and its descendants have done.

    Attributes:
        main_time: CPU time of its main thread.
        main_waited: for how long that was ready to run and had no CPU; 0 where it is not counted.
        helper_times: CPU time of all other threads, by number of the thread; and of children that
            have ended, by the negative number of the process that waited for them.
        byte_count: what all have read and written.
        helper_waits: for how long the threads among those were ready and had no CPU.
        main_runs: how often the main thread got a CPU; 0 if the kernel does not count it.
    """

    main_time: Duration
    main_waited: Duration
    helper_times: Mapping[int, Duration]
    byte_count: int
    helper_waits: Mapping[int, Duration] = {}
    main_runs: int = 0


class Usage(NamedTuple):
    """What processes use: seconds of CPU time so far, resident bytes, and when the first began."""

    cpu_s: float = 0.0
    memory_bytes: int = 0
    began_s: float = float("inf")
    """On the clock that counts from the machine's start, suspensions included."""
    is_stopped: bool = False
    """Whether the process that leads them is, by a signal or by a debugger."""


def works_of(pids: Iterable[int]) -> dict[int, ProcessWork]:
    """What each of these processes has done; those that have ended are left out."""
    children = _children()
    return {pid: work for pid in pids if (work := _work_of(pid, pid, children)) is not None}


def work_beside_this_thread(main: int, *, since_s: float = 0.0) -> ProcessWork | None:
    """What this process and its descendants have done, but for the thread that asks.

    Args:
        main: the number of the thread that counts as the main one; None is returned if it has
            ended.
        since_s: descendants count that have begun since then, in seconds of `CLOCK_BOOTTIME`.
    """
    pid, asking = os.getpid(), threading.get_native_id()
    work = _work_of(pid, main, _children(int(since_s * SECOND) // _TICK))
    if work is None:
        return None
    helpers = {key: time for key, time in work.helper_times.items() if key != asking}
    byte_count = work.byte_count - _bytes_in(f"/proc/{pid}/task/{asking}/io")
    return msgspec.structs.replace(work, helper_times=helpers, byte_count=byte_count)


def bytes_of_this_process() -> int:
    """What this process has read and written."""
    return _bytes_in("/proc/self/io")


def usage_by_session() -> dict[int, Usage]:
    """The usage of every session on this machine, by the process that leads it.

    Each rank leads a session, and what is in it belongs to that rank: data loaders, compilers.
    """
    found: dict[int, Usage] = {}
    for pid, fields in _processes():
        # Numbered as in proc(5), from `state`, which is 3: session 6, utime 14 and stime 15, those
        # of children that have ended 16 and 17, starttime 22, rss 24.
        session = int(fields[3])
        before = found.get(session, Usage())
        found[session] = Usage(
            cpu_s=before.cpu_s + sum(map(int, fields[11:15])) * _TICK / SECOND,
            memory_bytes=before.memory_bytes + int(fields[21]) * _PAGE_BYTES,
            began_s=min(before.began_s, int(fields[19]) * _TICK / SECOND),
            is_stopped=before.is_stopped or (pid == session and fields[0] in _STOPPED),
        )
    return found


def usage_of(pid: int) -> tuple[Duration, int] | None:
    """A process's CPU time so far, with that of children that have ended, and memory in bytes."""
    fields = _fields_after_name(_read(f"/proc/{pid}/stat"))
    if not fields:
        return None
    return Duration(sum(map(int, fields[11:15])) * _TICK), int(fields[21]) * _PAGE_BYTES


def cpu_wait_of(pid: int) -> Duration | None:
    """How long a process's main thread was ready to run and had no CPU; None if not counted."""
    counted = _read(f"/proc/{pid}/task/{pid}/schedstat").split()
    return Duration(int(counted[1])) if counted else None


def is_present(pid: int) -> bool:
    """Whether there is a process of that number, a zombie at least."""
    return bool(_fields_after_name(_read(f"/proc/{pid}/stat")))


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal, such as SIGSTOP, or by a debugger."""
    return _fields_after_name(_read(f"/proc/{pid}/stat"))[:1] in ([state] for state in _STOPPED)


def _work_of(pid: int, main: int, children: Mapping[int, list[int]]) -> ProcessWork | None:
    of_main = _schedule_of(pid, main)
    if of_main is None:
        return None
    helpers: dict[int, Duration] = {}
    waits: dict[int, Duration] = {}
    byte_count = 0
    for process in _tree(pid, children):
        byte_count += _bytes_in(f"/proc/{process}/io")
        for thread, (ran, waited, _) in _threads_of(process):
            helpers[thread], waits[thread] = ran, waited
    helpers.pop(main, None)
    ran, waited, runs = of_main
    return ProcessWork(ran, waited, helpers, byte_count, waits, runs)


def _tree(root: int, children: Mapping[int, list[int]]) -> Iterator[int]:
    yield root
    for child in children.get(root, ()):
        yield from _tree(child, children)


def _children(since: int = 0) -> dict[int, list[int]]:
    """The children of every process that began at that tick or later, by parent.

    Not every kernel tells a process's own. A process without its parent, as one that a shell has
    left in the background, is a child of the leader of its session: of the rank, unless it began a
    session.
    """
    family = {pid: (int(fields[1]), int(fields[3]), fields) for pid, fields in _processes()}
    children: dict[int, list[int]] = {}
    for pid, (parent, session, fields) in family.items():
        is_orphan = pid != session and family.get(parent, (0, 0))[1] != session
        if int(fields[19]) >= since:
            children.setdefault(session if is_orphan else parent, []).append(pid)
    return children


def _processes() -> Iterator[tuple[int, list[bytes]]]:
    """Every process, and what `/proc/PID/stat` says of it, from its state on."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        if fields := _fields_after_name(_read(f"/proc/{name}/stat")):
            yield int(name), fields


class _ThreadSchedule(NamedTuple):
    """How long a thread has run and waited for a CPU, and how often it got one."""

    ran: Duration
    waited: Duration = ZERO
    runs: int = 0


def _schedule_of(pid: int, thread: int) -> _ThreadSchedule | None:
    """The scheduler's counts of a thread; some kernels count only how long it has run."""
    path = f"/proc/{pid}/task/{thread}"
    if counted := _read(f"{path}/schedstat").split():
        return _ThreadSchedule(
            Duration(int(counted[0])), Duration(int(counted[1])), int(counted[2])
        )
    fields = _fields_after_name(_read(f"{path}/stat"))
    return _ThreadSchedule(_cpu_time(fields)) if fields else None


def _threads_of(pid: int) -> Iterator[tuple[int, _ThreadSchedule]]:
    """What each thread of a process has run and waited, but for threads that compute nothing."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        name = _read(f"/proc/{pid}/task/{thread}/comm")
        times = _schedule_of(pid, int(thread))
        if times is not None and not name.startswith(_WATCHERS):
            yield int(thread), times
    if fields := _fields_after_name(_read(f"/proc/{pid}/stat")):
        yield -pid, _ThreadSchedule(Duration((int(fields[13]) + int(fields[14])) * _TICK))


def _cpu_time(fields: list[bytes]) -> Duration:
    return Duration((int(fields[11]) + int(fields[12])) * _TICK)


def _bytes_in(path: str) -> int:
    words = _read(path).split()
    return sum(
        int(count)
        for name, count in zip(words[::2], words[1::2], strict=True)
        if name in _BYTE_COUNTS
    )


def _fields_after_name(stat: bytes) -> list[bytes]:
    """The fields after the name, which stands in parentheses and may hold anything."""
    return stat.rpartition(b")")[2].split()


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 4096)
    except OSError:
        return b""  # it has ended meanwhile, or belongs to another user
    finally:
        os.close(fd)
