"""From the options of `rankwise run` to a plan for a node among several."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rankwise.base.errors import ConfigError
from rankwise.cli.nodes import NodeCounts, parse_settings
from rankwise.core.rendezvous.configuration import RendezvousConfig, RestartPolicy
from rankwise.launch.cluster.addresses import (
    address_of,
    interface_of,
    own_address,
    split_endpoint,
)
from rankwise.launch.cluster.plan import ClusterPlan
from rankwise.launch.cluster.settings import RUN_TTL, split_settings, with_timing
from rankwise.launch.limits import check_run_id

if TYPE_CHECKING:
    from rankwise.cli.run_job import RunOptions
    from rankwise.core.gang.vocabulary import GangSpec

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")

MASTER_PORT = 29500
"""torchrun's, for nodes that are told nothing else."""


def cluster_plan(options: "RunOptions", counts: NodeCounts, gang: "GangSpec") -> ClusterPlan:
    """How this node meets the others.

    Raises:
        ConfigError: an option cannot be used, or not together with the others.
    """
    is_static = options.rdzv_backend == "static"
    _check_together(options, counts, is_static=is_static)
    check_run_id(options.rdzv_id, options.label("rdzv_id"))
    endpoint = _endpoint(options, is_static=is_static)
    label = options.label("rdzv_conf")
    settings = split_settings(parse_settings(options.rdzv_conf), label=label)
    rendezvous = RendezvousConfig(
        nodes_min=counts.least,
        nodes_max=counts.most,
        spares=options.spares,
        is_static=is_static,
        policy=_policy(options, gang),
        replaces_ended=not options.rdzv_once,
        run_ttl=RUN_TTL,
    )
    rendezvous = with_timing(rendezvous, settings, label)
    address = options.local_addr and address_of(options.local_addr)
    names_master = "master_addr" in options.origins
    return ClusterPlan(
        backend=options.rdzv_backend,
        endpoint=endpoint,
        store=settings.store,
        rendezvous=rendezvous,
        address=address or own_address(endpoint),
        topology=options.node_topology,
        seat=options.node_rank if is_static else None,
        master_address=options.master_addr if names_master else _static_host(endpoint, is_static),
        master_port=_master_port(options, is_static=is_static),
        leaves_alone=options.on_preemption == "leave",
        checks=tuple(options.node_check),
        health_port=options.health_port,
    )


def interface_environment(plan: ClusterPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Tells gloo and tensorpipe the interface under whose address the other nodes know this one.

    Left alone they look up this host's name, which in containers often means the loopback.
    """
    name = interface_of(plan.address)
    if name is None:
        return {}
    return {variable: name for variable in _INTERFACE_VARIABLES if variable not in environ}


def _check_together(options: "RunOptions", counts: NodeCounts, *, is_static: bool) -> None:
    nodes = f"{options.label('nnodes')} is {options.nnodes!r}"
    if options.standalone:
        raise ConfigError(f"{nodes}, but {options.label('standalone')} means one node")
    if is_static and counts.least != counts.most:
        raise ConfigError(
            f"{nodes}, but the static rendezvous has a fixed number of nodes",
            hint="name a --rdzv-backend: etcd, c10d or embedded",
        )
    if not is_static and "node_rank" in options.origins:
        raise ConfigError(
            f"{options.label('node_rank')} is {options.node_rank}, but only the static rendezvous "
            "lets nodes choose their ranks",
            hint="leave it out, or use --rdzv-backend static",
        )
    if options.spares < 0 or (options.spares and is_static):
        raise ConfigError(
            f"{options.label('spares')} is {options.spares}, expected 0"
            + (
                " with the static rendezvous, which needs all its nodes"
                if is_static
                else " or more"
            )
        )
    for name in ("max_no_progress", "max_node_failures"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{options.label(name)} is {value}, expected 1 or more")
    if options.health_port is not None and not 0 <= options.health_port <= 65535:
        raise ConfigError(
            f"{options.label('health_port')} is {options.health_port}, expected 0 to 65535"
        )


def _endpoint(options: "RunOptions", *, is_static: bool) -> str:
    if options.rdzv_endpoint:
        for endpoint in options.rdzv_endpoint.split(","):
            split_endpoint(endpoint)
        return options.rdzv_endpoint
    if not is_static:
        raise ConfigError(
            f"--rdzv-endpoint is not given, and {options.rdzv_backend} needs to know where the "
            "nodes meet",
            hint="give HOST:PORT, the same on every node",
        )
    host = f"[{options.master_addr}]" if ":" in options.master_addr else options.master_addr
    return f"{host}:{options.master_port or MASTER_PORT}"


def _static_host(endpoint: str, is_static: bool) -> str | None:
    """The static rendezvous is where rank 0's node is, as everybody was told to reach it."""
    return split_endpoint(endpoint)[0] if is_static else None


def _master_port(options: "RunOptions", *, is_static: bool) -> int | None:
    """Where rank 0 listens, if the user says so and the nodes do not meet there themselves."""
    if is_static and not options.rdzv_endpoint:
        return None
    return options.master_port


def _policy(options: "RunOptions", gang: "GangSpec") -> RestartPolicy:
    names, codes = [], []
    for word in filter(None, map(str.strip, options.no_retry)):
        try:
            codes.append(int(word))
        except ValueError:
            if not all(part.isidentifier() for part in word.split(".")):
                raise ConfigError(
                    f"{options.label('no_retry')}: {word!r} is neither an exception's name nor an "
                    "exit code"
                ) from None
            names.append(word)
    return RestartPolicy(
        restarts_max=gang.restarts_max,
        backoff=gang.backoff,
        final_exceptions=tuple(names),
        final_exit_codes=tuple(codes),
        retries_startup_errors=options.retry_startup_errors,
        fruitless_max=options.max_no_progress,
        strikes_max=options.max_node_failures,
    )
