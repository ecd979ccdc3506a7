"""Rank 2 computes in float64."""
# /// culprit
# kind = "disagreement"
# blamed = [2]
# says = "call #1: rank 2 called all_reduce (sum) of (4,) float64 ({call}), {others} called all_reduce (sum) of (4,) float32 ({call})"
# ///

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

print("now", flush=True)
dist.all_reduce(x.double() if rank == 2 else x)  # line: call
dist.barrier()
