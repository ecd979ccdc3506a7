"""torch's handler over rankwise's rendezvous: for the backends c10d, embedded, etcd and etcd-v2.

The nodes meet in one of rankwise's own stores, and the agents' store is a part of it. A node that
waits (`num_nodes_waiting`) means that the round is over and all meet again.
"""

from typing import Any

from rankwise.compat.torch.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from rankwise.compat.torch.elastic.rendezvous.node_rounds import HandlerOfRounds, NodeRounds
from rankwise.compat.torch.elastic.rendezvous.torch_store import TorchStore
from rankwise.compat.torch.elastic.utils.distributed import get_free_port
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.drivers.real.stores.opening import open_store
from rankwise.launch.cluster.addresses import own_address
from rankwise.launch.cluster.settings import RUN_TTL, split_settings, with_timing
from rankwise.ports.store import Store

__all__ = ["StoreRendezvousHandler", "create_handler"]

_STORE_IN_AN_AGENT = frozenset({"is_host", "store_type", "etcd_prefix"})
_STORE_OF_ITS_OWN = frozenset(
    {"protocol", "etcd_prefix", "cacert", "ca_cert", "cert", "ssl_cert", "key", "ssl_cert_key"}
)
_MEANINGLESS = {
    "etcd": _STORE_IN_AN_AGENT,
    "etcd-v2": _STORE_IN_AN_AGENT,
    "c10d": _STORE_OF_ITS_OWN,
    "embedded": _STORE_OF_ITS_OWN | {"store_type"},
}
"""Settings of torch's that are another backend's: programs pass the same to all of them.

So is the prefix of etcd's keys, since ours begin with the run id anyway.
"""


class StoreRendezvousHandler(HandlerOfRounds):
    """One node's part in the rendezvous of a run; see the module's text.

    Args:
        params: the backend, its endpoint and settings, the run, the numbers of nodes.

    Raises:
        ConfigError: a setting cannot be used; it is a ValueError.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        settings = split_settings(_for_backend(params), label="rdzv_configs")
        self._params = params
        self._store_settings = settings.store
        self._endpoint = _endpoint(params)
        config = RendezvousConfig(
            nodes_min=params.min_nodes, nodes_max=params.max_nodes, run_ttl=RUN_TTL
        )
        self._shared_store: Store | None = None
        self._rounds = NodeRounds(
            params.run_id,
            with_timing(config, settings, "rdzv_configs"),
            params.local_addr or own_address(params.endpoint),
            lambda: self._open_store(may_host=True),
            self._close_shared_store,
        )

    def get_backend(self) -> str:
        """The backend's name."""
        return self._params.backend

    def get_run_id(self) -> str:
        """The run."""
        return self._params.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node is a member of a new round."""
        world = self._rounds.next_world()
        store = TorchStore(
            self._opened_store(), f"rankwise/{self.get_run_id()}/agents/{world.round}/"
        )
        listens = RendezvousStoreInfo(world.master_address, world.master_port)
        return RendezvousInfo(store, world.node_rank, len(world.members), listens)

    def _close_shared_store(self) -> None:
        # Ours first: the host of the store waits for its clients to leave.
        store, self._shared_store = self._shared_store, None
        if store is not None:
            store.close()

    def _opened_store(self) -> Store:
        """A connection of our own: the machine's must not wait behind ours."""
        if self._shared_store is None:
            self._shared_store = self._open_store(may_host=False)
        return self._shared_store

    def _open_store(self, *, may_host: bool) -> Store:
        settings = dict(self._store_settings)
        if not may_host and self._params.backend == "c10d":
            settings["is_host"] = "false"
        elif not may_host and self._params.get_as_bool("is_host"):
            settings.pop("is_host", None)  # we serve already, and are not to do so twice
        return open_store(
            self._params.backend, self._endpoint, settings, run_id=self._params.run_id
        )


def _for_backend(params: RendezvousParameters) -> dict[str, Any]:
    """The settings that concern this backend, or none that is known: these are refused later."""
    ignored = _MEANINGLESS[params.backend]
    return {key: value for key, value in params.config.items() if key not in ignored}


def _endpoint(params: RendezvousParameters) -> str:
    """Where the store is; port 0 of torch's store is any port, which only this node will know."""
    host, colon, port = params.endpoint.rpartition(":")
    if params.backend == "c10d" and colon and port.strip() == "0":
        return f"{host}:{get_free_port()}"
    return params.endpoint


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler of one of rankwise's own backends."""
    return StoreRendezvousHandler(params)
