"""Two stages of a pipeline both receive before they send."""
# /// culprit
# kind = "circle"
# ranks = 2
# blamed = [0, 1]
# says = "ranks wait for each other: rank 0 in recv of (4,) float32 from rank 1 ({call}) for rank 1; rank 1 in recv of (4,) float32 from rank 0 ({call}) for rank 0"
# ///

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

print("now", flush=True)
dist.recv(x, 1 - rank)  # line: call
dist.send(x, 1 - rank)
