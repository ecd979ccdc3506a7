"""An all-reduce between all devices, by the algorithm that `ccl.yaml` names.

Each rank contributes its rank + 1 at every place, so that the sum is known exactly in every dtype.
"""

from typing import Any

import numpy as np

from rankwise.sim.benches.checking import TOLERANCES, check_close
from rankwise.sim.benches.measuring import collective_result, span_of
from rankwise.sim.benches.parameters import Number, Size
from rankwise.sim.benches.planning import algorithm_of, bound_of, devices_of, world_size_of
from rankwise.sim.reporting.results import BenchResult
from rankwise.sim.runtime.tensor import element_type

ELEMENTS_PER_PE = 2048
"""Unless `n_elem` of the configuration says otherwise."""


def worker(
    rank: int, world_size: int, torch: Any, elements: Size | None = None, dtype: Number = "f16"
) -> None:
    """What each rank does."""
    torch.distributed.init_process_group(rank=rank, world_size=world_size)
    count = _elements(torch, world_size) if elements is None else elements
    tensor = torch.full((count,), rank + 1, dtype=dtype, name=f"gradient of rank {rank}")
    torch.distributed.all_reduce(tensor)
    if torch.engine.enable_data:
        expected = np.full(count, world_size * (world_size + 1) // 2)
        check_close(f"rank {rank}", tensor.numpy(), expected, tolerance=TOLERANCES[dtype])


def run(torch: Any, *, elements: Size | None = None, dtype: Number = "f16") -> None:
    """Run `worker`, which is looked up now, in every rank."""
    world_size = world_size_of(torch)
    options = () if elements is None and dtype == "f16" else (elements, dtype)
    torch.multiprocessing.spawn(worker, args=(world_size, torch, *options), nprocs=world_size)


def results(
    torch: Any, *, elements: Size | None = None, dtype: Number = "f16"
) -> list[BenchResult]:
    """What the run took."""
    size = world_size_of(torch)
    count = _elements(torch, size) if elements is None else elements
    time = span_of(each for each in torch.engine.op_log if each.kind == "all_reduce")
    name = algorithm_of(torch, "all_reduce", count, size, dtype).name
    return [
        collective_result(
            torch, "ccl_allreduce", f"{name}, {size} ranks x {count} {dtype}", time,
            bound_of(torch, "all_reduce", count, size, dtype),
            flops=(size - 1) * count, size=count * element_type(dtype).itemsize,
            algorithm=name,
        )
    ]  # fmt: skip


def _elements(torch: Any, world_size: int) -> int:
    """How many elements each rank has."""
    per_pe = torch.ccl.algorithm("all_reduce").queues.n_elem or ELEMENTS_PER_PE
    return per_pe * len(devices_of(torch, world_size)[0].pes)
