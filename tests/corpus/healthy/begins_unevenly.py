"""Rank 2 needs two seconds longer to begin."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

time.sleep(2 * (rank == 2))
for _ in range(20):
    dist.all_reduce(x)
