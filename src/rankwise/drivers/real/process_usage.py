"""What the processes of a session use: CPU time and memory, as the kernel counts them.

Each rank leads a session, and what is in it belongs to that rank: data loaders, compilers.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple


class Usage(NamedTuple):
    """What processes use: seconds of CPU time so far, resident bytes, and when the first began."""

    cpu_s: float = 0.0
    memory_bytes: int = 0
    began_s: float = float("inf")
    """On the clock that counts from the machine's start, suspensions included."""


def usage_by_session() -> dict[int, Usage]:
    """The usage of every session on this machine, by the process that leads it."""
    found: dict[int, Usage] = {}
    ticks, page_bytes = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    for fields in _processes():
        # Numbered as in proc(5), from `state`, which is 3: session 6, utime 14 and stime 15, those
        # of children that have ended 16 and 17, starttime 22, rss 24.
        session = int(fields[3])
        before = found.get(session, Usage())
        found[session] = Usage(
            cpu_s=before.cpu_s + sum(map(int, fields[11:15])) / ticks,
            memory_bytes=before.memory_bytes + int(fields[21]) * page_bytes,
            began_s=min(before.began_s, int(fields[19]) / ticks),
        )
    return found


def _processes() -> Iterator[list[bytes]]:
    """What `/proc/PID/stat` says of each process, from its state on."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                yield file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
