"""Endpoints and settings, as texts."""

import ipaddress
import re
import socket

from rankwise.compat.torch.elastic.rendezvous.periodic import PeriodicTimer as _PeriodicTimer
from rankwise.compat.torch.elastic.rendezvous.periodic import delay as _delay
from rankwise.drivers.real.stores.names import addresses_of

__all__ = ["_PeriodicTimer", "_delay", "parse_rendezvous_endpoint"]


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Read `HOST`, `HOST:PORT` or `[IPV6]:PORT`; nothing means this host.

    Raises:
        ValueError: it is something else.
    """
    text = (endpoint or "").strip()
    if not text:
        return "localhost", default_port
    is_bare_ipv6 = text.startswith("[") and text.endswith("]")
    host, colon, port_text = (text, "", "") if is_bare_ipv6 else text.rpartition(":")
    if not colon:
        host = text
    if len(host) > 1 and host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    port = _try_parse_port(port_text) if colon else default_port
    if port is None or port >= 1 << 16:
        raise ValueError(
            f"The port number of the rendezvous endpoint '{text}' must be an integer between 0 and "
            "65536."
        )
    if not re.fullmatch(r"[\w.:-]+", host):
        raise ValueError(
            f"The hostname of the rendezvous endpoint '{text}' must be a dot-separated list of "
            "labels, an IPv4 address, or an IPv6 address."
        )
    return host, port


def _parse_rendezvous_config(config_str: str) -> dict[str, str]:
    """Read `key=value,key=value`.

    Raises:
        ValueError: a key or a value is missing.
    """
    config: dict[str, str] = {}
    if not config_str.strip():
        return config
    for pair in config_str.split(","):
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key:
            raise ValueError(
                "The rendezvous configuration string must be in format "
                "<key1>=<value1>,...,<keyN>=<valueN>."
            )
        if not value:
            raise ValueError(
                f"The rendezvous configuration option '{key}' must have a value specified."
            )
        config[key] = value
    return config


def _try_parse_port(port_str: str) -> int | None:
    """The number in a text of one to five digits; None for anything else."""
    return int(port_str) if re.fullmatch(r"[0-9]{1,5}", port_str) else None


def _matches_machine_hostname(host: str) -> bool:
    """Whether `host`, a name or an address, means this machine."""
    if host == "localhost":
        return True
    try:
        if ipaddress.ip_address(host).is_loopback:
            return True
    except ValueError:
        pass  # a name, which is looked up below
    own_name = socket.gethostname()
    if host == own_name:
        return True
    theirs = _addresses(host)
    ours = _addresses(own_name)
    names = {name for name, _ in ours if name}
    return host in names or bool({addr for _, addr in theirs} & {addr for _, addr in ours})


def _addresses(host: str) -> list[tuple[str, str]]:
    """A host's canonical name (in the first) and addresses; none if it cannot be resolved."""
    try:
        found = addresses_of(host)
    except OSError:
        return []
    return [(canonical, str(address[0])) for _, _, _, canonical, address in found]
