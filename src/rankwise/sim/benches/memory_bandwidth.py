"""What the memory of a device gives: copy, scale, add and triad, as STREAM has them."""

import math
from typing import Any

from rankwise.sim import triton
from rankwise.sim.benches.bounds import roofline_of
from rankwise.sim.benches.checking import TOLERANCES, check_close
from rankwise.sim.benches.kernels import stream_kernel
from rankwise.sim.benches.measuring import kernel_result
from rankwise.sim.benches.parameters import Block, Number, Size
from rankwise.sim.reporting.results import BenchResult
from rankwise.sim.runtime.tensor import element_type

FACTOR = 3.0
_MICROSECONDS = 2.5
"""What one array keeps the memory busy for, at least, unless its size is given."""
_KINDS = ("copy", "scale", "add", "triad")


def run(
    torch: Any, *, elements: Size | None = None, dtype: Number = "f32", block: Block = 4096
) -> list[BenchResult]:
    """The four kinds, over `elements` elements in blocks of `block`.

    Unless they are given, there are as many as make latency small beside what memory takes.
    """
    topology = torch.engine.topology
    roofline = roofline_of(topology, dtype, engine="math")
    if elements is None:
        wave = topology.pe_count * block
        wanted = roofline.bytes_per_second * _MICROSECONDS * 1e-6 / element_type(dtype).itemsize
        elements = wave * max(1, math.ceil(wanted / wave))
    a = torch.rand(elements, dtype=dtype, name="a")
    b = torch.rand(elements, dtype=dtype, name="b")
    c = torch.empty(elements, dtype=dtype, name="c")
    blocks = triton.cdiv(elements, block)
    programs = min(blocks, topology.pe_count)
    results = []
    for kind in _KINDS:
        scales, adds = kind in {"scale", "triad"}, kind in {"add", "triad"}
        handle = torch.launch(
            stream_kernel, programs, a, b, c, elements, FACTOR,
            SCALES=scales, ADDS=adds, BLOCK=block, BLOCKS=triton.cdiv(blocks, programs),
        )  # fmt: skip
        if torch.engine.enable_data:
            factor = FACTOR if scales else 1.0
            expected = a.numpy() + factor * b.numpy() if adds else factor * a.numpy()
            check_close(
                f"memory_bandwidth {kind}", c.numpy(), expected, tolerance=TOLERANCES[dtype]
            )
        results.append(
            kernel_result(
                torch, "memory_bandwidth", f"{kind} of {elements} {dtype}", handle, roofline,
                flops=(scales + adds) * elements, size=(2 + adds) * a.nbytes,
            )
        )  # fmt: skip
    return results


def worker(rank: int, world_size: int, torch: Any) -> None:
    """The same in a rank of a program of many: on the rank's own device."""
    del rank, world_size
    run(torch)
