"""Rank 0 evaluates for longer than the hang timeout; the other waits at a barrier."""
# /// healthy
# ranks = 2
# hang_timeout = 1.5
# tells = "rank 0 came last in "
# ///

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

dist.all_reduce(x)
if rank == 0:
    end = time.monotonic() + 2.2
    while time.monotonic() < end:
        torch.ones(8) @ torch.ones(8)
dist.barrier()
