"""A matrix product on one device: tiles dealt to the PEs, accumulated in f32."""

from typing import Any

import numpy as np

from rankwise.sim import triton
from rankwise.sim.benches.bounds import roofline_of
from rankwise.sim.benches.checking import TOLERANCES, check_close
from rankwise.sim.benches.kernels import gemm_kernel
from rankwise.sim.benches.measuring import kernel_result
from rankwise.sim.benches.parameters import Float, Size, Tile
from rankwise.sim.reporting.results import BenchResult


def run(
    torch: Any,
    *,
    m: Size = 512,
    n: Size = 512,
    k: Size = 512,
    dtype: Float = "f16",
    tile: Tile = 64,
) -> list[BenchResult]:
    """Multiply m x k by k x n; tiles of C are `tile` x `tile`."""
    a = torch.rand(m, k, dtype=dtype, name="a")
    b = torch.rand(k, n, dtype=dtype, name="b")
    c = torch.empty(m, n, dtype=dtype, name="c")
    grid = triton.cdiv(m, tile) * triton.cdiv(n, tile)
    handle = torch.launch(
        gemm_kernel, grid, a, b, c, m, n, k, TILE_M=tile, TILE_N=tile, TILE_K=tile
    )
    if torch.engine.enable_data:
        expected = a.numpy().astype(np.float32) @ b.numpy().astype(np.float32)
        check_close("gemm", c.numpy(), expected, tolerance=TOLERANCES[dtype])
    size = (m * k + k * n + m * n) * c.itemsize
    return [
        kernel_result(
            torch, "gemm", f"{m} x {n} x {k} {dtype}", handle,
            roofline_of(torch.engine.topology, dtype), flops=2 * m * n * k, size=size,
        )
    ]  # fmt: skip


def worker(rank: int, world_size: int, torch: Any) -> None:
    """The same in a rank of a program of many: on the rank's own device."""
    del rank, world_size
    run(torch)
