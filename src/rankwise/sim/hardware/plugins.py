"""Plug-ins: what other packages offer the simulator under a name, found when it is asked for.

An installed package declares entry points in a group (`rankwise.topologies`,
`rankwise.cost_models`). Nothing is loaded, or even looked for, before its name is used, so that a
package that is broken harms only those who want it.
"""

from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.sim.kernel import line_of


def plugin_names(group: str) -> tuple[str, ...]:
    """The names that installed packages have in a group, sorted."""
    from importlib.metadata import entry_points  # noqa: PLC0415  # not for what ships

    return tuple(sorted({point.name for point in entry_points(group=group)}))


def load_plugin(group: str, name: str) -> Any:
    """What an installed package offers under a name; None if none does.

    Raises:
        ConfigError: two packages do, or it cannot be loaded; names the packages.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415  # not for what ships

    points = sorted(entry_points(group=group, name=name), key=lambda point: point.value)
    if not points:
        return None
    if len({point.value for point in points}) > 1:
        places = ", ".join(f"{point.value} of {_package(point)}" for point in points)
        raise ConfigError(
            f"several installed packages offer {name!r} in {group}: {places}",
            hint="uninstall all but one",
        )
    try:
        return points[0].load()
    except Exception as error:
        raise plugin_failed(group, name, "cannot be loaded", error) from error


def plugin_failed(group: str, name: str, what: str, error: Exception) -> ConfigError:
    """The error for a plug-in that raised, with the line of its file."""
    line = line_of(error)
    place = f", at {line}" if line else ""
    return ConfigError(f"{name!r} of {group} {what}: {type(error).__name__}: {error}{place}")


def _package(point: Any) -> str:
    return str(point.dist.name) if point.dist else "an unknown package"
