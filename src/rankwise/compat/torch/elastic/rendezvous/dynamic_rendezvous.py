"""torch's names for launchers of their own: a handler over a backend that the program brings.

A `RendezvousBackend` keeps one state that can be read, and replaced if it is unchanged. That is
enough for rankwise's own rendezvous: the state becomes a store
(`drivers/real/stores/one_value.py`), in which nodes meet as they do in every other. Since a backend
can only be asked, it is polled: up to ten times a second while something happens, and once a second
otherwise. It is asked by one thread at a time.

The state is rankwise's, not torch's pickle: all nodes of a run are torch's, or all are rankwise's.
`DynamicRendezvousHandler.shutdown` leaves the run as one that is done; `set_closed` ends it.
"""

import binascii
import os
import socket
import sys
import threading
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar

from rankwise.base.errors import StoreRefused, StoreUnavailable
from rankwise.base.units import Duration, duration_from_seconds
from rankwise.compat.torch.elastic.events import NodeState, construct_and_record_rdzv_event
from rankwise.compat.torch.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from rankwise.compat.torch.elastic.rendezvous.node_rounds import HandlerOfRounds, NodeRounds
from rankwise.compat.torch.elastic.rendezvous.torch_store import PrefixedStore, TorchStore
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.vocabulary import World
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.stores.names import full_name_of
from rankwise.drivers.real.stores.one_value import OneValueStore
from rankwise.launch.cluster.settings import RUN_TTL

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousBackend",
    "RendezvousSettings",
    "RendezvousTimeout",
    "create_handler",
]

NO_SHARING_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

Token = Any
"""What a backend names a state by; only the backend understands it."""


class RendezvousBackend(ABC):
    """Keeps the state of a rendezvous; a launcher that has a place for it implements this.

    Both calls raise `RendezvousConnectionError` when the place does not answer: they are made
    again, for as long as the join timeout or the lease allows. Any other exception ends the
    rendezvous, and `next_rendezvous` raises it.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The backend's name, which `get_backend` tells."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token; None if there is no state yet."""

    @abstractmethod
    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the state if `token` is the present state's, or None and there is no state.

        Returns:
            The state that is there then, its token, and whether it was replaced. None says nothing,
            and the state is read.
        """


class RendezvousTimeout:
    """How long a rendezvous may take.

    Args:
        join: until a round is complete; 600 s.
        last_call: how long more nodes are waited for when there are enough; 30 s.
        close: how long a node that is done waits for the others; 30 s.
        heartbeat: how long a sign of life may take; 5 s.

    Raises:
        ValueError: one of them is not positive.
    """

    _DEFAULTS_S: ClassVar = {"join": 600, "last_call": 30, "close": 30, "heartbeat": 5}

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        given = {"join": join, "last_call": last_call, "close": close, "heartbeat": heartbeat}
        self._timeouts: dict[str, timedelta] = {}
        for name, timeout in given.items():
            if timeout is not None and timeout <= timedelta(0):
                raise ValueError(f"The {name} timeout ({timeout}) must be positive.")
            default = timedelta(seconds=self._DEFAULTS_S[name])
            self._timeouts[name] = default if timeout is None else timeout

    @property
    def join(self) -> timedelta:
        """How long a round may take to be complete."""
        return self._timeouts["join"]

    @property
    def last_call(self) -> timedelta:
        """How long more nodes are waited for when there are enough."""
        return self._timeouts["last_call"]

    @property
    def close(self) -> timedelta:
        """How long a node that is done waits for the others."""
        return self._timeouts["close"]

    @property
    def heartbeat(self) -> timedelta:
        """How long a sign of life may take."""
        return self._timeouts["heartbeat"]


@dataclass(repr=False, eq=False, frozen=True)
class RendezvousSettings:
    """What a handler was made with.

    Attributes:
        run_id: the run.
        min_nodes, max_nodes: how many nodes take part.
        timeout: how long it may take.
        keep_alive_interval, keep_alive_max_attempt: a node that was silent for so long, so many
            times, is dead. Their product is the node's lease.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int

    def __post_init__(self) -> None:
        if not self.run_id:
            raise ValueError("The run id must be a non-empty string.")
        if self.min_nodes < 1:
            raise ValueError(
                f"The minimum number of nodes ({self.min_nodes}) must be greater than zero."
            )
        if self.max_nodes < self.min_nodes:
            raise ValueError(
                f"The maximum number of nodes ({self.max_nodes}) must be greater than or equal to "
                f"the minimum number of nodes ({self.min_nodes})."
            )


