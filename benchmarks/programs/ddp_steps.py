"""Steps of DistributedDataParallel on a small network: `SCRIPT STEPS [alone]`; rank 0 tells."""

import resource
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

steps, is_alone = int(sys.argv[1]), sys.argv[2:] == ["alone"]
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
if not is_alone:
    dist.init_process_group("gloo")
    network = DistributedDataParallel(network)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
start = time.perf_counter()
for _ in range(steps):
    loss = nn.functional.cross_entropy(network(torch.randn(8, 64)), torch.zeros(8).long())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if is_alone or dist.get_rank() == 0:
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print((time.perf_counter() - start) / steps, kibibytes, flush=True)
