"""Functional collectives, which C++ begins, between those of Python; rank 0 is late to the last."""
# /// healthy
# tells = "rank 0 came last in "
# ///

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

for _ in range(5):
    functional.all_reduce(x, "sum", dist.group.WORLD).sum()
    dist.all_reduce(x)
    functional.all_gather_tensor(x, 0, dist.group.WORLD).sum()
time.sleep(1.2 * (rank == 0))
dist.barrier()
