"""DDP, with gradients that are accumulated over two batches."""

import os
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for step in range(6):
    with nullcontext() if step % 2 else model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
del model  # or the last hold on the group is in C++, and torch may deadlock as the program ends
dist.destroy_process_group()
