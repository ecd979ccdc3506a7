"""The address under which the other nodes reach this one."""

import socket
import struct
from collections.abc import Mapping
from contextlib import suppress

from rankwise.base.errors import ConfigError
from rankwise.drivers.real.loopback import loopback_address
from rankwise.drivers.real.stores.addresses import is_here
from rankwise.drivers.real.stores.connections import split_endpoint
from rankwise.drivers.real.stores.names import Address, addresses_of

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_DISCARD_PORT = 9
ANYWHERE = (
    (socket.AF_INET, ("192.0.2.1", _DISCARD_PORT)),
    (socket.AF_INET6, ("2001:db8::1", _DISCARD_PORT)),
)
"""Addresses for documentation: the way to them is the way to anywhere else."""
_SIOCGIFADDR = 0x8915
"""Linux: asks for an interface's IPv4 address."""


def own_address(endpoint: str) -> str:
    """This node's address on the way to `endpoint`: what the kernel would send from.

    No name of this host is looked up and nothing is sent. Without an endpoint, or one on this very
    host, the others are on this host as well. While the endpoint's name is unknown, it is the
    address on the way to anywhere else.
    """
    host = split_endpoint(endpoint.split(",", maxsplit=1)[0])[0] if endpoint else "localhost"
    if host == "localhost":
        return loopback_address()
    addresses = [(found[0], found[4]) for found in _found(host)]
    # Of an unknown name the store will say so, and where it was sought. It may be known soon.
    for family, address in addresses or ANYWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                own: str = probe.getsockname()[0]
                return own
        except OSError:
            continue
    return loopback_address()


def own_hosts(endpoints: str) -> tuple[str, ...]:
    """Which hosts of endpoints, with commas in between, are this machine."""
    hosts = [split_endpoint(one)[0] for one in endpoints.split(",") if one]
    return tuple(filter(is_here, hosts))


def _found(host: str) -> list[Address]:
    try:
        return addresses_of(host, _DISCARD_PORT)
    except OSError:
        return []


def address_of(local_addr: str) -> str:
    """What `--local-addr` means: an address, a host's name, or the name of an interface.

    Raises:
        ConfigError: it is none of them.
    """
    if local_addr in (name for _, name in socket.if_nameindex()):
        return _address_of_interface(local_addr)
    try:
        addresses_of(local_addr)
    except OSError as error:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(
            f"--local-addr is {local_addr!r}, expected an address, a host's name or an interface: "
            f"{error}",
            hint=f"the interfaces of this host are {names}",
        ) from error
    return local_addr


def interface_environment(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Tells gloo and tensorpipe the interface under whose address ranks know each other.

    Left alone they look up this host's name, which in containers often means the loopback.
    """
    name = interface_of(address)
    if name is None:
        return {}
    return {variable: name for variable in _INTERFACE_VARIABLES if variable not in environ}


def interface_of(address: str) -> str | None:
    """The name of the interface that has this address; None if none of this host's has."""
    for _, name in socket.if_nameindex():
        if address in _addresses_of_interface(name):
            return name
    return None


def _address_of_interface(name: str) -> str:
    """The first address of an interface, IPv4 before IPv6.

    Raises:
        ConfigError: it has none.
    """
    addresses = _addresses_of_interface(name)
    if not addresses:
        raise ConfigError(f"--local-addr names the interface {name!r}, which has no address")
    return addresses[0]


def _addresses_of_interface(name: str) -> list[str]:
    """Its main IPv4 address, if it has one, and its IPv6 addresses."""
    import fcntl  # noqa: PLC0415  # only for several nodes

    addresses = []
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        addresses.append(socket.inet_ntoa(answer[20:24]))
    for line in _ipv6_lines():
        digits, *_, device = line.split()
        if device == name:
            addresses.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return addresses


def _ipv6_lines() -> list[str]:
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            return table.read().splitlines()
    except OSError:  # no IPv6 here
        return []
