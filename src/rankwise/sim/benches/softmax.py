"""Softmax over the rows of a matrix, fused: every row is read and written once."""

from typing import Any

import numpy as np

from rankwise.sim import triton
from rankwise.sim.benches.bounds import roofline_of
from rankwise.sim.benches.checking import TOLERANCES, check_close
from rankwise.sim.benches.kernels import softmax_kernel
from rankwise.sim.benches.measuring import kernel_result
from rankwise.sim.benches.parameters import Float, Size
from rankwise.sim.reporting.results import BenchResult

OPERATIONS_PER_ELEMENT = 5
"""Maximum, difference, exponential, sum, quotient."""


def run(
    torch: Any, *, rows: Size = 256, columns: Size = 1024, dtype: Float = "f16"
) -> list[BenchResult]:
    """Softmax of every row."""
    x = torch.randn(rows, columns, dtype=dtype, name="x")
    y = torch.empty(rows, columns, dtype=dtype, name="y")
    programs = min(rows, torch.engine.topology.pe_count)
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
    return [
        kernel_result(
            torch, "softmax", f"{rows} x {columns} {dtype}", handle,
            roofline_of(torch.engine.topology, "f32", engine="math"),
            flops=OPERATIONS_PER_ELEMENT * elements, size=2 * elements * x.itemsize,
        )
    ]  # fmt: skip


def worker(rank: int, world_size: int, torch: Any) -> None:
    """The same in a rank of a program of many: on the rank's own device."""
    del rank, world_size
    run(torch)
