"""Rank 0 reduces in group tp first, rank 1 in group dp."""
# /// culprit
# kind = "circle"
# ranks = 2
# blamed = [0, 1]
# says = "ranks wait for each other: rank 0 in all_reduce #1 (sum) of (4,) float32 in group tp ({call}) for rank 1; rank 1 in all_reduce #1 (sum) of (4,) float32 in group dp ({call}) for rank 0"
# ///

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

groups = [dist.new_group([0, 1], group_desc=name) for name in ("tp", "dp")]
print("now", flush=True)
for group in groups if rank == 0 else reversed(groups):
    dist.all_reduce(x, group=group)  # line: call
