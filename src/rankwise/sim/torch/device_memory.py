"""What `torch.cuda` tells of the memory of modelled devices.

A prediction counts the storages of each rank, as `torch.cuda.memory_allocated` would: these are the
answers. Without one (`--on sim`) nothing is counted, and devices look empty. torch's own functions
(`memory_allocated`, `memory_summary`) take their answers from the table that is given here.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

from rankwise.sim.prediction.memory import DeviceMemory
from rankwise.sim.rehearsal import modelled_device
from rankwise.sim.rehearsal.world import present_world, running_rank

_POOLS = ("all", "small_pool", "large_pool")
_COUNTED = "all"
"""The pool that has all bytes: of blocks and segments, and of their sizes, nothing is known."""
_IN_USE = ("allocated_bytes", "active_bytes", "requested_bytes")
_UNKNOWN = (
    "allocation", "segment", "active", "inactive_split", "inactive_split_bytes",
)  # fmt: skip
_EVENTS = (
    "num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free",
    "max_split_size",
)  # fmt: skip


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
        return max(0, total - memory_of(device).reserved), total

    def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
        return _stats(memory_of(device))

    def reset_peak_memory_stats(device: Any = None) -> None:
        memory_of(device).reset_peaks()

    def empty_cache() -> None:
        memory_of(None).empty_cache()

    return {
        "mem_get_info": mem_get_info, "empty_cache": empty_cache,
        "memory_stats_as_nested_dict": memory_stats_as_nested_dict,
        "host_memory_stats_as_nested_dict": dict,
        **dict.fromkeys(
            ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
            reset_peak_memory_stats,
        ),
    }  # fmt: skip


def _stats(memory: DeviceMemory) -> dict[str, Any]:
    used = _figures(memory.used, memory.peak, memory.taken)
    # What is freed, and other streams still use, is active, but no longer allocated.
    allocated = _figures(memory.used - memory.awaited, memory.peak, memory.taken)
    # What is reserved for a program that empties no cache; of one that does, it was more.
    reserved = _figures(memory.reserved, memory.reserved_peak, memory.reserved_peak)
    stats: dict[str, Any] = dict.fromkeys(_EVENTS, 0)
    for name in ("oversize_allocations", "oversize_segments"):
        stats[name] = _figures(0, 0, 0)
    for name, pool in product((*_IN_USE, "reserved_bytes", *_UNKNOWN), _POOLS):
        figures = {"reserved_bytes": reserved, "active_bytes": used}.get(name, allocated)
        is_known = pool == _COUNTED and name not in _UNKNOWN
        stats.setdefault(name, {})[pool] = figures if is_known else _figures(0, 0, 0)
    return stats


def _figures(current: int, peak: int, allocated: int) -> dict[str, int]:
    freed = allocated - current
    return {"current": current, "peak": peak, "allocated": allocated, "freed": freed}
