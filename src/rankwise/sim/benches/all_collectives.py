"""Every collective by every algorithm that ships; each rank gives numbers that tell it apart."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rankwise.base.errors import ConfigError
from rankwise.sim.benches.checking import TOLERANCES, check_close
from rankwise.sim.benches.measuring import collective_result, messages_before, span_of
from rankwise.sim.benches.parameters import Number, Size
from rankwise.sim.benches.planning import bound_of, world_size_of
from rankwise.sim.ccl.algorithm_modules import needs_multicast
from rankwise.sim.ccl.configuration import SHIPPED
from rankwise.sim.reporting.results import BenchResult
from rankwise.sim.runtime.tensor import element_type


def run(
    torch: Any, *, elements: Size | None = None, dtype: Number = "f16", only: str = ""
) -> list[BenchResult]:
    """Run each algorithm, or those whose name has `only` in it, with `elements` per block.

    Unless they are given, there are fewer of them the more ranks there are.
    """
    size = world_size_of(torch)
    elements = elements or _elements_for(size)
    results = []
    for name, collective in _algorithms(torch, only):
        logged_before, before = len(torch.engine.op_log), messages_before(torch.engine)
        args = (size, torch, elements, dtype, name)
        torch.multiprocessing.spawn(worker, args=args, nprocs=size)
        logged = (torch.engine.op_log[at] for at in range(logged_before, len(torch.engine.op_log)))
        results.append(
            collective_result(
                torch, "all_collectives", f"{name}, {size} ranks x {elements} {dtype}",
                span_of(each for each in logged if each.kind == collective),
                bound_of(torch, collective, elements, size, dtype, algorithm=name),
                flops=_combined(collective, size) * elements,
                size=elements * element_type(dtype).itemsize,
                algorithm=name,
                before=before,
            )
        )  # fmt: skip
    return results


def _elements_for(size: int) -> int:
    """8,192 up to 8 ranks, 128 for 64: the blocks of an all-to-all are the square of the ranks."""
    return max(1, min(8_192, 2**19 // size**2))


def _algorithms(torch: Any, only: str) -> list[tuple[str, str]]:
    names = [name for name in sorted(SHIPPED) if only in name and name != "ring_allreduce_tcm"]
    if not torch.engine.topology.machine.system.sips.multicast_unit:
        names = [name for name in names if not needs_multicast(torch.ccl.algorithms[name].module)]
    pairs = [(name, torch.ccl.algorithms[name].collective) for name in names]
    wanted = [pair for pair in pairs if pair[1] in _PROGRAMS]
    if not wanted:
        raise ConfigError(
            f"all_collectives: no shipped algorithm has {only!r} in its name",
            hint=f"there are {', '.join(sorted(SHIPPED))}",
        )
    return wanted


def _combined(collective: str, size: int) -> int:
    """Additions per element of a block, over all ranks."""
    return {"all_reduce": size - 1, "reduce": size - 1, "reduce_scatter": size * (size - 1)}.get(
        collective, 0
    )


def worker(  # noqa: PLR0917  # spawn hands arguments over by position
    rank: int,
    world_size: int,
    torch: Any,
    elements: Size | None = None,
    dtype: Number = "f16",
    only: str = "",
) -> None:
    """What each rank does: collectives, as `only` says, and a look at every result."""
    torch.distributed.init_process_group(rank=rank, world_size=world_size)
    elements = elements or _elements_for(torch.distributed.get_world_size())
    exact = [(only, torch.ccl.algorithms[only].collective)] if only in SHIPPED else None
    for name, collective in exact or _algorithms(torch, only):
        actual, expected = _PROGRAMS[collective](torch, rank, name, elements, dtype)
        if torch.engine.enable_data:
            check_close(
                f"{name}, rank {rank}", actual.numpy(), expected, tolerance=TOLERANCES[dtype]
            )


Outcome = tuple[Any, np.ndarray[Any, Any]]


def _blocks(torch: Any, rank: int, elements: int, dtype: str) -> Any:
    """A block for every rank: block j of rank i holds 8 i + j."""
    size = torch.distributed.get_world_size()
    return torch.tensor(np.repeat(8.0 * rank + np.arange(size), elements), dtype=dtype)


def _all_reduce(torch: Any, rank: int, algorithm: str, elements: int, dtype: str) -> Outcome:
    size = torch.distributed.get_world_size()
    tensor = torch.full((elements,), rank + 1, dtype=dtype)
    torch.distributed.all_reduce(tensor, algorithm=algorithm)
    return tensor, np.full(elements, size * (size + 1) // 2)


def _reduce(torch: Any, rank: int, algorithm: str, elements: int, dtype: str) -> Outcome:
    size = torch.distributed.get_world_size()
    tensor = torch.full((elements,), rank + 1, dtype=dtype)
    torch.distributed.reduce(tensor, dst=0, algorithm=algorithm)
    return tensor, np.full(elements, rank + 1 if rank else size * (size + 1) // 2)


def _broadcast(torch: Any, rank: int, algorithm: str, elements: int, dtype: str) -> Outcome:
    tensor = torch.full((elements,), rank + 1, dtype=dtype)
    torch.distributed.broadcast(tensor, src=0, algorithm=algorithm)
    return tensor, np.ones(elements)


def _gather(torch: Any, rank: int, algorithm: str, elements: int, dtype: str) -> Outcome:
    size = torch.distributed.get_world_size()
    block = torch.full((elements,), rank + 1, dtype=dtype)
    gathered = torch.empty(size * elements, dtype=dtype) if rank == 0 else None
    torch.distributed.gather(block, gathered, algorithm=algorithm)
    if gathered is None:
        return block, np.full(elements, rank + 1)
    return gathered, np.repeat(np.arange(1, size + 1), elements)


def _scatter(torch: Any, rank: int, algorithm: str, elements: int, dtype: str) -> Outcome:
    block = torch.empty(elements, dtype=dtype)
    blocks = _blocks(torch, rank, elements, dtype) if rank == 0 else None
    torch.distributed.scatter(block, blocks, algorithm=algorithm)
    return block, np.full(elements, rank)


def _all_gather(torch: Any, rank: int, algorithm: str, elements: int, dtype: str) -> Outcome:
    size = torch.distributed.get_world_size()
    gathered = torch.empty(size * elements, dtype=dtype)
    block = torch.full((elements,), rank + 1, dtype=dtype)
    torch.distributed.all_gather(gathered, block, algorithm=algorithm)
    return gathered, np.repeat(np.arange(1, size + 1), elements)


def _reduce_scatter(torch: Any, rank: int, algorithm: str, elements: int, dtype: str) -> Outcome:
    size = torch.distributed.get_world_size()
    block = torch.empty(elements, dtype=dtype)
    blocks = _blocks(torch, rank, elements, dtype)
    torch.distributed.reduce_scatter(block, blocks, algorithm=algorithm)
    return block, np.full(elements, 4 * size * (size - 1) + size * rank)


def _all_to_all(torch: Any, rank: int, algorithm: str, elements: int, dtype: str) -> Outcome:
    size = torch.distributed.get_world_size()
    received = torch.empty(size * elements, dtype=dtype)
    blocks = _blocks(torch, rank, elements, dtype)
    torch.distributed.all_to_all(received, blocks, algorithm=algorithm)
    return received, np.repeat(8 * np.arange(size) + rank, elements)


_PROGRAMS: dict[str, Callable[[Any, int, str, int, str], Outcome]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
}
