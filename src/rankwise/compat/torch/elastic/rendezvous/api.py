"""What a rendezvous is to an agent: parameters in, ranks and a store out.

The errors here are those that programs catch under torch's names; rankwise's own have the same
meanings and are their bases.
"""

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from rankwise.base import errors as base_errors
from rankwise.compat.torch.elastic.utils.distributed import get_free_port
from rankwise.drivers.real.stores.names import full_name_of

__all__ = [
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "rendezvous_handler_registry",
]


class RendezvousError(base_errors.RendezvousError):
    """Nodes could not come to an agreement."""

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)


class RendezvousClosedError(RendezvousError, base_errors.RendezvousClosed):
    """The rendezvous is over."""


class RendezvousTimeoutError(RendezvousError, base_errors.RendezvousTimeout):
    """The rendezvous was not complete in time."""


class RendezvousConnectionError(RendezvousError):
    """The store of the rendezvous cannot be reached."""


class RendezvousStateError(RendezvousError):
    """What is in the store of the rendezvous makes no sense."""


class RendezvousGracefulExitError(RendezvousError):
    """This node was a spare, and the others have finished without it."""


@dataclass
class RendezvousStoreInfo:
    """Where rank 0 of the workers listens."""

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"
    master_addr: str
    master_port: int

    @staticmethod
    def build(
        rank: int, store: Any, local_addr: str | None, server_port: int | None = None
    ) -> "RendezvousStoreInfo":
        """Let rank 0 say where it listens, through the store, and all ranks read it."""
        if rank == 0:
            addr = local_addr or full_name_of(socket.gethostname())
            port = server_port or get_free_port()
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, addr.encode("utf-8"))
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(port).encode("utf-8"))
        addr = store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode("utf-8")
        port = int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY).decode("utf-8"))
        return RendezvousStoreInfo(master_addr=addr, master_port=port)


class RendezvousInfo:
    """What a node has when a rendezvous is complete.

    Attributes:
        store: shared by the nodes of this round, with torch's methods.
        rank: this node's.
        world_size: how many nodes take part.
        bootstrap_store_info: where rank 0 of the workers listens; None if unknown.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        bootstrap_store_info: RendezvousStoreInfo | None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._bootstrap_store_info = bootstrap_store_info

    @property
    def store(self) -> Any:
        """Shared by the nodes of this round."""
        return self._store

    @property
    def rank(self) -> int:
        """This node's rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many nodes take part."""
        return self._world_size

    @property
    def bootstrap_store_info(self) -> RendezvousStoreInfo | None:
        """Where rank 0 of the workers listens."""
        return self._bootstrap_store_info


class RendezvousHandler(ABC):
    """One node's part in a rendezvous, for agents. Out-of-tree ones satisfy this too."""

    @abstractmethod
    def get_backend(self) -> str:
        """The backend's name."""

    @property
    def use_agent_store(self) -> bool:
        """Whether workers may use the agents' store instead of making their own."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until a round is complete with this node in it.

        Raises:
            RendezvousClosedError: it is over.
            RendezvousConnectionError: its store cannot be reached.
            RendezvousStateError: what is in the store makes no sense.
            RendezvousTimeoutError: it was not complete in time.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Whether it is over, as far as this node knows."""

    @abstractmethod
    def set_closed(self) -> None:
        """End the run for all nodes."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """How many nodes came too late for this round and could take part in the next."""

    @abstractmethod
    def get_run_id(self) -> str:
        """The run that it belongs to."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Let go of everything; say whether that went well."""


class RendezvousParameters:
    """What a handler is made from.

    Args:
        backend: the backend's name.
        endpoint: where its store is, mostly `HOST:PORT`.
        run_id: the run that it belongs to.
        min_nodes, max_nodes: how many nodes take part.
        local_addr: this node's address, as others reach it.
        **kwargs: the backend's own settings.

    Raises:
        ValueError: the name is missing, or the numbers make no sense.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise ValueError("The rendezvous backend name must be a non-empty string.")
        if min_nodes < 1:
            raise ValueError(
                f"The minimum number of rendezvous nodes ({min_nodes}) must be greater than zero."
            )
        if max_nodes < min_nodes:
            raise ValueError(
                f"The maximum number of rendezvous nodes ({max_nodes}) must be greater than or "
                f"equal to the minimum number of rendezvous nodes ({min_nodes})."
            )
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.config = kwargs
        self.local_addr = local_addr

    def get(self, key: str, default: Any = None) -> Any:
        """One of the backend's own settings."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """A setting that is true or false: a bool, 0 or 1, or a word such as `yes` or `f`.

        Raises:
            ValueError: it is something else.
        """
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        meaning = str(value).lower() if isinstance(value, int | str) else ""
        if meaning in ("1", "true", "t", "yes", "y"):
            return True
        if meaning in ("0", "false", "f", "no", "n"):
            return False
        raise ValueError(
            f"The rendezvous configuration option '{key}' does not represent a valid boolean value."
        )

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """A setting that is a whole number.

        Raises:
            ValueError: it is something else.
        """
        value = self.get(key, default)
        if value is None:
            return None
        try:
            return int(value)
        except ValueError as error:
            raise ValueError(
                f"The rendezvous configuration option '{key}' does not represent a valid integer "
                "value."
            ) from error


RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """The makers of handlers, by the name of the backend."""

    _registry: dict[str, RendezvousHandlerCreator]

    def __init__(self) -> None:
        self._registry = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Add a backend.

        Raises:
            ValueError: the name is empty, or taken.
        """
        if not backend:
            raise ValueError("The rendezvous backend name must be a non-empty string.")
        known = self._registry.setdefault(backend, creator)
        if known != creator:
            raise ValueError(
                f"The rendezvous backend '{backend}' cannot be registered with '{creator}' as it "
                f"is already registered with '{known}'."
            )

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Make the handler of `params.backend`.

        Raises:
            ValueError: it is not registered.
            RuntimeError: what was made says that it belongs to another backend.
        """
        try:
            creator = self._registry[params.backend]
        except KeyError as error:
            raise ValueError(
                f"The rendezvous backend '{params.backend}' is not registered. Did you forget to "
                "call `register`?"
            ) from error
        handler = creator(params)
        if handler.get_backend() != params.backend:
            raise RuntimeError(
                f"The rendezvous backend '{handler.get_backend()}' does not match the requested "
                f"backend '{params.backend}'."
            )
        return handler


rendezvous_handler_registry = RendezvousHandlerRegistry()
