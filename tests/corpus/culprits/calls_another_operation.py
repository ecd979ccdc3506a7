"""Rank 1 broadcasts where the others reduce."""
# /// culprit
# kind = "disagreement"
# blamed = [1]
# says = "call #3: rank 1 called broadcast from rank 0 of (4,) float32 ({culprit}), {others} called all_reduce (sum) of (4,) float32 ({call})"
# ///

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

for step in range(2):
    dist.all_reduce(x)
print("now", flush=True)
if rank == 1:
    dist.broadcast(x, 0)  # line: culprit
else:
    dist.all_reduce(x)  # line: call
