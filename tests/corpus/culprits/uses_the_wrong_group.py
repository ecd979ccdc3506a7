"""Rank 1 reduces in the group of all ranks where its partner does so in group tp."""
# /// culprit
# kind = "circle"
# ranks = 2
# blamed = [0, 1]
# says = "ranks wait for each other: rank 0 in all_reduce #1 (sum) of (4,) float32 in group tp ({call}) for rank 1; rank 1 in all_reduce #1 (sum) of (4,) float32 ({call}) for rank 0"
# ///

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

group = dist.new_group([0, 1], group_desc="tp")
print("now", flush=True)
dist.all_reduce(x, group=group if rank == 0 else None)  # line: call
