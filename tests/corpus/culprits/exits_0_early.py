"""Rank 2 believes that it is done, and exits with 0 in the middle of the training."""
# /// culprit
# kind = "departure"
# blamed = [2]
# says = "rank 2 was done after all_reduce #3 (sum) of (4,) float32 ({call}), while {others} in all_reduce #4 (sum) of (4,) float32 ({call})"
# ///

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

for step in range(10):
    if rank == 2 and step == 3:
        print("now", flush=True)
        sys.exit()
    dist.all_reduce(x)  # line: call
