"""A rank that imports torch, meets the others over gloo and sums once."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert int(tensor) == dist.get_world_size()
dist.destroy_process_group()
