"""What scripts for CUDA call besides computing: the profiler, pools of memory, old tensor types.

There is nothing behind it on modelled devices, and nothing of it changes a result: the profiler of
CUDA records nothing, for one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

_OLD_TYPES = ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Short", "Char", "Byte", "Bool")


class NoPool:
    """A pool of memory: allocations in it are like all others."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.id = (0, 0)
        self.allocator = None

    def use_count(self) -> int:
        """How many use it."""
        return 1

    def snapshot(self) -> list[Any]:
        """Its segments."""
        return []


def tools_of_cuda() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced: its owner, its name, and what takes its place."""
    answers: dict[str, Callable[[], Any]] = {
        "get_allocator_backend": lambda: "native",
        "get_per_process_memory_fraction": lambda: 1.0,
        "get_sync_debug_mode": int,
        "set_sync_debug_mode": _nothing,
        "caching_allocator_enable": _nothing,
        "reset_accumulated_host_memory_stats": _nothing,
        "reset_peak_host_memory_stats": _nothing,
        "can_device_access_peer": lambda: True,
        "cudart": _runtime,
        "check_error": _nothing,
    }
    for name, answer in answers.items():
        for owner in (torch.cuda, torch.cuda.memory):
            if name in vars(owner):
                yield owner, name, _ignoring_arguments(answer)
    for owner in (torch.cuda, torch.cuda.memory):
        yield owner, "MemPool", NoPool
        yield owner, "use_mem_pool", _use_mem_pool
    for name in ("range_push", "range_pop", "mark"):
        yield torch.cuda.nvtx, name, _ignoring_arguments(_nothing)
    for name in ("start", "stop"):
        yield torch.cuda.profiler, name, _ignoring_arguments(_nothing)
    for name in _OLD_TYPES:
        yield torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor")


def _nothing() -> None:
    pass


def _ignoring_arguments(answer: Callable[[], Any]) -> Callable[..., Any]:
    """A function of its own each time, as `torch.compile` wants them."""
    return lambda *_, **__: answer()


def _runtime() -> SimpleNamespace:
    """The functions of CUDA's runtime that torch has bound for Python."""
    done = _ignoring_arguments(int)
    return SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaProfilerStart=done,
        cudaProfilerStop=done,
        cudaHostRegister=done,
        cudaHostUnregister=done,
        cudaMemGetInfo=torch.cuda.mem_get_info,
    )


@contextmanager
def _use_mem_pool(_pool: Any, _device: Any = None) -> Iterator[None]:
    yield
