"""Ends this process's TCP connections to other processes of this machine, and no others.

A thread that waits in gloo, or in torch's store, comes back when the connection that it waits for
ends, and in no other way: neither a signal nor the backend's `abort` reaches it. Which connections
those are, no library tells. The kernel does: both ends of a connection within one machine stand in
`/proc/net/tcp`, each with the inode of its socket, and `/proc/PID/fd` says whose sockets these are.
So a connection to a database, or to a service that watches the training, is left alone.

The process at the other end of a connection to another machine is unknown. Among several nodes
those are ended that the process has opened, or accepted, since it was last asked (`connections`).
"""

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

_MAPPED = "0000000000000000FFFF0000"
"""How `/proc/net/tcp6` begins an address of IPv4."""
_SOCKET = "socket:["
_NO_PORT = ":0000"


class _End(NamedTuple):
    here: str
    there: str


def connections() -> frozenset[int]:
    """What tells the sockets of this process from those that it has later."""
    return frozenset(_sockets_of(os.getpid()))


def end_connections_to(pids: Iterable[int], but_for: frozenset[int] | None = None) -> int:
    """Shut down all TCP connections between this process and those; tell how many there were.

    The descriptors stay open, and are their owners'.

    Args:
        pids: the processes.
        but_for: if given, connections to any process are shut down, but for these.
    """
    inodes = {each: end for table in ("tcp", "tcp6") for end, each in _ends(table)}
    by_end = {end: inode for inode, end in inodes.items()}
    theirs = {inode for pid in pids if pid != os.getpid() for inode in _sockets_of(pid)}
    count = 0
    for inode, descriptor in _sockets_of(os.getpid()).items():
        end = inodes.get(inode)
        if end is None or end.there.endswith(_NO_PORT):  # it listens: there is no other end
            continue
        is_new = but_for is not None and inode not in but_for
        if is_new or by_end.get(_End(end.there, end.here)) in theirs:
            count += _shut_down(descriptor)
    return count


def _ends(table: str) -> Iterator[tuple[_End, int]]:
    try:
        with open(f"/proc/self/net/{table}", encoding="ascii") as file:
            lines = file.read().splitlines()[1:]
    except OSError:
        return  # a kernel without IPv6
    for line in lines:
        _, here, there, _, _, _, _, _, _, inode, *_ = line.split()
        if inode != "0":
            yield _End(here.removeprefix(_MAPPED), there.removeprefix(_MAPPED)), int(inode)


def _sockets_of(pid: int) -> dict[int, int]:
    """The descriptors of a process that are sockets, by inode; none if it has ended."""
    found: dict[int, int] = {}
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed since, as the one of this very listing is
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith(_SOCKET):
                    found[int(target[len(_SOCKET) : -1])] = int(name)
    return found


def _shut_down(descriptor: int) -> int:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return 0  # it has ended by itself
    return 1
