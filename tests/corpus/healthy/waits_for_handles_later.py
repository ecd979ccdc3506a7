"""Reductions overlap with computing, and are waited for in another order."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

for _ in range(10):
    handles = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(4)]
    time.sleep(0.01 * rank)
    for handle in reversed(handles):
        handle.wait()
