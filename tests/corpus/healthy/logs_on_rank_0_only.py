"""Rank 0 reduces, logs and sleeps between the steps of all; the root of a broadcast goes on."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

for step in range(10):
    dist.reduce(x, 0)
    if rank == 0:
        print(f"step {step}", flush=True)
    dist.broadcast(x, 0)