@dataclass(eq=True, order=True, frozen=True)
class _NodeDesc:
    """A node: the address that others reach it by, and which handler of which process it is."""

    addr: str
    pid: int
    local_id: int

    def __repr__(self) -> str:
        return f"{self.addr}_{self.pid}_{self.local_id}"


class _NodeDescGenerator:
    """Numbers the handlers of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local_id = 0

    def generate(self, local_addr: str | None = None) -> _NodeDesc:
        with self._lock:
            local_id = self._local_id
            self._local_id += 1
        return _NodeDesc(local_addr or full_name_of(socket.gethostname()), os.getpid(), local_id)


class _BackendPlace:
    """A backend as a place for a store's one value; remembers what it raised last."""

    def __init__(self, backend: RendezvousBackend) -> None:
        self._backend = backend
        self.who = f"the rendezvous backend {backend.name}"
        self.trouble: Exception | None = None
        """What the last call raised; None if it did not."""

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token."""
        try:
            state = self._backend.get_state()
        except Exception as error:
            raise self._store_error(error) from error
        self.trouble = None
        return state

    def set_state(
        self, state: bytes, token: Token | None = None, /
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the state if its token is still this one."""
        try:
            answer = self._backend.set_state(state, token)
        except Exception as error:
            raise self._store_error(error) from error
        self.trouble = None
        return answer

    def _store_error(self, error: Exception) -> Exception:
        self.trouble = error
        said = f"{self.who} has failed: {str(error) or type(error).__name__}"
        if isinstance(error, RendezvousConnectionError):
            return StoreUnavailable(said)
        return StoreRefused(said, hint="its get_state and set_state are this program's own")


class DynamicRendezvousHandler(HandlerOfRounds):
    """One node's part in a rendezvous whose state a backend keeps; mostly from `from_backend`."""

    _node_desc_generator = _NodeDescGenerator()

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Any,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: int = 5,
        keep_alive_max_attempt: int = 3,
    ) -> "DynamicRendezvousHandler":
        """Make a handler.

        Args:
            run_id: the run.
            store: what agents exchange values in: a store of torch's, or any object with its
                methods. None: the backend's state serves for that too, which needs no torch.
            backend: keeps the state.
            min_nodes: how few nodes may take part.
            max_nodes: how many may at most.
            local_addr: this node's address, as others reach it; by default its full name.
            timeout: how long it may take.
            keep_alive_interval: a node that was silent for so many seconds,
            keep_alive_max_attempt: so many times, is dead.

        Raises:
            ValueError: the run id is missing, or the numbers make no sense.
        """
        settings = RendezvousSettings(
            run_id,
            min_nodes,
            max_nodes,
            timeout or RendezvousTimeout(),
            keep_alive_interval=timedelta(seconds=keep_alive_interval),
            keep_alive_max_attempt=keep_alive_max_attempt,
        )
        node = cls._node_desc_generator.generate(local_addr)
        return cls(node, settings, backend.name, store, _BackendPlace(backend))

    def __init__(
        self,
        node: _NodeDesc,
        settings: RendezvousSettings,
        backend_name: str,
        store: Any,
        state_holder: _BackendPlace,
    ) -> None:
        self._node = node
        self._settings = settings
        self._backend_name = backend_name
        self._store = store
        self._place = state_holder
        self._shared_tcp_store_server: Any = None
        self._rounds = NodeRounds(
            settings.run_id, _config_from(settings), node.addr, lambda: self._meeting
        )

    @property
    def settings(self) -> RendezvousSettings:
        """What it was made with."""
        return self._settings

    def get_backend(self) -> str:
        """The backend's name."""
        return self._backend_name

    def get_run_id(self) -> str:
        """The run."""
        return self._settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether workers meet in a TCPStore of the first agent: with torch's stores, by default.

        TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 forbids it.
        """
        return _is_torchs(self._store) and os.environ.get(NO_SHARING_VARIABLE, "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node is a member of a new round.

        Raises:
            RendezvousClosedError: the run is over.
            RendezvousConnectionError: the backend does not answer.
            RendezvousStateError: what the backend keeps is not rankwise's.
            RendezvousTimeoutError: the round was not complete in time.
            Exception: whatever else the backend raises.
        """
        try:
            world = self._rounds.next_world()
        except (RendezvousConnectionError, RendezvousTimeoutError) as error:
            if self._place.trouble is not None:
                raise self._place.trouble from error
            if isinstance(error, RendezvousConnectionError):  # it answers what makes no sense
                raise RendezvousStateError(error.message, hint=error.hint) from error
            raise
        store = self._store_of_round(world.round)
        listens = self._where_rank_0_listens(world, store)
        return RendezvousInfo(store, world.node_rank, len(world.members), listens)

    def _stop_heartbeats(self) -> None:
        """Take no part any more, without a word that the work is done."""
        self._rounds.let_go()

    @cached_property
    def _meeting(self) -> OneValueStore:
        return OneValueStore(
            self._place,
            who=self._place.who,
            clock=SystemClock(),
            request_timeout=self._rounds.config.request_timeout,
        )

    def _store_of_round(self, round_number: int) -> Any:
        prefix = f"torch.rendezvous.{self.get_run_id()}.{round_number}"
        if self._store is None:
            return TorchStore(self._meeting, f"{prefix}/")
        if _is_torchs(self._store):
            return _torch_distributed().PrefixStore(prefix, self._store)
        return PrefixedStore(prefix, self._store)

    def _where_rank_0_listens(self, world: World, store: Any) -> RendezvousStoreInfo:
        if not _is_torchs(self._store):
            return RendezvousStoreInfo(world.master_address, world.master_port)
        port = world.master_port
        if self.use_agent_store and world.node_rank == 0:
            if self._shared_tcp_store_server is None:
                self._shared_tcp_store_server = self._create_tcp_store_server(self._node.addr, 0)
            port = self._shared_tcp_store_server.port
        return RendezvousStoreInfo.build(
            world.node_rank, store, local_addr=self._node.addr, server_port=port
        )

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
        return _torch_distributed().TCPStore(
            host_name=master_addr, port=master_port, is_master=True, multi_tenant=True
        )


