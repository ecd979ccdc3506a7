"""Gradients of a data-parallel step on a pod of 64 chips: what does the all-reduce cost?

rankwise sim run examples/pod.py --topology pod64 --set elements=1000000 --timing-only
rankwise sim run examples/pod.py --sweep elements=1000,100000 --topology torus16
"""

from typing import Any

import numpy as np


def worker(rank: int, world_size: int, torch: Any, *, elements: int = 10_000) -> None:
    """One rank; there is one for each accelerator of the machine."""
    torch.distributed.init_process_group(rank=rank, world_size=world_size)
    gradient = torch.full((elements,), rank + 1, dtype="f32", name="gradient")
    torch.distributed.all_reduce(gradient)
    if torch.engine.enable_data:  # not with --timing-only
        assert np.all(gradient.numpy() == world_size * (world_size + 1) / 2)
        if rank == 0:
            print(f"{world_size} ranks agree")
