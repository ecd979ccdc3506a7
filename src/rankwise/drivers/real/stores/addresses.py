"""Which address is whose: who listens at an endpoint that all nodes are told.

The kernel is asked, and nothing is guessed: an address that can be bound belongs to this machine.
"""

import errno
import socket
from contextlib import suppress
from ipaddress import ip_address

from rankwise.drivers.real.loopback import loopback_address
from rankwise.drivers.real.stores.names import addresses_of


def listen(host: str, port: int, *, must: bool) -> socket.socket:
    """A socket that listens at an address of this machine.

    A literal address is taken as it is. A name may mean several, and on its own machine often means
    one that others cannot reach, so it stands for all addresses, once one of them is found here.

    Args:
        host: name or address.
        port: 0 lets the kernel choose.
        must: whether this machine has to listen even if it does not know the address: behind a
            translation of addresses it cannot.

    Raises:
        OSError: EADDRNOTAVAIL if the address is elsewhere, EADDRINUSE if it is taken.
    """
    if host == "localhost":
        return _bound(loopback_address(), port)
    if is_literal(host):
        try:
            return _bound(host, port)
        except OSError as error:
            if not must or error.errno != errno.EADDRNOTAVAIL:
                raise
            return _bound("", port)
    if must or is_here(host):
        return _bound("", port)
    raise OSError(errno.EADDRNOTAVAIL, f"{host} is another machine")


def is_here(host: str) -> bool:
    """Whether a name or an address belongs to this machine: the kernel lets us bind it."""
    try:
        found = addresses_of(host)
    except OSError:
        return False  # the name is not known yet; connecting will tell, again and again
    for family, _, _, _, address in found:
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind(address)
            return True
    return False


def is_literal(host: str) -> bool:
    """Whether it is an address already, and no name."""
    with suppress(ValueError):
        ip_address(host.partition("%")[0])
        return True
    return False


def _bound(host: str, port: int) -> socket.socket:
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server(_resolved(host, port, family), family=family, backlog=512)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512
            )
    return socket.create_server(("", port), backlog=512)


def _resolved(host: str, port: int, family: int) -> tuple[str, int]:
    """The address with its zone, if it has one."""
    found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)
    address: tuple[str, int] = found[0][4]  # type: ignore[assignment]
    return address
