"""How many all_reduces of a few floats the ranks of torch.distributed do, printed by rank 0."""

import sys
import time

import torch
import torch.distributed as dist

count, elements = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
tensor = torch.ones(elements)
dist.all_reduce(tensor)
start = time.perf_counter()
for _ in range(count):
    dist.all_reduce(tensor)
took = time.perf_counter() - start
if dist.get_rank() == 0:
    print(dist.get_world_size() * count / took, took / count, flush=True)
dist.destroy_process_group()
