"""Rank 1 has one batch less than the others."""
# /// culprit
# kind = "departure"
# blamed = [1]
# says = "rank 1 was done after all_reduce #4 (sum) of (4,) float32 ({call}), while {others} in all_reduce #5 (sum) of (4,) float32 ({call})"
# ///

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

for batch in range(5 - (rank == 1)):
    if batch == 4:
        print("now", flush=True)
    dist.all_reduce(x)  # line: call
