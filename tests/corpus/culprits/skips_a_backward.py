"""Rank 0 finds its loss too large, skips the backward of DDP, and goes to a barrier."""
# /// culprit
# kind = "disagreement"
# blamed = [0]
# says = "call #8: rank 0 called barrier ({culprit}), {others} called all_reduce of (6,) float32 (begun by C++)"
# there = "call #8: rank 0 called barrier ({culprit}), {others} called all_reduce (sum) of (6,) float32 ({backward})"
# ///

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for step in range(3):
    loss = model(torch.ones(1, 2)).sum()
    if step == 2:
        print("now", flush=True)
    if step < 2 or rank:
        loss.backward()  # line: backward
    else:
        dist.barrier()  # line: culprit
