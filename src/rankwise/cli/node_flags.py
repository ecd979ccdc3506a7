"""What torchrun's flags about nodes mean, checked before anything is started.

A single node has no rendezvous, so for it the rendezvous flags decide little. A value that cannot
be right is refused all the same, or it would first be noticed on the cluster.
"""

from typing import NamedTuple

from rankwise.base.errors import ConfigError

BACKENDS = ("static", "c10d", "etcd-v2", "etcd", "embedded")


class NodeCounts(NamedTuple):
    """How few nodes may run, and how many at most."""

    least: int
    most: int


class MasterAddress(NamedTuple):
    """Where rank 0 listens; None lets rankwise reserve a free port."""

    host: str
    port: int | None


def node_counts(nnodes: str, node_rank: int, *, label: str = "--nnodes") -> NodeCounts:
    """Read `N` or `MIN:MAX`, and make sure that this node is one of them.

    Raises:
        ConfigError: the text is no number of nodes, or the node's rank is not one of theirs.
    """
    parts = nnodes.split(":")
    if not 1 <= len(parts) <= 2 or not all(_is_number(part) for part in parts):
        raise ConfigError(f"{label} is {nnodes!r}, expected N or MIN:MAX, such as 1 or 1:1")
    nodes_min, nodes_max = int(parts[0]), int(parts[-1])
    if not 0 < nodes_min <= nodes_max:
        raise ConfigError(f"{label} is {nnodes!r}, expected 0 < MIN <= MAX")
    if not 0 <= node_rank < nodes_max:
        expected = "0" if nodes_max == 1 else f"0 to {nodes_max - 1}"
        raise ConfigError(
            f"--node-rank is {node_rank}, expected {expected} since --nnodes is {nnodes}"
        )
    return NodeCounts(nodes_min, nodes_max)


def check_rendezvous(backend: str, conf: str) -> None:
    """Make sure that the backend exists and that its settings can be read.

    Raises:
        ConfigError: one of them is wrong.
    """
    if backend not in BACKENDS and backend not in (plugged_in := _plugged_in_backends()):
        from rankwise.base.suggestions import hint_on_name  # noqa: PLC0415  # only for mistakes

        hint = hint_on_name(backend, (*BACKENDS, *plugged_in))
        raise ConfigError(f"--rdzv-backend is {backend!r}, {hint}")
    for key, value in parse_settings(conf).items():
        if key.endswith(("timeout", "interval")) and not _is_seconds(value):
            raise ConfigError(f"--rdzv-conf: {key} is {value!r}, expected seconds")


def parse_settings(text: str) -> dict[str, str]:
    """Read `key=value,key=value`.

    Raises:
        ConfigError: a key or a value is missing.
    """
    settings: dict[str, str] = {}
    if not text.strip():
        return settings
    for pair in text.split(","):
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key or not value:
            raise ConfigError(f"--rdzv-conf: {pair!r} is not KEY=VALUE")
        if key in settings:
            raise ConfigError(f"--rdzv-conf: {key} is given twice, as {settings[key]} and {value}")
        settings[key] = value
    return settings


def master_address(
    *, backend: str, endpoint: str, master_addr: str, master_port: int | None, is_standalone: bool
) -> MasterAddress:
    """Where rank 0 listens: what `--master-addr` and `--master-port` say, or a static endpoint.

    Raises:
        ConfigError: a port is out of range, or the endpoint is not HOST or HOST:PORT.
    """
    host = master_addr.removeprefix("[").removesuffix("]")
    port = master_port
    if endpoint and backend == "static" and not is_standalone:
        from rankwise.drivers.real.stores.connections import split_endpoint  # noqa: PLC0415  # loads sockets

        host, port = split_endpoint(endpoint)
    # Port 0 is the usual way of asking for any free port.
    return MasterAddress(host, port or None)


def check_name(backend: str, run_id: str) -> None:
    """Refuse a run without a name in a store that other runs use, too.

    Raises:
        ConfigError: it has none, and the store is not one of its own agents.
    """
    if run_id != "none" or backend in ("static", "c10d", "embedded"):
        return
    raise ConfigError(
        f"--rdzv-id is not given, and in {backend} every run without one is called none: they "
        "would meet each other",
        hint="give each run a --rdzv-id of its own, the same on all its nodes",
    )


def endpoint_notice(*, backend: str, endpoint: str, is_standalone: bool) -> str | None:
    """The notice about an endpoint on another machine that is not used."""
    is_used = backend == "static" and not is_standalone
    host = endpoint.rpartition(":")[0] or endpoint
    if not endpoint or is_used or host in ("localhost", "127.0.0.1", "[::1]"):
        return None
    return f"--rdzv-endpoint {endpoint} is not used: with one node there is no rendezvous"


def _is_number(text: str) -> bool:
    return text.strip().lstrip("+-").isdecimal()


def _is_seconds(text: str) -> bool:
    try:
        return float(text) >= 0
    except ValueError:
        return False


def _plugged_in_backends() -> tuple[str, ...]:
    from importlib.metadata import entry_points  # noqa: PLC0415  # only for unusual names

    groups = ("rankwise.stores", "torchrun.handlers")
    return tuple(sorted({point.name for group in groups for point in entry_points(group=group)}))
