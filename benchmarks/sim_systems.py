"""The simulator on systems that are large, and how much memory its ranks take.

- **A ring with real data**: 64 ranks x 1 MiB of f32, in place: the simulated time at message level
  and every rank's numbers, beside numpy's sum of the same data. A plan is made once and kept:
  "first" makes it, "again" has it. Targets: under 20 x numpy, for both.
- **A pod**: a tensor-parallel MLP on 64 SIPs x 16 cubes x 8 PEs, timing only, and the largest with
  numbers, too. Targets: under 60 s and 2 GB; 15 s for the largest.
- **An idle rank**: memory of a rank that has started and waits in a barrier. Target: under 150 kB.

The last two run in processes of their own, so that peaks and growth are theirs.
"""

import os
import resource
import statistics
import time
from functools import partial
from pathlib import Path

import numpy as np
from measuring import Table, apart, arguments, describe_machine, ratio, seconds

from rankwise.core.collectives.reductions import ReduceOp
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.benches import tp_mlp
from rankwise.sim.ccl.message_timing import Dimension, MessageCosts, collective_time
from rankwise.sim.ccl.plan import CollectiveRequest, plan
from rankwise.sim.triton.dtypes import dtype_named

RING = "rankwise.sim.ccl.algorithms.ring_allreduce"
BYTES_PER_RANK = 1 << 20
F32 = dtype_named("f32")
PAGE = os.sysconf("SC_PAGE_SIZE")
POD = [(64, 256, 1024), (64, 1024, 4096), (256, 1024, 4096)]


def ring_with_data(table: Table, ranks: int, repetitions: int) -> None:
    """Time and numbers of a ring all-reduce, beside numpy's sum."""
    elements = BYTES_PER_RANK // F32.itemsize
    data = np.random.default_rng(0).standard_normal((ranks, elements), dtype=np.float32)
    request = CollectiveRequest(RING, "all_reduce", ranks, elements)
    first: list[float] = []
    again: list[float] = []
    sums: list[float] = []
    for _ in range(repetitions):
        start = time.process_time()
        total = data.sum(axis=0)
        sums.append(time.process_time() - start)
        plan.cache_clear()
        for samples in (first, again):
            operands = list(data.copy())
            start = time.process_time()
            links = Dimension(count=ranks, bandwidth_gbps=50, latency_ns=500)
            collective_time("all_reduce", BYTES_PER_RANK, [links], chunks=4, costs=MessageCosts())
            results = plan(request).results(operands, ReduceOp.SUM, F32, may_overwrite=True)
            samples.append(time.process_time() - start)
            for result in results:
                assert result is not None, "every rank has the sum"
                assert np.allclose(result, total, rtol=0, atol=1e-4), "the sum is numpy's"
    took, then, numpys = (statistics.median(samples) for samples in (first, again, sums))
    table.row(
        f"{ranks} x 1 MiB",
        seconds(numpys),
        seconds(took),
        ratio(took, numpys),
        seconds(then),
        ratio(then, numpys),
    )


def pod(tokens: int, hidden: int, inner: int, *, has_data: bool = False) -> tuple[float, int, int]:
    """CPU seconds, bytes at the peak, and simulated picoseconds of an MLP on a pod."""
    start = time.process_time()
    engine = GraphEngine("pod64", enable_data=has_data)
    with RuntimeContext(engine, ccl={}) as torch:
        tp_mlp.run(torch, tokens=tokens, hidden=hidden, inner=inner)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return time.process_time() - start, peak, engine.now


def bytes_per_rank(ranks: int) -> float:
    """How much larger the process is per rank while all but the last wait in a barrier."""
    grown: list[int] = []
    with RuntimeContext(GraphEngine("pod64", enable_data=False), ccl={}) as torch:

        def worker(rank: int) -> None:
            if rank == ranks - 1:
                grown.append(resident_bytes() - before)
            torch.distributed.barrier()

        torch.multiprocessing.spawn(lambda _rank: None, nprocs=ranks)
        before = resident_bytes()
        torch.multiprocessing.spawn(worker, nprocs=ranks)
    return grown[0] / ranks


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE


def main() -> None:
    options = arguments(__doc__, repetitions=7)
    describe_machine()
    table = Table(
        "Ring all-reduce with real data",
        ["ranks", "numpy sum, CPU", "first", "/ numpy", "again", "/ numpy"],
        options.json,
    )
    ring_with_data(table, 16 if options.quick else 64, options.repetitions)
    table = Table(
        "Tensor-parallel MLP on 64 SIPs x 16 cubes x 8 PEs",
        ["tokens x hidden x inner", "CPU", "peak", "simulated"],
        options.json,
    )
    shapes = [(64, 128, 256)] if options.quick else POD
    for shape, has_data in [*((shape, False) for shape in shapes), (shapes[-1], True)]:
        took, peak, simulated = apart(partial(pod, *shape, has_data=has_data))
        name = " x ".join(map(str, shape)) + (", numbers" if has_data else ", timing only")
        table.row(name, seconds(took), f"{peak / 1e6:.0f} MB", f"{simulated / 1e6:.1f} us")
    table = Table("Memory of an idle rank", ["ranks", "per rank"], options.json)
    for ranks in (64,) if options.quick else (64, 1_024):
        table.row(str(ranks), f"{apart(partial(bytes_per_rank, ranks)) / 1e3:.1f} kB")


if __name__ == "__main__":
    main()
