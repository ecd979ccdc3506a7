"""FSDP2: parameters are gathered and gradients scattered by C++."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Linear(6, 3))
for layer in model:
    fully_shard(layer, mesh=init_device_mesh("cpu", (3,)))
fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
for _ in range(3):
    model(torch.ones(1, 3)).sum().backward()
del model  # or the last hold on the group is in C++, and torch may deadlock as the program ends
dist.destroy_process_group()
