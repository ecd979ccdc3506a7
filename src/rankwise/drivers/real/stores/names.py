"""Looks up names of machines, with an end to the waiting.

Where no name server answers, the C library goes on asking for ten seconds and more, and neither a
deadline nor a signal ends that. So each name is looked up in a thread of its own, at most one at a
time, and a caller waits for that thread no longer than for anything else. A thread that is not
waited for any more is left behind: it ends by itself, and does not keep the process. Addresses need
no thread.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Condition, Thread
from time import monotonic

from rankwise.drivers.real.loopback import loopback_address

Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]
"""As `socket.getaddrinfo` tells it."""

LEAST_S = 0.001
"""A socket that may wait for no time at all does not wait, which is something else."""


class Names:
    """Looks up names for the connections of one client. Any thread may call, and may close it."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._under_way: dict[str, _LookUp] = {}
        self._is_closed = False

    def connect(self, host: str, port: int, timeout_s: float) -> socket.socket:
        """A connection to the first address of `host` that takes one; its timeout is what is left.

        Raises:
            OSError: there is no such name, no connection, or no time left; or this is closed.
        """
        ends_at = monotonic() + timeout_s
        last_error = OSError(f"{host} has no address")
        for family, kind, protocol, _, address in self.addresses(host, port, timeout_s):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(max(LEAST_S, ends_at - monotonic()))
                sock.connect(address)
            except OSError as error:
                sock.close()
                last_error = error
            else:
                return sock
        raise last_error

    def addresses(self, host: str, port: int, timeout_s: float | None = None) -> list[Address]:
        """All addresses of `host`, for streams; None waits until name servers have answered.

        Raises:
            OSError: there is no such name, or no time left; or this is closed.
        """
        if host == "localhost":  # the file of names may know its IPv4 address alone
            host = loopback_address()
        with suppress(socket.gaierror):
            return _asked(host, port, socket.AI_NUMERICHOST)
        with self._changed:
            look_up = self._under_way.get(host)
            if look_up is None and not self._is_closed:
                look_up = self._under_way[host] = _LookUp(host)
                _in_thread(partial(self._look_up, look_up))
            over = self._changed.wait_for(
                lambda: self._is_closed or look_up is None or look_up.is_over, timeout_s
            )
        if not over or look_up is None or not look_up.is_over:
            raise TimeoutError(f"no name server answered for {host}")
        if look_up.error is not None:
            raise look_up.error
        return [(*found[:4], (found[4][0], port, *found[4][2:])) for found in look_up.found]

    def close(self) -> None:
        """Wake all who wait; from now on names are not looked up any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _look_up(self, look_up: "_LookUp") -> None:
        try:
            look_up.found = _asked(look_up.host, 0, socket.AI_CANONNAME)
        except OSError as error:
            look_up.error = error
        with self._changed:
            look_up.is_over = True
            del self._under_way[look_up.host]
            self._changed.notify_all()


class _LookUp:
    """One question to the name servers."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.is_over = False
        self.found: list[Address] = []
        self.error: OSError | None = None


def addresses_of(host: str, port: int = 0) -> list[Address]:
    """All addresses of `host`, the first with its canonical name; signals are handled meanwhile.

    Raises:
        OSError: there is no such name.
    """
    return Names().addresses(host, port)


def full_name_of(host: str) -> str:
    """As `socket.getfqdn`, but signals are handled meanwhile, and no name is too odd."""
    found = [host]

    def look_up() -> None:
        with suppress(UnicodeError):  # what no name server can be asked for is all there is
            found.append(socket.getfqdn(host))

    _in_thread(look_up).join()
    return found[-1]


def _in_thread(look_up: Callable[[], None]) -> Thread:
    work = Thread(target=look_up, name="rankwise-name", daemon=True)
    work.start()
    return work


def _asked(host: str, port: int, flags: int) -> list[Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:
        raise OSError(f"{host!r} cannot be the name of a machine: {error}") from error
    return found  # type: ignore[return-value]  # what is told of an IPv6 address is longer
