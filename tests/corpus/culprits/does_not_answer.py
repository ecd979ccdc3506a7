"""Rank 0 waits for a message of rank 1, which waits for its queue."""
# /// culprit
# kind = "absence"
# blamed = [1]
# patience = 2
# says = "rank 1 has not answered rank 0 in recv of (4,) float32 from rank 1 ({call}): it is at {culprit}"
# simulated = "sleeping is no waiting there, and time-outs of torch are no virtual time's"
# ///

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

if rank == 0:
    dist.recv(x, 1)  # line: call
elif rank == 1:
    print("now", flush=True)
    time.sleep(600)  # line: culprit
