"""A rendezvous whose ranks are given: nodes meet in torch's TCPStore at the master's address."""

import datetime as dt
from typing import Any

from rankwise.compat.torch.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from rankwise.compat.torch.elastic.rendezvous.utils import parse_rendezvous_endpoint
from rankwise.compat.torch.elastic.utils.distributed import torch_distributed

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]

_TIMEOUT_S = 600


class StaticTCPRendezvous(RendezvousHandler):
    """Node `rank` of `world_size`; node 0 hosts the store. Its store is made once.

    Args:
        master_addr, master_port: where node 0 listens.
        rank, world_size: of this node; both stay as they are.
        run_id: begins the keys in the store.
        timeout: seconds that the store waits.
    """

    def __init__(
        self,
        master_addr: str,
        master_port: int,
        rank: int,
        world_size: int,
        run_id: str,
        timeout: int,
    ) -> None:
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout = dt.timedelta(seconds=timeout)
        self._store: Any = None

    def get_backend(self) -> str:
        """`static`."""
        return "static"

    @property
    def use_agent_store(self) -> bool:
        """Workers use the agents' store, which listens at the master's port."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet in the store; the first time waits until it is there."""
        dist = torch_distributed(
            "the static rendezvous of rankwise.compat meets in torch's TCPStore",
            "pip install torch, or use the backend embedded",
        )
        if self._store is None:
            self._store = dist.TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                self.rank == 0,
                self.timeout,
                multi_tenant=True,
            )
        return RendezvousInfo(
            dist.PrefixStore(self.run_id, self._store),
            self.rank,
            self.world_size,
            RendezvousStoreInfo(self.master_addr, self.master_port),
        )

    def is_closed(self) -> bool:
        """Never: it cannot be closed."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """None: it has no room for further nodes."""
        return 0

    def get_run_id(self) -> str:
        """The run that it belongs to."""
        return self.run_id

    def shutdown(self) -> bool:
        """Nothing is to be let go of."""
        return True


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make a handler from `endpoint` (HOST:PORT) and the settings `rank` and `timeout`.

    Raises:
        ValueError: one of them is missing.
    """
    if "rank" not in params.config:
        raise ValueError(
            "rank is absent in RendezvousParameters. Try add --node-rank to the cmd request"
        )
    endpoint = params.endpoint.strip()
    if not endpoint:
        raise ValueError(
            "endpoint is absent in RendezvousParameters. Try add --master-port and --master-addr "
            "to the cmd request"
        )
    host, port = parse_rendezvous_endpoint(endpoint, -1)
    if port == -1:
        raise ValueError(
            f"Port is absent in endpoint: {endpoint}. Try launching with --master-port"
        )
    return StaticTCPRendezvous(
        host,
        port,
        int(params.config["rank"]),
        params.max_nodes,
        params.run_id,
        int(params.config.get("timeout", _TIMEOUT_S)),
    )
