"""Names in modules that ranks share, whose values belong to one rank.

An installed package is imported once, so its module-level variables exist once. Most of them are
equal on all ranks, or have keys that no other rank has. Those that hold something of a rank are
listed here: each rank finds its own value, which begins as a copy of what the import left.
`docs/development/variables-of-libraries.md` has the verdict on each of the others.
"""

import copy
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from rankwise.simranks.world.ranks import Rank
from rankwise.simranks.world.world import SimulatedWorld

_KEY = "names of ranks"
_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel"
_PROPAGATOR = "torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator"

NAMES: dict[str, tuple[str, ...]] = {
    "lightning.fabric.utilities.rank_zero": ("rank_zero_only.rank",),
    "lightning_fabric.utilities.rank_zero": ("rank_zero_only.rank",),
    "torch.distributed": ("_breakpoint_cache",),
    "torch.distributed._shard.api": ("_CURRENT_PROCESS_GROUP",),
    "torch.distributed.checkpoint._async_process_executor": ("_CHECKPOINT_PROCESS",),
    "torch.distributed.checkpoint.planner": (
        "SavePlanner._cached_all_plans",
        "SavePlanner._cached_final_save_plan",
        "SavePlanner._cached_global_plan",
        "SavePlanner._cached_metadata",
        "SavePlanner._cached_save_plan",
    ),
    "torch.distributed.debug": ("_DEBUG_SERVER_PROC", "_WORKER_SERVER"),
    "torch.distributed.elastic.timer.api": ("_timer_client",),
    "torch.distributed.fsdp._debug_utils": ("SimpleProfiler.profiling", "SimpleProfiler.results"),
    "torch.distributed.fsdp._fully_shard._fully_shard": ("_enable_fsdp_module_new_init",),
    "torch.distributed.fsdp.wrap": (
        "_ConfigAutoWrap.in_autowrap_context",
        "_ConfigAutoWrap.kwargs",
        "_ConfigAutoWrap.wrapper_cls",
    ),
    "torch.distributed.tensor": ("DTensor._op_dispatcher._custom_op_handlers",),
    "torch.distributed.tensor._random": ("_rng_tracker",),
    "torch.distributed.tensor._redistribute": (
        "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION",
        "_FORCE_MIN_COST_REDISTRIBUTION_PLAN",
    ),
    f"{_CONTEXT_PARALLEL}._attention": (
        "F.scaled_dot_product_attention",
        "_compiled_create_block_mask",
        "_cp_options",
        "_dispatch_mode",
        "_replaced_functions",
    ),
    # Packages fill these tables for all ranks while they are imported, so they part only where
    # ranks change and restore them.
    f"{_CONTEXT_PARALLEL}._sharding_rules": (
        "_cp_strategy_contexts",
        "_original_strategies",
        f"{_PROPAGATOR}.op_strategy_funcs",
        f"{_PROPAGATOR}.op_to_schema_info",
    ),
    "torch.nn.parallel.distributed": ("DistributedDataParallel._active_ddp_module",),
    "torch.utils.checkpoint": (
        "DefaultDeviceType._default_device_type",
        "_checkpoint_debug_enabled",
        "_enable_checkpoint_early_stop",
    ),
}
"""By module: attributes of it, or of what it has."""


def _rank_of_environment() -> int:
    """As Lightning finds it when a process imports it."""
    number = next(filter(None, map(os.environ.get, ("RANK", "LOCAL_RANK"))), "0")
    return int(number)


_FIRST: dict[str, Callable[[], Any]] = {"rank_zero_only.rank": _rank_of_environment}
"""What some begin with: the import left what the rank that made it has."""


class _NamePlace(NamedTuple):
    """A name in a module, or of a class or another object of it."""

    owner: Any
    name: str
    home: Any


class _Cells:
    """Names that are read and written together, at each hand-over.

    The code is generated for the given names, one statement per name. It takes a quarter of the
    time of `getattr` and `setattr`.
    """

    read: Callable[[], tuple[Any, ...]]
    """Their values, and None."""
    write: Callable[[tuple[Any, ...]], None]
    """Puts such values in their places."""

    def __init__(self) -> None:
        self._owners: dict[str, Any] = {}
        self._targets: list[str] = []
        self._make()

    def add(self, place: _NamePlace) -> None:
        """Take in another name."""
        assert place.name.isidentifier(), "it becomes code"
        owner = f"owner{len(self._targets)}"
        self._owners[owner] = place.owner
        self._targets.append(f"{owner}.{place.name}")
        self._make()

    def _make(self) -> None:
        reads, writes = (", ".join((*self._targets, last)) for last in ("None", "_"))
        made = dict(self._owners)
        exec(f"def read(): return {reads},\ndef write(values): {writes}, = values\n", made)  # noqa: S102  # see above
        self.read, self.write = made["read"], made["write"]


