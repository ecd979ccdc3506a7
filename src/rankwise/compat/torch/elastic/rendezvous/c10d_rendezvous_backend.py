"""A `RendezvousBackend` in one of torch's stores, for launchers that make their own.

torch is imported when a store is made. The backend `c10d` of `rankwise run` does not use this: it
keeps a log in torch's store, which its nodes need not poll.
"""

import sys
import tempfile
from base64 import b64encode
from datetime import timedelta
from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.compat.torch.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
)
from rankwise.compat.torch.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    decoded_state,
    failure_recorded,
)
from rankwise.compat.torch.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    parse_rendezvous_endpoint,
)

__all__ = ["C10dRendezvousBackend", "create_backend"]

DEFAULT_PORT = 29400
READ_TIMEOUT_S = 60
NO_STATE = "Y2FuaW1hZGFt"
"""What torch writes for no state: its stores wait for a key that is missing."""
NOT_ANSWERED = (
    "The connection to the C10d store has failed. See inner exception for details."  # torch's words
)


def __getattr__(name: str) -> Any:
    """Stores of torch's, which programs find here, and may replace here."""
    if name not in ("FileStore", "Store", "TCPStore"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from torch import distributed  # noqa: PLC0415  # two seconds, and only for this
    except ImportError as error:
        raise ConfigError(
            "a C10dRendezvousBackend keeps its state in torch's stores, and torch is not installed",
            hint="pip install torch, or write a RendezvousBackend of your own",
        ) from error
    return getattr(distributed, name)


class C10dRendezvousBackend(RendezvousBackend):
    """Keeps the state under one key of a store of torch's, as base64.

    Args:
        store: any store of torch's with `get` and `compare_set`. One that can be cloned is: agents
            that wait in it must not keep this node from renewing its lease.
        run_id: names the key.

    Raises:
        ValueError: the run id is empty.
        RendezvousConnectionError: the store does not answer.
    """

    def __init__(self, store: Any, run_id: str) -> None:
        if not run_id:
            raise ValueError("The run id must be a non-empty string.")
        self._key = f"torch.rendezvous.{run_id}"
        self._store = _cloned(store)
        self._ask("compare_set", self._key, "", NO_STATE)

    @property
    def name(self) -> str:
        """`c10d`."""
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state; its token is what the store holds."""
        return _decoded(self._ask("get", self._key))

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the state if the store still holds the token."""
        if token and not isinstance(token, bytes):
            there = self.get_state()
            return None if there is None else (*there, False)
        expected = token.decode() if token else NO_STATE
        desired = b64encode(state).decode()
        there = _decoded(self._ask("compare_set", self._key, expected, desired))
        # The store tells what it holds, not whether it was us.
        return None if there is None else (*there, there[0] == state)

    def _ask(self, operation: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, operation)(*arguments)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError(NOT_ANSWERED) from error


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Any]:
    """Make a store of torch's, and a backend in it.

    Settings: `store_type` (`tcp`, the default, or `file`), `read_timeout` in seconds (60), and
    `is_host`: whether this process serves the TCPStore. By default it does if the endpoint is on
    this machine and no other process serves there.

    Returns:
        The backend and the store.

    Raises:
        ValueError: a setting cannot be used.
        RendezvousConnectionError: there is no store.
        RendezvousError: no file can be made.
    """
    with failure_recorded(params.run_id):
        store = _create_store(params)
        return C10dRendezvousBackend(store, params.run_id), store


def _create_store(params: RendezvousParameters) -> Any:
    store_type = params.get("store_type", "tcp").strip().lower()
    if store_type == "file":
        return _create_file_store(params)
    if store_type == "tcp":
        return _create_tcp_store(params)
    raise ValueError("Invalid store type given. Currently only supports file and tcp.")


def _create_file_store(params: RendezvousParameters) -> Any:
    path = params.endpoint
    if not path:
        try:
            _, path = tempfile.mkstemp()
        except OSError as error:
            raise RendezvousError(
                "The file creation for C10d store has failed. See inner exception for details."
            ) from error
    try:
        return _torchs("FileStore")(path)
    except (ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(NOT_ANSWERED) from error


def _create_tcp_store(params: RendezvousParameters) -> Any:
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=DEFAULT_PORT)
    is_host_given = params.get_as_bool("is_host")
    read_timeout = params.get_as_int("read_timeout", READ_TIMEOUT_S)
    if read_timeout is None or read_timeout <= 0:
        raise ValueError("The read timeout must be a positive integer.")
    hosts = _matches_machine_hostname(host) if is_host_given is None else is_host_given
    # Another process of this machine may be quicker to serve.
    attempts = [True, False] if hosts and is_host_given is None else [hosts]
    for is_master in attempts:
        try:
            return _torchs("TCPStore")(
                host,
                port,
                is_master=is_master,
                multi_tenant=True,
                timeout=timedelta(seconds=read_timeout),
            )
        except (ValueError, RuntimeError, TimeoutError) as error:
            last_error = error
    raise RendezvousConnectionError(NOT_ANSWERED) from last_error


def _cloned(store: Any) -> Any:
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store  # it cannot be; if it does not answer, the next call says so


def _torchs(name: str) -> Any:
    """A class of torch's, or what a program has put in its place in this module."""
    return getattr(sys.modules[__name__], name)


def _decoded(held: bytes) -> tuple[bytes, Token] | None:
    return None if held == NO_STATE.encode() else (decoded_state(held), held)
