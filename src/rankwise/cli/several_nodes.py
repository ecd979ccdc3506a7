"""From the options of `rankwise run` to a plan for a node: among several, or the only one."""

import os
import shlex
import signal
from collections.abc import Mapping
from hmac import digest
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.cli.node_flags import NodeCounts, check_name, parse_settings
from rankwise.core.rendezvous.configuration import RendezvousConfig, RestartPolicy
from rankwise.drivers.real.stores.connections import split_endpoint
from rankwise.drivers.real.stores.encryption import encryption_lack, has_certificates
from rankwise.drivers.real.stores.opening import TOKEN_VARIABLE, token_of
from rankwise.launch.cluster.addresses import (
    address_of,
    own_address,
    own_hosts,
)
from rankwise.launch.cluster.plan import RendezvousPlan, plan_alone
from rankwise.launch.cluster.settings import RUN_TTL, split_settings, with_timing
from rankwise.launch.limits import check_run_id
from rankwise.launch.options import MASTER_PORT

if TYPE_CHECKING:
    from rankwise.cli.run_job import RunOptions

SERVED_BY_AN_AGENT = ("static", "embedded", "c10d")
"""Backends whose store lives in one of the agents."""
FINGERPRINT_CHARACTERS = 200
"""How much of a program and its arguments is kept to be shown."""


def cluster_plan(
    options: "RunOptions", counts: NodeCounts, policy: RestartPolicy
) -> RendezvousPlan:
    """How this node meets the others.

    Raises:
        ConfigError: an option cannot be used, or not together with the others.
    """
    is_static = options.rdzv_backend == "static"
    _check_together(options, counts, is_static=is_static)
    check_run_id(options.rdzv_id, options.label("rdzv_id"))
    endpoint = _endpoint(options, is_static=is_static)
    check_name(options.rdzv_backend, options.rdzv_id)
    label = options.label("rdzv_conf")
    given = parse_settings(options.rdzv_conf)
    program = given.pop("program", None) or _fingerprint(options)
    settings = split_settings(given, label=label)
    rendezvous = RendezvousConfig(
        nodes_min=counts.least,
        nodes_max=counts.most,
        spares=options.spares,
        is_static=is_static,
        policy=_policy(options, policy),
        settings={"program": program, **_token_fingerprint(settings.store, options.rdzv_id)},
        replaces_ended=not options.rdzv_once,
        ends_with_store=options.rdzv_backend in SERVED_BY_AN_AGENT
        and given.get("store_type") != "file",
        run_ttl=RUN_TTL,
    )
    rendezvous = with_timing(rendezvous, settings, label)
    address = options.local_addr and address_of(options.local_addr)
    master_address = options.master_addr if "master_addr" in options.origins else None
    if is_static and master_address is None:
        master_address, _ = split_endpoint(endpoint)  # where rank 0's node is, as all were told
    return RendezvousPlan(
        backend=options.rdzv_backend,
        endpoint=endpoint,
        store=settings.store,
        own_etcd=options.rdzv_own_etcd,
        own_hosts=own_hosts(endpoint) if options.rdzv_own_etcd else (),
        rendezvous=rendezvous,
        address=address or own_address(endpoint),
        topology=options.node_topology,
        static_rank=options.node_rank if is_static else None,
        master_address=master_address,
        master_port=_master_port(options, is_static=is_static),
        leaves_alone=options.on_preemption == "leave",
        has_token=has_token(settings.store),
        checks=tuple(options.node_check),
        health_port=options.health_port,
    )


def plan_of_one_node(options: "RunOptions", policy: RestartPolicy, address: str) -> RendezvousPlan:
    """The plan of the only node, with what the user asks for beyond a gang.

    Raises:
        ConfigError: an option cannot be used, or means nothing without other nodes.
    """
    means_nothing = [
        name
        for name, is_asked in (
            ("spares", options.spares != 0),
            ("on_preemption", options.on_preemption == "leave"),
            ("rdzv_once", options.rdzv_once),
            ("rdzv_own_etcd", options.rdzv_own_etcd),
        )
        if is_asked
    ]
    if means_nothing:
        label = options.label(means_nothing[0])
        raise ConfigError(
            f"{label} needs several nodes, and this run has one",
            hint="leave it out, or give --nnodes",
        )
    return plan_alone(
        _policy(options, policy),
        address,
        checks=tuple(options.node_check),
        health_port=options.health_port,
    )


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
    if options.rdzv_own_etcd and options.rdzv_backend != "etcd":
        raise ConfigError(
            f"{options.label('rdzv_own_etcd')} and --rdzv-backend {options.rdzv_backend} do not go "
            "together",
            hint="give --rdzv-backend etcd, and --rdzv-endpoint with the first three nodes",
        )
    if options.spares and is_static:
        raise ConfigError(
            f"{options.label('spares')} is {options.spares}, expected 0 with the static "
            "rendezvous, which needs all its nodes"
        )