class _NamesOfRank:
    """The values of one rank.

    Attributes:
        own: those that differ from rank to rank from the first.
        alike: the others; ranks that have changed none share them.
        modules: how many modules they are from.
    """

    def __init__(self) -> None:
        self.own: tuple[Any, ...] = ()
        self.alike: tuple[Any, ...] = ()
        self.modules = 0


class NamesOfRanks:
    """Moves the values of names in and out, in one world; a the per-rank states.

    Almost no program changes one of them, so those that may be equal on all ranks are compared,
    and put in their places only where two ranks differ.
    """

    def __init__(self) -> None:
        self._places: list[_NamePlace] = []
        self._firsts: list[Callable[[], Any]] = []
        self._own = _Cells()
        self._alike = _Cells()
        self._first = self._present = self._alike.read()
        self._is_comparable = True
        self._modules = 0

    def follow(self, module: str, world: SimulatedWorld) -> Callable[[], None]:
        """Follow the import of a module that has such names; returns what undoes it."""
        added = []
        for path in NAMES[module]:
            place = _found(module, path)
            if place is None:
                continue  # another version of the library has not got it
            self._places.append(place)
            first = _FIRST.get(path, partial(copy.copy, place.home))
            if path in _FIRST or first() is not place.home:
                self._own.add(place)
                self._firsts.append(first)
                setattr(place.owner, place.name, first())
            else:
                self._alike.add(place)
                added.append(place.home)
        self._first = (*self._first[:-1], *added, None)
        self._present = (*self._present[:-1], *added, None)
        self._modules += 1
        if self._modules > 1:
            return _nothing
        world.own_state.add(self)
        return self.close

    def move_in(self, rank: Rank) -> None:
        """Let a rank find its values, or what all begin with."""
        mine: _NamesOfRank | None = rank.own_state.get(_KEY)
        if mine is None or mine.modules != self._modules:
            mine = self._extended(rank)
        self._own.write(mine.own)
        if mine.alike is not self._present:
            if not self._is_comparable or mine.alike != self._present:
                self._alike.write(mine.alike)
            self._present = mine.alike

    def _extended(self, rank: Rank) -> _NamesOfRank:
        """The values of a rank, with those of modules that have been imported since."""
        mine: _NamesOfRank = rank.own_state.setdefault(_KEY, _NamesOfRank())
        own, alike = mine.own[:-1], mine.alike[:-1]
        mine.own = (*own, *[first() for first in self._firsts[len(own) :]], None)
        whole = alike + self._first[len(alike) :]
        mine.alike = self._first if whole == self._first else whole
        mine.modules = self._modules
        return mine

    def move_out(self, rank: Rank) -> None:
        """Keep them."""
        mine: _NamesOfRank = rank.own_state[_KEY]
        mine.own, alike = self._own.read(), self._alike.read()
        if not self._is_comparable or alike != self._present:
            self._is_comparable &= all(map(_is_itself_alone, alike))
            mine.alike = self._present = alike

    def close(self) -> None:
        """Give the process its own back."""
        for place in self._places:
            setattr(place.owner, place.name, place.home)


def _found(module: str, path: str) -> _NamePlace | None:
    *owners, name = path.split(".")
    owner: Any = sys.modules[module]
    if owners and owners[0] == "torch":
        owner = sys.modules[owners.pop(0)]
    for each in owners:
        owner = getattr(owner, each, None)
    values = getattr(owner, "__dict__", {})
    return _NamePlace(owner, name, values[name]) if name in values else None


def _is_itself_alone(value: Any) -> bool:
    """Whether a value that equals it may stand in its place: not so for two dictionaries."""
    if isinstance(value, tuple):
        return all(map(_is_itself_alone, value))
    compare: object = type(value).__eq__
    return compare is object.__eq__ or isinstance(value, bool | int | float | str)


def _nothing() -> None:
    """The first module's names are given back together with all others."""
