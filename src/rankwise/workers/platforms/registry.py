"""Platforms by name. Others than our own come from the entry point group `rankwise.platforms`.

An entry point is a callable that makes a `Platform`. The text behind a colon in the name that a
user gives is handed to it as its only argument: `sim:pod64` is the platform `sim` on the topology
`pod64`.
"""

from importlib import import_module
from typing import Any

from rankwise.base.errors import ConfigError, TreeValueError
from rankwise.base.suggestions import hint_on_name
from rankwise.drivers.real.interrupts import came_from_handler, gate_here
from rankwise.workers.platforms.port import Platform

GROUP = "rankwise.platforms"
_OWN = {
    "host": ("rankwise.workers.platforms.host", "HostPlatform"),
    "sim": ("rankwise.workers.platforms.sim", "SimulatedPlatform"),
}


def load_platform(name: str) -> Platform:
    """Make the platform of a name; text after its colon is the argument.

    Raises:
        ConfigError: there is no such platform, or it cannot be loaded or made so.
    """
    kind, _, option = name.partition(":")
    make = _factory(kind)
    try:
        platform: Platform = make(option) if option else make()
    except TypeError as error:
        raise TreeValueError(f"platform {name!r} cannot be made: {error}") from error
    except ConfigError as error:  # of a simulated machine, which is no tree
        raise TreeValueError(error.message, hint=error.hint) from error
    return platform


def check_platform(name: str) -> None:
    """Refuse a name that `load_platform` does not know, without loading anything.

    Raises:
        ConfigError: there is no such platform.
    """
    kind = name.partition(":")[0]
    if kind not in _OWN and kind not in platform_names():
        raise _unknown(kind)


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
                with gate_here().handlers_replaced():
                    return point.load()
            except Exception as error:
                if came_from_handler(error):
                    raise
                raise TreeValueError(
                    f"platform {kind!r} of {point.value} cannot be loaded: {error}"
                ) from error
    raise _unknown(kind)


def _unknown(kind: str) -> TreeValueError:
    return TreeValueError(
        f"there is no platform {kind!r}",
        hint=f"{hint_on_name(kind, platform_names())}; others register under {GROUP!r}",
    )


def _entry_points() -> Any:
    from importlib.metadata import entry_points  # noqa: PLC0415  # takes its time

    return entry_points(group=GROUP)
