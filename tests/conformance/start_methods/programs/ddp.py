"""DDP: gradients and parameters after two steps."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    loss = model(torch.full((3, 4), float(rank + step))).square().mean()
    loss.backward()
    optimizer.step()
    print(rank, step, round(loss.item(), 6))
print(rank, [round(value, 6) for value in model.module.weight.flatten().tolist()])
print(rank, torch.get_num_threads(), torch.get_num_interop_threads(), torch.initial_seed())
dist.destroy_process_group()
