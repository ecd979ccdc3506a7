"""Attention as one kernel: the matrix of scores never goes to memory.

Blocks of keys and values stream past blocks of queries, with softmax's maximum and sum so far.
"""

from operator import attrgetter
from typing import Any

import numpy as np

from rankwise.sim import triton
from rankwise.sim.benches.bounds import math_bound, roofline_of
from rankwise.sim.benches.checking import TOLERANCES, check_close
from rankwise.sim.benches.kernels import attention_kernel
from rankwise.sim.benches.measuring import kernel_result
from rankwise.sim.benches.parameters import Float, Size, Tile
from rankwise.sim.reporting.results import BenchResult

OPERATIONS = ("max", "sub", "exp", "sum")
"""What every score takes part in on the math engine, beside the two products."""


def run(
    torch: Any, *, heads: Size | None = None, length: Size = 512, width: Tile = 64,
    dtype: Float = "f16", block: Tile = 64,
) -> list[BenchResult]:  # fmt: skip
    """Attention of some heads; `block` queries and keys at a time.

    Unless `heads` is given, there are two blocks of queries for each PE.
    """
    topology, blocks = torch.engine.topology, triton.cdiv(length, block)
    heads = heads or max(1, 2 * topology.pe_count // blocks)
    shape, scale = (heads, length, width), width**-0.5
    q, k, v = (torch.randn(shape, dtype=dtype, name=name) for name in ("q", "k", "v"))
    out = torch.empty(shape, dtype=dtype, name="out")
    handle = torch.launch(
        attention_kernel, heads * blocks, q, k, v, out, length, scale,
        WIDTH=width, QUERIES=block, KEYS=block,
    )  # fmt: skip
    if torch.engine.enable_data:
        wide_q, wide_k, wide_v = (each.numpy().astype(np.float32) for each in (q, k, v))
        scores = wide_q @ wide_k.transpose(0, 2, 1) * scale
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        expected = weights / weights.sum(axis=2, keepdims=True) @ wide_v
        check_close("attention", out.numpy(), expected, tolerance=TOLERANCES[dtype])
    score_count = heads * length * length
    flops, size = 4 * score_count * width, 4 * heads * length * width * q.itemsize
    bound = max(
        roofline_of(topology, dtype).bound(flops, size),
        math_bound(topology, "f32", dict.fromkeys(OPERATIONS, score_count)),
        key=attrgetter("picoseconds"),
    )
    return [
        kernel_result(
            torch, "attention", f"{heads} heads x {length} x {width} {dtype}", handle, bound,
            flops=flops, size=size,
        )
    ]  # fmt: skip


def worker(rank: int, world_size: int, torch: Any) -> None:
    """The same in a rank of a program of many: on the rank's own device."""
    del rank, world_size
    run(torch)
