"""Plans as YAML files: what a simulated cluster is, and its faults.

The fields are those of `ClusterPlan`; faults are in the language of all simulations
(`rankwise.sim.faults.reading`). A duration is written with its unit, as `5 s` or `200 ms`; a bare
number would be one of nanoseconds, which is never meant, and is refused.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.units import Duration, Instant, parse_duration
from rankwise.drivers.virtual.cluster.cluster_plan import ClusterPlan
from rankwise.sim.faults.reading import CLUSTER, Named, is_file, listed_faults, read_faults
from rankwise.sim.faults.vocabulary import FaultOfCluster, LateNode

_PARTS = ("rendezvous", "workers", "gang", "guardian", "network", "clocks", "late")


def load_plan(words: str | Sequence[str], **overrides: Any) -> ClusterPlan:
    """Read a plan.

    Args:
        words: a file with a plan at most, and faults in the short form; none for a plan in which
            nothing goes wrong.
        overrides: fields that replace what the file says; None leaves it. `nodes_min`,
            `nodes_max`, `spares` and `restarts_max` go where they belong.

    Raises:
        ConfigError: a word or the file cannot be read, or is no plan; the message names the field.
    """
    words = [words] if isinstance(words, str) else words
    files = [word for word in words if is_file(word)]
    if len(files) > 1:
        raise ConfigError(f"--faults names the plans {files[0]} and {files[1]}, expected one")
    path = "".join(files)
    tree = _read_plan(path) if path else {}
    name = path or "the options"
    faults = listed_faults(tree, name, CLUSTER)
    faults += read_faults([word for word in words if word not in files], CLUSTER)
    _override(tree, {name: value for name, value in overrides.items() if value is not None})
    tree = _in_nanoseconds(tree, path)
    try:
        plan = _with_faults(msgspec.convert(tree, ClusterPlan), faults)
    except msgspec.ValidationError as error:
        from rankwise.sim.config_errors import mistake_in  # noqa: PLC0415  # only for mistakes

        told = mistake_in(error, ClusterPlan, tree).describe
        raise ConfigError(
            f"{name}: {told}", hint="docs/development/cluster-simulation.md"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{name}: {error}", hint="docs/development/cluster-simulation.md"
        ) from error
    if plan.nodes < plan.rendezvous.nodes_min:
        raise ConfigError(
            f"{name}: there are {plan.nodes} nodes, and none runs before"
            f" {plan.rendezvous.nodes_min} are there",
            hint="give more --nodes, or a smaller --nnodes",
        )
    return plan


def _read_plan(path: str) -> dict[str, Any]:
    from rankwise.sim.files import read_fields  # noqa: PLC0415  # which needs YAML

    tree = read_fields(path, "the plan")
    parts = {name: tree.get(name, {}) for name in _PARTS}
    if isinstance(parts["rendezvous"], dict):
        parts["rendezvous.policy"] = parts["rendezvous"].get("policy", {})
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise ConfigError(f"{path}: {name} is {part!r}, expected fields")
    return tree


def _override(tree: dict[str, Any], given: dict[str, Any]) -> None:
    """Put what the options say into a plan, and what follows from it."""
    for name in ("nodes", "is_alone"):
        if name in given:
            tree[name] = given[name]
    tree.setdefault("nodes", 1 if tree.get("is_alone") else 8)
    rendezvous = tree.setdefault("rendezvous", {})
    workers = tree.setdefault("workers", {})
    for name in ("nodes_min", "nodes_max", "spares"):
        if name in given:
            rendezvous[name] = given[name]
    for name in ("nodes_min", "nodes_max"):
        rendezvous.setdefault(name, tree["nodes"])
    if "restarts_max" in given:
        rendezvous.setdefault("policy", {})["restarts_max"] = given["restarts_max"]
    if "per_node" in given:
        workers["per_node"] = given["per_node"]
    lives = workers.get("lives")
    if isinstance(lives, list) and lives and isinstance(lives[0], list):
        workers.setdefault("per_node", len(lives[0]))
    if "gang" in tree:
        tree["gang"].setdefault("size", workers.get("per_node", 1))


def _with_faults(plan: ClusterPlan, named: Sequence[Named]) -> ClusterPlan:
    """The same plan with these faults; that a node is late is written where all late nodes are."""
    faults = tuple(fault for _, fault in named if isinstance(fault, FaultOfCluster))
    late: dict[int, Instant] = {}
    for called, fault in named:
        if isinstance(fault, LateNode):
            if fault.node in late:
                raise ConfigError(f"{called}: node {fault.node} is late already, expected once")
            late[fault.node] = Instant(fault.by)
    return msgspec.structs.replace(plan, faults=faults, late={**plan.late, **late})


def _in_nanoseconds(value: Any, path: str, name: str = "") -> Any:
    """The same tree with durations as integers."""
    if isinstance(value, dict):
        return {
            key: _in_nanoseconds(each, path, name if name == "late" else str(key))
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_in_nanoseconds(each, path, name) for each in value]
    if name not in _time_fields() or value is None:
        return value
    duration = parse_duration(value) if isinstance(value, str) else 0 if value == 0 else None
    if duration is None:
        raise ConfigError(
            f"{path}: {name} is {value!r}, expected a duration with its unit, as 5 s or 200 ms"
        )
    return duration


@cache
def _time_fields() -> frozenset[str]:
    """Names of the fields of a plan that hold a duration, or an instant from the beginning."""
    names: set[str] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [ClusterPlan]
    while waiting:
        kind = waiting.pop()
        waiting += get_args(kind)
        if kind in seen or not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            continue
        seen.add(kind)
        for name, of in get_type_hints(kind).items():
            waiting.append(of)
            if _is_time(of):
                names.add(name)
    return frozenset(names)


def _is_time(kind: Any) -> bool:
    return kind in (Duration, Instant) or any(_is_time(each) for each in get_args(kind))
