"""A kernel in the Triton language, on a simulated machine: true numbers, and how long it takes.

rankwise sim run examples/kernel.py --topology switch8 --set block=4096
"""

from typing import Any

import numpy as np

from rankwise.sim import triton
from rankwise.sim.triton import language as tl


@triton.jit
def add_kernel(x_ptr: Any, y_ptr: Any, out_ptr: Any, n: int, block: tl.constexpr) -> None:
    """Out = x + y."""
    places = tl.program_id(0) * block + tl.arange(0, block)
    inside = places < n
    total = tl.load(x_ptr + places, mask=inside) + tl.load(y_ptr + places, mask=inside)
    tl.store(out_ptr + places, total, mask=inside)


def run(torch: Any, *, n: int = 100_000, block: int = 1024) -> None:
    """What `rankwise sim run` calls; `--set n=…` changes a parameter."""
    x, y, out = torch.rand(n), torch.rand(n), torch.empty(n)
    torch.launch(add_kernel, triton.cdiv(n, block), x, y, out, n, block=block)
    assert np.allclose(out.numpy(), x.numpy() + y.numpy())
    print(f"{n} sums are right")
