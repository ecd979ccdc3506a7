"""Rank 1 waits for a message of rank 2, which has sent it to rank 0 and is done."""
# /// culprit
# kind = "departure"
# blamed = [2]
# says = "rank 2 was done after send of (4,) float32 to rank 0 ({culprit}), while rank 1 waits in recv of (4,) float32 from rank 2 ({call})"
# ///

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

if rank == 2:
    print("now", flush=True)
    dist.send(x, 0)  # line: culprit
elif rank == 1:
    dist.recv(x, 2)  # line: call
else:
    dist.recv(x, 2)
