"""A library of rank 1 ends the process, and tells nobody."""
# /// culprit
# kind = "failure"
# blamed = [1]
# says = "rank 1 exited with code 3"
# simulated = "os._exit ends the process that simulates"
# ///

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

dist.all_reduce(x)
if rank == 1:
    print("now", flush=True)
    os._exit(3)
dist.all_reduce(x)
