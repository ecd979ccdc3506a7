"""Which process of this machine listens at a port, as far as the kernel shows it to us.

Whether it is an agent of rankwise no command tells: agents live in programs of any name, and a
program may have any argument. So who serves a store there holds an abstract unix socket, as long as
it does, whose name has the port (`mark_port`). `/proc/net/unix` shows it to all users, and to other
containers in the same network namespace, to which the kernel does not show the process. Agents that
serve no store there are known by their control sockets.
"""

import os
import pwd
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from rankwise.base.errors import StoreRefused
from rankwise.drivers.real.stores.connections import endpoint_text

_LISTENS = "0A"
_COMMAND_LENGTH_MAX = 120
_MARK = "rankwise-store/"


STRANGER_PATIENCE_S = 10.0
"""How long one who has our port may take to greet, before it is looked up who that is."""


class PortOwner(NamedTuple):
    """The process that listens: of another user's, only the user is known."""

    user: str
    pid: int | None = None
    command: str = ""
    is_rankwise: bool = False
    """Whether it is an agent, or a program that uses rankwise: it may yet serve."""

    def __str__(self) -> str:
        if self.pid is None:
            return f"a process of user {self.user}"
        return f"process {self.pid} of user {self.user} ({self.command})"


def port_owner(port: int) -> PortOwner | None:
    """The process that listens at a TCP port of this machine; None if none is known."""
    for inode, uid in _listeners(port):
        pid = _process_with(f"socket:[{inode}]")
        command = "" if pid is None else _command_of(pid)
        return PortOwner(_user(uid), pid, command, _is_rankwise(port, pid))
    return None


def refuse_stranger(host: str, port: int) -> None:
    """Raise `StoreRefused` if a process of this machine listens there that is no agent.

    For a process that could not bind the port, and got no greeting there.
    """
    owner = port_owner(port)
    if owner is not None and not owner.is_rankwise:
        raise StoreRefused(
            f"the nodes cannot meet at {endpoint_text(host, port)}: {owner} listens at port {port} "
            "of this machine, and is not an agent of rankwise",
            hint="end it, or choose another port on all nodes (--rdzv-endpoint, --master-port)",
        )


def mark_port(port: int) -> socket.socket | None:
    """Tell all who look that a store of rankwise is served at this port, until it is closed.

    None where that cannot be told: in a sandbox without unix sockets, or since this process serves
    at that port of another address already.
    """
    try:
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:
        return None
    try:
        mark.bind(f"\0{_MARK}{port}/{os.getpid()}")
    except OSError:
        mark.close()
        return None
    return mark


def _is_rankwise(port: int, pid: int | None) -> bool:
    with suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        for line in file:
            name = line.rpartition(" ")[2].rstrip("\n")
            is_mark = name.startswith(f"@{_MARK}{port}/")
            # The names of control sockets: `rankwise.launch.control.addresses`.
            is_agent = name.startswith("@rankwise/") and name.endswith(f"/{pid}")
            if is_mark or is_agent:
                return True
    return False


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
