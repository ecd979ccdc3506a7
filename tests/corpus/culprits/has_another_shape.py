"""The last batch of rank 1 is smaller than those of the others."""
# /// culprit
# kind = "disagreement"
# blamed = [1]
# says = "call #2: rank 1 called all_gather of (3,) float32 ({call}), {others} called all_gather of (4,) float32 ({call})"
# ///

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

for step in range(2):
    size = 3 if rank == 1 and step == 1 else 4
    if step == 1:
        print("now", flush=True)
    rows = [torch.empty(size) for _ in range(3)]
    dist.all_gather(rows, torch.ones(size))  # line: call
