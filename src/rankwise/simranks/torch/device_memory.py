"""What `torch.cuda` tells of the memory of modelled devices.

A prediction counts the storages of each rank, as `torch.cuda.memory_allocated` would: these are the
answers. Without one (`--on sim`) nothing is counted, and devices look empty. torch's own functions
(`memory_allocated`, `memory_summary`) take their answers from the table that is given here.
"""

import pickle
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.sim.triton import modelled_device
from rankwise.simranks.prediction.caching_allocator import AllocatorSettings, UsageStatistic
from rankwise.simranks.prediction.device_memory import DeviceMemory
from rankwise.simranks.world.world import present_world, running_rank

_POOLS = ("all", "small_pool", "large_pool")
_COUNTED = "all"
"""The pool that has all bytes: how many blocks and segments there are, is not counted."""
_UNKNOWN = (
    "allocation", "segment", "active", "inactive_split", "inactive_split_bytes",
)  # fmt: skip
_EVENTS = (
    "num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free",
    "max_split_size",
)  # fmt: skip


_SETTINGS_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def settings_of(environ: Mapping[str, str]) -> AllocatorSettings:
    """What the variables of a rank say of torch's allocator; what has no effect here is ignored.

    Raises:
        ConfigError: a value cannot be used.
    """
    name = next((each for each in _SETTINGS_VARIABLES if environ.get(each)), "")
    given = dict(
        part.strip().partition(":")[::2] for part in environ.get(name, "").split(",") if part
    )
    expandable = given.get("expandable_segments", "False")
    if expandable not in ("True", "False"):
        raise ConfigError(f"{name} has expandable_segments:{expandable}, expected True or False")
    largest = _number(name, "max_split_size_mb", given)
    return AllocatorSettings(
        expandable=expandable == "True",
        max_split_bytes=largest << 20 if largest else None,
        roundup_divisions=_number(name, "roundup_power2_divisions", given),
    )


def _number(variable: str, name: str, given: Mapping[str, str]) -> int:
    text = given.get(name, "0")
    if text.startswith("["):
        raise ConfigError(
            f"{variable} has {name}:{text}, and only one number for all sizes is modelled",
            hint=f"write {name}:NUMBER for the prediction",
        )
    if not text.isdecimal():
        raise ConfigError(f"{variable} has {name}:{text}, expected a number")
    return int(text)


def capacity() -> int:
    """Bytes of a device: of the machine's, if the run predicts one."""
    prediction = None if running_rank() is None else present_world().prediction
    return modelled_device.MEMORY_BYTES if prediction is None else prediction.capacity


def memory_names(is_own: Callable[[Any], bool]) -> dict[str, Any]:
    """What of `torch.cuda.memory` is replaced.

    Args:
        is_own: whether a device, or None, is the present one of the rank that asks. A rank has
            nothing on other devices.
    """

    def memory_of(device: Any) -> DeviceMemory:
        rank = running_rank()
        prediction = None if rank is None else present_world().prediction
        if rank is None or prediction is None or not is_own(device):
            return DeviceMemory()
        memory: DeviceMemory = prediction.clock_of(rank).memory
        return memory

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        total = capacity()
        return max(0, total - memory_of(device).reserved.current), total

    def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
        return _stats(memory_of(device))

    def reset_peak_memory_stats(device: Any = None) -> None:
        memory_of(device).reset_peaks()

    def empty_cache() -> None:
        memory_of(None).empty_cache()

    def record_memory_history(enabled: Any = "all", *_: Any, **__: Any) -> None:
        memory_of(None).trace(is_wanted=enabled is not None)

    def snapshot(device: Any = None, *_: Any, **__: Any) -> dict[str, Any]:
        return memory_of(device).allocator.snapshot()

    def dump_snapshot(filename: str = "dump_snapshot.pickle", *_: Any, **__: Any) -> None:
        Path(filename).write_bytes(pickle.dumps(snapshot()))

    return {
        "_record_memory_history": record_memory_history, "_snapshot": snapshot,
        "_dump_snapshot": dump_snapshot, "memory_snapshot": lambda: snapshot()["segments"],
        "mem_get_info": mem_get_info, "empty_cache": empty_cache,
        "memory_stats_as_nested_dict": memory_stats_as_nested_dict,
        "host_memory_stats_as_nested_dict": dict,
        **dict.fromkeys(
            ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
            reset_peak_memory_stats,
        ),
    }  # fmt: skip


def _stats(memory: DeviceMemory) -> dict[str, Any]:
    stats: dict[str, Any] = dict.fromkeys(_EVENTS, 0)
    stats["num_alloc_retries"] = memory.allocator.retries
    for name in ("oversize_allocations", "oversize_segments"):
        stats[name] = _as_torch(UsageStatistic())
    known = {
        "allocated_bytes": memory.allocated, "active_bytes": memory.active,
        "requested_bytes": memory.requested, "reserved_bytes": memory.reserved,
    }  # fmt: skip
    for name, pool in product((*known, *_UNKNOWN), _POOLS):
        figures = known.get(name) if pool == _COUNTED else None
        stats.setdefault(name, {})[pool] = _as_torch(figures or UsageStatistic())
    return stats


def _as_torch(figures: UsageStatistic) -> dict[str, int]:
    current, allocated = figures.current, figures.total
    freed = allocated - current
    return {"current": current, "peak": figures.peak, "allocated": allocated, "freed": freed}
