"""Rank 1 destroys its groups while the others go on, and cleans up for long."""
# /// culprit
# kind = "departure"
# blamed = [1]
# says = "rank 1 was done after all_reduce #2 (sum) of (4,) float32 ({call}), while {others} in all_reduce #3 (sum) of (4,) float32 ({call})"
# ///

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

for step in range(3):
    if rank == 1 and step == 2:
        print("now", flush=True)
        dist.destroy_process_group()
        time.sleep(600)
        sys.exit()
    dist.all_reduce(x)  # line: call
