"""Rank 1 takes itself for the root of a broadcast."""
# /// culprit
# kind = "disagreement"
# blamed = [1]
# says = "call #1: rank 1 called broadcast from rank 1 of (4,) float32 ({call}), {others} called broadcast from rank 0 of (4,) float32 ({call})"
# ///

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

print("now", flush=True)
dist.broadcast(x, 1 if rank == 1 else 0)  # line: call
dist.barrier()
