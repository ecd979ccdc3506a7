"""Settings of torch that a process has once, and each simulated rank must have for itself.

Few programs make any, and most of those on all ranks alike. So nothing is moved at a hand-over
until some rank makes one, and then only where two ranks differ.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import _tensor_str

from rankwise.sim.rehearsal.scheduler import Rank
from rankwise.sim.rehearsal.world import World, running_rank

_KEY = "settings of torch"
set_num_threads = torch.set_num_threads
"""torch's own: what it sets is of no rank."""
_set_precision = torch.set_float32_matmul_precision


class _Setting(NamedTuple):
    """A setting: which functions of torch make it, what it is, and how to make it that again."""

    setters: tuple[str, ...]
    get: Callable[[], Any]
    put: Callable[[Any], None]


def _determinism() -> tuple[bool, bool]:
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), is_warning


def _be_deterministic(wanted: tuple[bool, bool]) -> None:
    mode, warn_only = wanted
    torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)  # noqa: SLF001  # as torch does


def _print_options() -> dict[str, Any]:
    return copy.copy(vars(_tensor_str.PRINT_OPTS))


def _print_like(options: Mapping[str, Any]) -> None:
    vars(_tensor_str.PRINT_OPTS).update(options)


_SETTINGS = (
    _Setting(
        ("use_deterministic_algorithms", "set_deterministic_debug_mode"),
        _determinism,
        _be_deterministic,
    ),
    _Setting(("set_printoptions",), _print_options, _print_like),
    _Setting(("set_num_threads",), torch.get_num_threads, set_num_threads),
    _Setting(("set_float32_matmul_precision",), torch.get_float32_matmul_precision, _set_precision),
)


class Settings:
    """Moves what ranks have set; `Belongings` of a world from the first time that one does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._home: dict[_Setting, Any] = {}
        self._present: dict[_Setting, Any] = {}
        self._stack = ExitStack()
        for setting in _SETTINGS:
            for name in setting.setters:
                original = getattr(torch, name)
                setattr(torch, name, self._noting(setting, original))
                self._stack.callback(setattr, torch, name, original)

    def close(self) -> None:
        """Give torch back its functions, and what was set."""
        self._stack.close()
        for setting, home in self._home.items():
            setting.put(home)

    def move_in(self, rank: Rank) -> None:
        """Let a rank find what it has set, and otherwise what the process had."""
        mine = rank.belongings.get(_KEY, self._home)
        for setting, home in self._home.items():
            wanted = mine.get(setting, home)
            if wanted != self._present[setting]:
                setting.put(wanted)
                self._present[setting] = wanted

    def move_out(self, rank: Rank) -> None:
        """What it sets is noted at once."""

    def _noting(self, setting: _Setting, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            rank = running_rank()
            if rank is None:
                return original(*args, **kwargs)
            if setting not in self._home:
                is_first = not self._home
                self._home[setting] = self._present[setting] = setting.get()
                if is_first:
                    self._world.belongings.add(self)
            told = original(*args, **kwargs)
            mine = rank.belongings.setdefault(_KEY, {})
            mine[setting] = self._present[setting] = setting.get()
            return told

        call.__name__, call.__doc__ = original.__name__, original.__doc__
        return call
