"""A matrix product on one device: tiles dealt to the PEs, accumulated in f32."""

from typing import Any, Literal

import numpy as np

from rankwise.sim import triton
from rankwise.sim.benches.bounds import roofline_of
from rankwise.sim.benches.checking import TOLERANCES, check_close
from rankwise.sim.benches.kernels import gemm_kernel
from rankwise.sim.benches.measuring import kernel_result
from rankwise.sim.benches.parameters import Float, Size
from rankwise.sim.benches.tiling import Product, Tilings
from rankwise.sim.reporting.results import BenchResult


def run(
    torch: Any,
    *,
    m: Size = 1024,
    n: Size = 1024,
    k: Size = 1024,
    dtype: Float = "f16",
    tile: Literal["auto", 16, 32, 64, 128, 256, 512] = "auto",
) -> list[BenchResult]:
    """Multiply m x k by k x n; tiles of C are `tile` x `tile`, or as suits sizes and machine."""
    a = torch.rand(m, k, dtype=dtype, name="a")
    b = torch.rand(k, n, dtype=dtype, name="b")
    c = torch.empty(m, n, dtype=dtype, name="c")
    engine = torch.engine
    tilings = Tilings(
        Product(m, n, k, dtype, c.itemsize),
        engine.topology.machine,
        engine.machine.costs,
        roofline_of(engine.topology, dtype),
        engine.topology.pe_count,
    )
    tiling = tilings.best() if tile == "auto" else tilings.square(tile)
    handle = torch.launch(
        gemm_kernel, triton.cdiv(m, tiling.m) * triton.cdiv(n, tiling.n), a, b, c, m, n, k,
        TILE_M=tiling.m, TILE_N=tiling.n, TILE_K=tiling.k, num_stages=tiling.stages,
    )  # fmt: skip
    if torch.engine.enable_data:
        expected = a.numpy().astype(np.float32) @ b.numpy().astype(np.float32)
        check_close("gemm", c.numpy(), expected, tolerance=TOLERANCES[dtype])
    size = (m * k + k * n + m * n) * c.itemsize
    return [
        kernel_result(
            torch, "gemm", f"{m} x {n} x {k} {dtype}, tiles of {tiling}", handle,
            tilings.bound(), flops=2 * m * n * k, size=size,
        )
    ]  # fmt: skip


def worker(rank: int, world_size: int, torch: Any) -> None:
    """The same in a rank of a program of many: on the rank's own device."""
    del rank, world_size
    run(torch)