def decoded_state(text: str | bytes) -> bytes:
    """A state that a backend keeps as base64.

    Raises:
        RendezvousStateError: it is something else.
    """
    try:
        return b64decode(text)
    except binascii.Error as error:
        raise RendezvousStateError(
            "The state object is corrupt. See inner exception for details."
        ) from error


@contextmanager
def failure_recorded(run_id: str) -> Iterator[None]:
    """Record as an event of the run what the block fails with."""
    try:
        yield
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        construct_and_record_rdzv_event(run_id, message, NodeState.FAILED)
        raise


def create_handler(
    store: Any, backend: RendezvousBackend, params: RendezvousParameters
) -> DynamicRendezvousHandler:
    """Make a handler from parameters.

    Settings, all in seconds but the last: `join_timeout`, `last_call_timeout`, `close_timeout`,
    `heartbeat_timeout`, `keep_alive_interval`, and `keep_alive_max_attempt`.

    Raises:
        ValueError: one of them cannot be used.
        TypeError: one of the last two is None, or no number at all.
    """
    with failure_recorded(params.run_id):
        timeout = RendezvousTimeout(
            *(_timeout(params, name) for name in ("join", "last_call", "close", "heartbeat"))
        )
        return DynamicRendezvousHandler.from_backend(
            params.run_id,
            store,
            backend,
            params.min_nodes,
            params.max_nodes,
            params.local_addr,
            timeout,
            keep_alive_interval=_number(params, "keep_alive_interval", 5),
            keep_alive_max_attempt=_number(params, "keep_alive_max_attempt", 3),
        )


def _timeout(params: RendezvousParameters, name: str) -> timedelta | None:
    seconds = params.get_as_int(f"{name}_timeout")
    return None if seconds is None else timedelta(seconds=seconds)


def _number(params: RendezvousParameters, name: str, default: int) -> int:
    number = params.get_as_int(name, default)
    if number is None:
        raise TypeError(f"You passed '{name}=None' as a rendezvous configuration option")
    return number


def _config_from(settings: RendezvousSettings) -> RendezvousConfig:
    lease = _duration(settings.keep_alive_interval * settings.keep_alive_max_attempt)
    return RendezvousConfig(
        nodes_min=settings.min_nodes,
        nodes_max=settings.max_nodes,
        join_timeout=_duration(settings.timeout.join),
        last_call=_duration(settings.timeout.last_call),
        close_timeout=_duration(settings.timeout.close),
        lease_ttl=lease,
        request_timeout=Duration(min(_duration(settings.timeout.heartbeat), lease // 2)),
        run_ttl=RUN_TTL,
    )


def _duration(time: timedelta) -> Duration:
    return duration_from_seconds(time.total_seconds())


def _is_torchs(store: Any) -> bool:
    """True for a store of torch itself; then torch has been imported."""
    torch_distributed = sys.modules.get("torch.distributed")
    return torch_distributed is not None and isinstance(store, torch_distributed.Store)


def _torch_distributed() -> Any:
    return sys.modules["torch.distributed"]
