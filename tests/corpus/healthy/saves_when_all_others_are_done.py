"""Rank 0 saves the model when the groups are destroyed and the others have ended."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

dist.all_reduce(x)
dist.destroy_process_group()
if rank == 0:
    time.sleep(1.2)
