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

from rankwise.sim.rehearsal.scheduler import Rank
from rankwise.sim.rehearsal.world import SimulatedWorld

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
    "transformers.integrations.deepspeed": ("_hf_deepspeed_config_weak_ref",),
    "transformers.modeling_utils": ("_is_ds_init_called", "_is_quantized"),
}
"""By module: attributes of it, or of what it has."""


def _rank_of_environment() -> int:
    """As Lightning finds it when a process imports it."""
    number = next(filter(None, map(os.environ.get, ("RANK", "LOCAL_RANK"))), "0")
    return int(number)


_FIRST: dict[str, Callable[[], Any]] = {"rank_zero_only.rank": _rank_of_environment}
"""What some begin with: the import left what the rank that made it has."""


class _Place(NamedTuple):
    """A name in a module, or of a class or another object of it."""

    owner: Any
    name: str
    home: Any
    first: Callable[[], Any]


class NamesOfRanks:
    """Moves the values of names in and out, in one world; a `Belongings`."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._present: list[Any] = []
        self._cells: list[tuple[Any, str]] = []
        self._is_moved = False

    def follow(self, module: str, world: SimulatedWorld) -> Callable[[], None]:
        """Follow the import of a module that has such names; returns what undoes it."""
        self._add(module)
        if self._is_moved:
            return _nothing
        self._is_moved = True
        world.belongings.add(self)
        return self.close

    def _add(self, module: str) -> None:
        for path in NAMES[module]:
            *owners, name = path.split(".")
            owner: Any = sys.modules[module]
            if owners and owners[0] == "torch":
                owner = sys.modules[owners.pop(0)]
            for each in owners:
                owner = getattr(owner, each, None)
            if name not in getattr(owner, "__dict__", ()):
                continue  # another version of the library has not got it
            home = vars(owner)[name]
            first = _FIRST.get(path, partial(copy.copy, home))
            self._places.append(_Place(owner, name, home, first))
            self._present.append(home)
            self._cells.append((vars(owner), name))
            self._put(len(self._places) - 1, first())

    def move_in(self, rank: Rank) -> None:
        """Let a rank find its values, or what all begin with."""
        mine: list[Any] = rank.belongings.setdefault(_KEY, [])
        if len(mine) < len(self._places):  # a module has been imported since
            mine += [place.first() for place in self._places[len(mine) :]]
        present = self._present
        if mine is present:
            return
        # Only where it differs: what is found for a class is cached until one of its names is set.
        for index, value in enumerate(mine):
            if value is not present[index]:  # which is the list of another rank: it stays as it is
                place = self._places[index]
                setattr(place.owner, place.name, value)
        self._present = mine

    def move_out(self, rank: Rank) -> None:
        """Keep them."""
        self._present = rank.belongings[_KEY] = [values[name] for values, name in self._cells]

    def close(self) -> None:
        """Give the process its own back."""
        for place in self._places:
            setattr(place.owner, place.name, place.home)

    def _put(self, index: int, value: Any) -> None:
        place = self._places[index]
        setattr(place.owner, place.name, value)
        self._present[index] = value


def _nothing() -> None:
    """The first module's names are given back together with all others."""
