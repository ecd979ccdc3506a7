"""Each rank is in two groups; all use them in the same order."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

groups = [dist.new_group(members) for members in ([0, 1], [1, 2], [0, 2])]
for step in range(3):
    for members, group in zip(([0, 1], [1, 2], [0, 2]), groups):
        if rank in members:
            dist.all_reduce(x, group=group)
    dist.barrier()
