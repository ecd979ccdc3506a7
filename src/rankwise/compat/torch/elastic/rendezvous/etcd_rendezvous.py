"""torch's older handler for etcd, by name; beneath is rankwise's rendezvous, in etcd v3.

rankwise's machine replaces the phases of torch's `EtcdRendezvous`, each a method, so those methods
are not here: `rendezvous_barrier` is all of them.
"""

from typing import TYPE_CHECKING, Any

from rankwise.base.errors import RankwiseError
from rankwise.compat.torch.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from rankwise.compat.torch.elastic.rendezvous.etcd_client import Client, create_client
from rankwise.compat.torch.elastic.rendezvous.etcd_store import EtcdStore
from rankwise.compat.torch.elastic.rendezvous.node_rounds import HandlerOfRounds, NodeRounds
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.launch.cluster.addresses import own_address
from rankwise.launch.cluster.settings import RUN_TTL, split_settings, with_timing

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.core.rendezvous.vocabulary import World

__all__ = [
    "EtcdRendezvous",
    "EtcdRendezvousHandler",
    "EtcdRendezvousRetryImmediately",
    "EtcdRendezvousRetryableFailure",
    "create_rdzv_handler",
]

PREFIX = "/torchelastic/p2p"
TIMEOUT_S = 600
LAST_CALL_TIMEOUT_S = 30


class EtcdRendezvousRetryableFailure(RankwiseError):
    """Never raised: rankwise's rendezvous tries again by itself."""


class EtcdRendezvousRetryImmediately(RankwiseError):
    """Never raised: rankwise's rendezvous tries again by itself."""


class EtcdRendezvous:
    """One node's part in a rendezvous in etcd.

    Args:
        client: from `etcd_client.Client` or `EtcdServer.get_client`.
        prefix: where the stores of rounds are kept; the nodes themselves meet under `rankwise/`.
        run_id: the run.
        num_min_workers, num_max_workers: how many nodes take part.
        timeout: seconds that a round may take to be complete.
        last_call_timeout: seconds that more nodes are waited for when there are enough.
    """

    def __init__(
        self,
        client: Client,
        prefix: str,
        run_id: str,
        num_min_workers: int,
        num_max_workers: int,
        timeout: float,
        last_call_timeout: float,
    ) -> None:
        self.client = client
        self.run_id = str(run_id)
        self._prefix = prefix.strip("/")
        timing = {"timeout": timeout, "last_call_timeout": last_call_timeout}
        config = RendezvousConfig(
            nodes_min=num_min_workers, nodes_max=num_max_workers, run_ttl=RUN_TTL
        )
        self.rounds = NodeRounds(
            self.run_id,
            with_timing(config, split_settings(timing), "EtcdRendezvous"),
            own_address(client.endpoint),
            client.open_store,
        )
        self._world: World | None = None

    def rendezvous_barrier(self) -> tuple[int, int, int]:
        """Wait until this node is a member of a new round.

        Returns:
            The round, this node's rank, and how many nodes take part.

        Raises:
            RendezvousError: or one of its kinds: it never will be.
        """
        world = self._world = self.rounds.next_world()
        return world.round, world.node_rank, len(world.members)

    def where_rank_0_listens(self) -> RendezvousStoreInfo:
        """Where rank 0 of the workers of the present round may listen."""
        assert self._world is not None, "there has been a round"
        return RendezvousStoreInfo(self._world.master_address, self._world.master_port)

    def set_closed(self) -> None:
        """End the run for all nodes."""
        self.rounds.close_run()

    def setup_kv_store(self, rdzv_version: int) -> EtcdStore:
        """The store of a round."""
        return EtcdStore(self.client, self.get_path(f"/rdzv/v_{rdzv_version}/kv"))

    def get_path(self, path: str) -> str:
        """A key of this run."""
        return f"/{self._prefix}/run_{self.run_id}/{path.lstrip('/')}"

    def store_extra_data(self, rdzv_version: int, key: str, value: str) -> None:
        """Write a text for the other nodes of a round."""
        EtcdStore(self.client, self._extra_data(rdzv_version)).set(key, value)

    def load_extra_data(self, rdzv_version: int, key: str, timeout: Any = None) -> str:
        """Read what a node has written with `store_extra_data`, as soon as it has.

        Raises:
            LookupError: it was not stored within `timeout`, a `timedelta`.
        """
        return EtcdStore(self.client, self._extra_data(rdzv_version), timeout).get(key).decode()

    def _extra_data(self, rdzv_version: int) -> str:
        return self.get_path(f"/rdzv/v_{rdzv_version}/extra_data")


class EtcdRendezvousHandler(HandlerOfRounds):
    """A handler over an `EtcdRendezvous`.

    Args:
        rdzv_impl: does the work.
        local_addr: this node's address, as workers reach it; None: as it reaches etcd.
    """

    def __init__(self, rdzv_impl: EtcdRendezvous, local_addr: str | None) -> None:
        self._rdzv_impl = rdzv_impl
        self._rounds = rdzv_impl.rounds
        self._local_addr = local_addr
        self.at_the_end: Callable[[], None] = lambda: None

    def get_backend(self) -> str:
        """`etcd`."""
        return "etcd"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node is a member of a new round."""
        version, rank, world_size = self._rdzv_impl.rendezvous_barrier()
        store = self._rdzv_impl.setup_kv_store(version)
        listens = self._rdzv_impl.where_rank_0_listens()
        info = RendezvousStoreInfo.build(
            rank, store, self._local_addr or listens.master_addr, listens.master_port
        )
        return RendezvousInfo(store, rank, world_size, info)

    def get_run_id(self) -> str:
        """The run."""
        return self._rdzv_impl.run_id

    def shutdown(self) -> bool:
        """Leave the run, as one who is done, and let go of everything."""
        super().shutdown()
        self.at_the_end()
        return True


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make a handler.

    Settings: those of `etcd_client.create_client`, `timeout` (600) and `last_call_timeout` (30) in
    seconds, and `etcd_prefix`.

    Raises:
        ValueError: one of them cannot be used.
    """
    client = create_client(params)
    rendezvous = EtcdRendezvous(
        client,
        params.get("etcd_prefix", PREFIX),
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        params.get_as_int("timeout", TIMEOUT_S) or TIMEOUT_S,
        params.get_as_int("last_call_timeout", LAST_CALL_TIMEOUT_S) or LAST_CALL_TIMEOUT_S,
    )
    handler = EtcdRendezvousHandler(rendezvous, params.local_addr)
    handler.at_the_end = client.close  # it has no other owner
    return handler
