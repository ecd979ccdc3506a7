"""Which process of this machine listens at a port, as far as the kernel shows it to us."""

import os
import pwd
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

_LISTENS = "0A"
_COMMAND_LENGTH_MAX = 120


class PortOwner(NamedTuple):
    """Who listens: of another user's process only that user is known."""

    user: str
    pid: int | None = None
    command: str = ""

    @property
    def is_rankwise(self) -> bool:
        """Whether it is an agent, or a program that uses rankwise: it may yet serve."""
        return any(os.path.basename(word) == "rankwise" for word in self.command.split())

    def __str__(self) -> str:
        if self.pid is None:
            return f"a process of user {self.user}"
        return f"process {self.pid} of user {self.user} ({self.command})"


def port_owner(port: int) -> PortOwner | None:
    """The process that listens at a TCP port of this machine; None if none is known."""
    for inode, uid in _listeners(port):
        pid = _process_with(f"socket:[{inode}]")
        command = "" if pid is None else _command_of(pid)
        return PortOwner(_user(uid), pid, command)
    return None


def _listeners(port: int) -> Iterator[tuple[str, int]]:
    """The inodes and users of sockets that listen there."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(table, encoding="ascii") as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9], int(fields[7])


def _process_with(descriptor: str) -> int | None:
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is another user's
            for fd in os.listdir(f"/proc/{name}/fd"):
                if os.readlink(f"/proc/{name}/fd/{fd}") == descriptor:
                    return int(name)
    return None


def _command_of(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        shown = " ".join(words.split())
        is_long = len(shown) > _COMMAND_LENGTH_MAX
        return f"{shown[:_COMMAND_LENGTH_MAX]} …" if is_long else shown
    return ""


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
