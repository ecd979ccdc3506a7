"""Softmax over the rows of a matrix, fused: every row is read and written once."""

from operator import attrgetter
from typing import Any

import numpy as np

from rankwise.sim import triton
from rankwise.sim.benches.bounds import math_bound, roofline_of
from rankwise.sim.benches.checking import TOLERANCES, check_close
from rankwise.sim.benches.kernels import softmax_kernel
from rankwise.sim.benches.measuring import kernel_result
from rankwise.sim.benches.parameters import Float, Size
from rankwise.sim.reporting.results import BenchResult

OPERATIONS = ("max", "sub", "exp", "sum", "div")
"""What every element takes part in."""
_ROWS_PER_PE = 32
"""Unless their number is given."""


def run(
    torch: Any, *, rows: Size | None = None, columns: Size = 1024, dtype: Float = "f16"
) -> list[BenchResult]:
    """Softmax of every row; unless their number is given, there are 32 for each PE."""
    topology = torch.engine.topology
    rows = rows or _ROWS_PER_PE * topology.pe_count
    x = torch.randn(rows, columns, dtype=dtype, name="x")
    y = torch.empty(rows, columns, dtype=dtype, name="y")
    programs = min(rows, topology.pe_count)
    per_program = triton.cdiv(rows, programs)
    handle = torch.launch(
        softmax_kernel, triton.cdiv(rows, per_program), x, y, rows, columns,
        ROWS_PER_PROGRAM=per_program, WIDTH=triton.next_power_of_2(columns),
    )  # fmt: skip
    if torch.engine.enable_data:
        wide = x.numpy().astype(np.float32)
        powers = np.exp(wide - wide.max(axis=1, keepdims=True))
        expected = powers / powers.sum(axis=1, keepdims=True)
        check_close("softmax", y.numpy(), expected, tolerance=TOLERANCES[dtype])
    elements = rows * columns
    flops, size = len(OPERATIONS) * elements, 2 * elements * x.itemsize
    bound = max(
        roofline_of(topology, "f32", engine="math").bound(flops, size),
        math_bound(topology, "f32", dict.fromkeys(OPERATIONS, elements)),
        key=attrgetter("picoseconds"),
    )
    return [
        kernel_result(
            torch, "softmax", f"{rows} x {columns} {dtype}", handle, bound, flops=flops, size=size
        )
    ]  # fmt: skip


def worker(rank: int, world_size: int, torch: Any) -> None:
    """The same in a rank of a program of many: on the rank's own device."""
    del rank, world_size
    run(torch)
