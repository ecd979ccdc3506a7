"""Rank 1 calls two operations the other way round."""
# /// culprit
# kind = "disagreement"
# blamed = [1]
# says = "call #1: rank 1 called barrier ({culprit}), {others} called all_reduce (sum) of (4,) float32 ({call})"
# ///

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

print("now", flush=True)
if rank == 1:
    dist.barrier()  # line: culprit
    dist.all_reduce(x)
else:
    dist.all_reduce(x)  # line: call
    dist.barrier()
