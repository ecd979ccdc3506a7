"""What a node of a cluster needs to know beyond its job."""

import msgspec

from rankwise.core.rendezvous.configuration import RendezvousConfig


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How this node meets the others.

    Attributes:
        backend, endpoint, store: where they meet; see `drivers.real.stores.opening`.
        rendezvous: who may join, for how long anybody waits, which failures the job survives.
        address: this node's own, as the others reach it.
        topology: nodes next to each other in this order get neighbouring ranks.
        seat: this node's rank, if it was given (`static`).
        master_address: what ranks are told instead of the first node's address, behind a NAT.
        master_port: where rank 0 listens, if it is on this node; None reserves a free port.
        leaves_alone: SIGTERM takes this node out of the job instead of stopping all.
        checks: commands that must succeed before this node takes part in a round.
        health_port: where to answer questions about this agent's health; None for nowhere.
    """

    backend: str
    endpoint: str
    store: dict[str, str] = {}
    rendezvous: RendezvousConfig
    address: str
    topology: str = ""
    seat: int | None = None
    master_address: str | None = None
    master_port: int | None = None
    leaves_alone: bool = False
    checks: tuple[str, ...] = ()
    health_port: int | None = None