def _endpoint(options: "RunOptions", *, is_static: bool) -> str:
    if options.rdzv_endpoint:
        for endpoint in filter(None, options.rdzv_endpoint.split(",")):
            split_endpoint(endpoint)  # refuses what is none
        return options.rdzv_endpoint
    if not is_static:
        raise ConfigError(
            f"--rdzv-endpoint is not given, and {options.rdzv_backend} needs the address where "
            "the nodes meet",
            hint="give HOST:PORT, the same on every node",
        )
    host = f"[{options.master_addr}]" if ":" in options.master_addr else options.master_addr
    return f"{host}:{options.master_port or MASTER_PORT}"


def has_token(store: Mapping[str, str]) -> bool:
    """Whether the nodes were given a token for the store that one of them serves."""
    return bool(os.environ.get(TOKEN_VARIABLE) or {"token", "token_file"} & store.keys())


def _token_fingerprint(store: Mapping[str, str], run_id: str) -> dict[str, str]:
    """Tells nodes with another token apart, also in a store that asks for none, such as an etcd.

    Their ranks could not talk to each other. A reader of the store sees it: it is too short to find
    a random token by.
    """
    if not has_token(store):
        return {}
    words = f"rankwise charter {run_id}"
    fingerprint = digest(token_of(store, run_id).encode(), words.encode(), "sha256")
    return {f"fingerprint of {TOKEN_VARIABLE}": fingerprint.hex()[:8]}


def secrecy_notices(plan: RendezvousPlan) -> list[str]:
    """Warnings for nodes of several hosts whose meeting others could take part in, or read."""
    host, _ = split_endpoint(plan.endpoint.partition(",")[0])
    is_local = host in ("localhost", "::1") or host.startswith("127.")
    if is_local or not (plan.own_etcd or plan.backend in ("static", "embedded")):
        return []
    told = []
    if not plan.has_token:
        told.append(
            "anyone who knows the run's id can join it, and users of these hosts can see it (set "
            f"{TOKEN_VARIABLE} to the same secret on all nodes)"
        )
    if plan.own_etcd:
        if not has_certificates():
            told.append(
                "anyone who reaches the run's own etcd can read and write there (pip install"
                " 'rankwise[tls]' on all nodes)"
            )
    elif "encrypts" not in plan.store and (lack := encryption_lack()) is not None:
        told.append(f"what the nodes agree on can be read on the network: {lack}")
    return told


def _fingerprint(options: "RunOptions") -> str:
    """What is run, as all nodes must say it alike; the folder of the program may differ.

    A long one is cut, and told from others by a digest.
    """
    text = shlex.join([Path(options.training_script).name, *options.training_script_args])
    if len(text) <= FINGERPRINT_CHARACTERS:
        return text
    from hashlib import sha256  # noqa: PLC0415  # only for long ones

    return f"{text[:FINGERPRINT_CHARACTERS]}… {sha256(text.encode()).hexdigest()[:12]}"


def _master_port(options: "RunOptions", *, is_static: bool) -> int | None:
    """Where rank 0 listens, if the user says so and the nodes do not meet there themselves."""
    if is_static and not options.rdzv_endpoint:
        return None
    return options.master_port


def _policy(options: "RunOptions", policy: RestartPolicy) -> RestartPolicy:
    names, codes = [], []
    for word in filter(None, map(str.strip, options.no_retry)):
        try:
            code = int(word)
        except ValueError:
            if not all(part.isidentifier() for part in word.split(".")):
                raise ConfigError(
                    f"{options.label('no_retry')}: {word!r} is neither an exception's name nor an "
                    "exit code"
                ) from None
            names.append(word)
        else:
            if not -signal.NSIG < code <= 255:
                raise ConfigError(
                    f"{options.label('no_retry')}: no worker can end with {code}, expected an exit "
                    "code (0 to 255) or the negative number of a signal"
                )
            codes.append(code)
    return msgspec.structs.replace(
        policy,
        final_exceptions=tuple(names),
        final_exit_codes=tuple(codes),
        retries_startup_errors=options.retry_startup_errors,
        rounds_without_progress_max=options.max_no_progress,
        strikes_max=options.max_node_failures,
    )
