"""Platforms by name. Others than our own come from the entry point group `rankwise.platforms`.

An entry point is a callable that makes a `Platform`. What follows a colon in the name that a user
gives is handed to it as its only argument: `sim:pod64` is the platform `sim` on the topology
`pod64`.
"""

from importlib import import_module
from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.workers.platforms.port import Platform

GROUP = "rankwise.platforms"
_OWN = {
    "host": ("rankwise.workers.platforms.host", "HostPlatform"),
    "sim": ("rankwise.workers.platforms.sim", "SimulatedPlatform"),
}


def load_platform(name: str) -> Platform:
    """Make the platform of a name, with what stands behind the name's colon.

    Raises:
        ConfigError: there is no such platform, or it cannot be loaded or made so.
    """
    kind, _, option = name.partition(":")
    make = _factory(kind)
    try:
        platform: Platform = make(option) if option else make()
    except TypeError as error:
        raise ConfigError(f"platform {name!r} cannot be made: {error}") from error
    return platform


def platform_names() -> list[str]:
    """All names that `load_platform` knows."""
    return sorted({*_OWN, *(point.name for point in _entry_points())})


def _factory(kind: str) -> Any:
    if kind in _OWN:
        module, name = _OWN[kind]
        return getattr(import_module(module), name)
    for point in _entry_points():
        if point.name == kind:
            try:
                return point.load()
            except Exception as error:
                raise ConfigError(
                    f"platform {kind!r} of {point.value} cannot be loaded: {error}"
                ) from error
    raise ConfigError(
        f"there is no platform {kind!r}",
        hint=f"there are {', '.join(platform_names())}; others register under {GROUP!r}",
    )


def _entry_points() -> Any:
    from importlib.metadata import entry_points  # noqa: PLC0415  # takes its time

    return entry_points(group=GROUP)
