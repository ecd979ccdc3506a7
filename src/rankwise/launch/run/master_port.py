"""A port for rank 0 that no other process is given while the run lasts.

Asking the kernel for a free port and closing the socket again leaves a gap in which another
program may be given the same one. Instead the socket stays bound and never listens: the kernel
hands its port to no one who asks for *any* port, yet rank 0 can bind it by number, since on Linux
two sockets with SO_REUSEADDR may share an address while at most one listens.
"""

import socket
from contextlib import suppress
from typing import Self

from rankwise.base.errors import ConfigError


class ReservedPort:
    """A TCP port of this machine that stays ours until `close`.

    Args:
        address: one of this machine's, and no name: to look that up could take ten seconds.

    Raises:
        ConfigError: it is another machine's.
    """

    def __init__(self, address: str) -> None:
        try:
            self._socket = _bound(address)
        except OSError as error:
            raise ConfigError(
                f"no port can be reserved on {address}: {error}",
                hint="use an address of this machine, or name a port with --master-port",
            ) from error
        self.number: int = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


def listen_at(port: int) -> socket.socket | None:
    """A socket that listens where torch's store would, for a rank 0 that will serve it.

    Ranks that are early wait in its queue. Were they refused, torch would sleep for half a second
    and more before it tries again. None if the port is taken.
    """
    for family in (socket.AF_INET6, socket.AF_INET):
        both = family is socket.AF_INET6 and socket.has_dualstack_ipv6()
        with suppress(OSError):
            return socket.create_server(
                ("", port), family=family, backlog=_RANKS_WAITING_MAX, dualstack_ipv6=both
            )
    return None


def listen_next_to(host: str, port: int) -> socket.socket | None:
    """A socket that listens on the port behind this one, where ranks of several nodes connect.

    It listens before any rank lives, so that ranks which are early wait in its queue. None if the
    port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port + 1), family=family, backlog=_RANKS_WAITING_MAX)
    except (OSError, OverflowError):
        return None


_RANKS_WAITING_MAX = 4096


def address_here(host: str) -> str:
    """The address of this machine that `--master-addr` means; signals are handled meanwhile.

    Raises:
        ConfigError: the name is unknown, or it is another machine's.
    """
    from rankwise.drivers.real.stores.names import addresses_of  # noqa: PLC0415  # rare

    try:
        addresses = [found[4][0] for found in addresses_of(host)]
    except OSError as error:
        raise ConfigError(
            f"--master-addr {host!r} cannot be resolved: {error}",
            hint="use an address of this machine, such as 127.0.0.1",
        ) from error
    last_error: OSError | None = None
    for address in addresses:
        try:
            _bound(address).close()
        except OSError as error:
            last_error = error
        else:
            return address
    raise ConfigError(
        f"no port can be reserved on --master-addr {host!r}: {last_error}",
        hint="use an address of this machine, or name a port with --master-port",
    ) from last_error


def _bound(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, 0))
    except OSError:
        made.close()
        raise
    return made
