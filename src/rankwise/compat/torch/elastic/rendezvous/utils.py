"""Endpoints and settings, as texts; and waits, which handlers of other packages take from here."""

import ipaddress
import random
import re
import socket
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from rankwise.base.errors import LocalProtocolError
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


SHORTEST_S = 0.01


def _delay(seconds: float | tuple[float, float]) -> None:
    """Wait for so long, or for some time between the two; what is hardly a wait is left out."""
    if isinstance(seconds, tuple):
        seconds = random.uniform(*seconds)  # noqa: S311  # it spreads load
    if seconds >= SHORTEST_S:
        threading.Event().wait(seconds)


class _PeriodicTimer:
    """Calls `function(*args, **kwargs)` in a thread, with `interval` between, until cancelled.

    A timer without references cancels itself, but not because the program ends.
    """

    def __init__(
        self, interval: timedelta, function: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        self._interval_s = interval.total_seconds()
        self._call = partial(function, *args, **kwargs)
        self._stopped = threading.Event()
        self._name: str | None = None
        self._thread: threading.Thread | None = None
        self._finalizer: weakref.finalize[..., _PeriodicTimer] | None = None

    @property
    def name(self) -> str | None:
        """The name of its thread."""
        return self._name

    def set_name(self, name: str) -> None:
        """Name its thread.

        Raises:
            LocalProtocolError: it has been started; it is a RuntimeError.
        """
        self._refuse_if_started()
        self._name = name

    def start(self) -> None:
        """Begin; the first call is one interval from now.

        Raises:
            LocalProtocolError: it has been started; it is a RuntimeError.
        """
        self._refuse_if_started()
        self._thread = threading.Thread(
            # It knows nothing of the timer, which must be able to go while it runs.
            target=_repeat,
            args=(self._interval_s, self._call, self._stopped),
            name=self._name or "PeriodicTimer",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, _stop, self._stopped, self._thread)
        self._finalizer.atexit = False
        self._thread.start()

    def cancel(self) -> None:
        """Stop; a call that is under way ends before. Harmless the second time."""
        if self._finalizer is not None:
            self._finalizer()

    def _refuse_if_started(self) -> None:
        if self._thread is not None:
            raise LocalProtocolError("The timer has already started.")


def _repeat(interval_s: float, call: Callable[[], None], stopped: threading.Event) -> None:
    while not stopped.wait(interval_s):
        call()


def _stop(stopped: threading.Event, thread: threading.Thread) -> None:
    stopped.set()
    if thread is not threading.current_thread():
        thread.join()
