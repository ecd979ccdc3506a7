"""Plans as YAML files: what a simulated cluster is, and its faults.

The fields are those of `ClusterPlan`. A duration is written with its unit, as `5 s` or `200 ms`; a
bare number would be one of nanoseconds, which is never meant, and is refused.
"""

from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.units import Duration, Instant, parse_duration
from rankwise.drivers.sim.cluster.faults import ClusterPlan


def load_plan(path: str, **overrides: Any) -> ClusterPlan:
    """Read a plan.

    Args:
        path: of the file; empty for a plan in which nothing goes wrong.
        overrides: fields that replace what the file says; None leaves it. `nodes_min`,
            `nodes_max`, `spares` and `restarts_max` go where they belong.

    Raises:
        ConfigError: the file cannot be read, or is no plan; the message names the field.
    """
    tree = read_tree(path) if path else {}
    given = {name: value for name, value in overrides.items() if value is not None}
    if "nodes" in given:
        tree["nodes"] = given["nodes"]
    if "is_alone" in given:
        tree["is_alone"] = given["is_alone"]
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
    name = path or "the options"
    try:
        plan = msgspec.convert(_in_nanoseconds(tree, path), ClusterPlan)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}", hint="docs/cluster-simulation.md") from error
    if plan.nodes < plan.rendezvous.nodes_min:
        raise ConfigError(
            f"{name}: there are {plan.nodes} nodes, and none runs before"
            f" {plan.rendezvous.nodes_min} are there",
            hint="give more --nodes, or a smaller --nnodes",
        )
    return plan


def read_tree(path: str) -> dict[str, Any]:
    """What a YAML file says, as fields.

    Raises:
        ConfigError: it cannot be read, or has no fields.
    """
    import yaml  # noqa: PLC0415  # only here

    from rankwise.sim.hardware.files import load_yaml, read_text  # noqa: PLC0415  # likewise

    try:
        tree = load_yaml(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the plan {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        shown = " ".join(str(error).split())
        raise ConfigError(f"the plan {path} is no YAML: {shown}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"the plan {path} is a {type(tree).__name__}, expected fields")
    for name in ("rendezvous", "workers", "gang"):
        if not isinstance(tree.get(name, {}), dict):
            raise ConfigError(f"{path}: {name} is {tree[name]!r}, expected fields")
    return tree


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
