"""Chip workers: a tree of processes that run tasks on chips, on next-level workers and on helpers.

Names are loaded when they are first used; each module says what it offers.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HOMES: dict[str, str] = {}
"""Which module a name lives in."""

__all__: list[str] = []


def __getattr__(name: str) -> "Any":
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rankwise.workers' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  # most programs need few of the names

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
