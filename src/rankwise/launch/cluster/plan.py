"""What a node needs to know beyond its job: whom it meets, and which failures the job survives."""

import os

import msgspec

from rankwise.core.rendezvous.configuration import RendezvousConfig, RestartPolicy


class RendezvousPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How this node meets the others, if there are others.

    Attributes:
        backend, endpoint, store: where they meet; see `drivers.real.stores.opening`. No backend
            means that this node is the only one.
        own_etcd: whether the nodes at the endpoints run the members of that etcd.
        own_hosts: which hosts of these endpoints are this machine.
        rendezvous: which nodes may join, how long one waits, which failures the job survives.
        node_id: what tells this agent apart from all others of the run, on this host too.
        address: this node's own, as the others reach it.
        topology: nodes next to each other in this order get neighbouring ranks.
        static_rank: this node's rank, if it was given (`static`).
        master_address: what ranks are told instead of the first node's address, behind a NAT.
        master_port: where rank 0 listens, if it is on this node; None reserves a free port.
        leaves_alone: SIGTERM takes this node out of the job instead of stopping all.
        has_token: whether the nodes know a token of their own, and not the run's id alone.
        checks: commands that must succeed before this node takes part in a round.
        health_port, health_host: where to answer questions about this agent's health; no port
            means nowhere, and no host the loopback.
        health_token: what who asks must bring; empty for nothing.
        telemetry: whether the environment names an OpenTelemetry collector for metrics.
    """

    backend: str = ""
    endpoint: str = ""
    store: dict[str, str] = {}
    own_etcd: bool = False
    own_hosts: tuple[str, ...] = ()
    rendezvous: RendezvousConfig
    node_id: str = msgspec.field(default_factory=lambda: os.urandom(4).hex())
    address: str
    topology: str = ""
    static_rank: int | None = None
    master_address: str | None = None
    master_port: int | None = None
    leaves_alone: bool = False
    has_token: bool = False
    checks: tuple[str, ...] = ()
    health_port: int | None = None
    health_host: str = "127.0.0.1"
    health_token: str = ""
    telemetry: bool = False

    @property
    def place(self) -> str:
        """Where its nodes meet, for people; empty where there are no others."""
        return f"{self.backend} at {self.endpoint}" if self.endpoint else self.backend

    @property
    def is_alone(self) -> bool:
        """Whether this node meets no other."""
        return not self.backend

    @property
    def is_id_secret(self) -> bool:
        """Whether the run's id is all that keeps strangers out, so that it is not shown."""
        return self.backend in ("static", "embedded") and not self.has_token


def plan_alone(
    policy: RestartPolicy,
    address: str,
    *,
    checks: tuple[str, ...] = (),
    health_port: int | None = None,
) -> RendezvousPlan:
    """The plan of a node that is the only one."""
    return RendezvousPlan(
        rendezvous=RendezvousConfig(nodes_min=1, nodes_max=1, policy=policy),
        address=address,
        checks=checks,
        health_port=health_port,
    )
