"""The backward of rank 1 raises, in the middle of DDP's reductions."""
# /// culprit
# kind = "failure"
# blamed = [1]
# says = "rank 1 failed: ValueError: gradient of 1 is broken"
# ///

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)


def check(gradient):
    if rank == 1:
        print("now", flush=True)
        raise ValueError(f"gradient of {rank} is broken")
    return gradient


model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
output = model(torch.ones(1, 2))
output.register_hook(check)
output.sum().backward()
dist.barrier()
