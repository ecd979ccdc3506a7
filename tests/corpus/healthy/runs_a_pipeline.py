"""Three stages of a pipeline, the middle one slow; messages go forth and back."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

for batch in range(4):
    if rank:
        dist.recv(x, rank - 1)
    time.sleep(0.3 * (rank == 1))
    if rank < 2:
        dist.send(x, rank + 1)
for batch in range(4):
    if rank < 2:
        dist.recv(x, rank + 1)
    if rank:
        dist.send(x, rank - 1)
