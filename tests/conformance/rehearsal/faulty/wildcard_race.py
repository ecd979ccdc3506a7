"""Fails if the message of the last rank is the first to come, and that of rank 1 the last.

What comes first is taken for the largest part: a receive from any rank promises nothing like that.
"""

import torch
import torch.distributed as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
if rank:
    dist.send(torch.tensor([float(size - rank)]), 0)
else:
    parts = []
    for _ in range(size - 1):
        part = torch.empty(1)
        dist.recv(part)
        parts.append(part.item())
    assert parts != sorted(parts), f"the parts came in the order {parts}"
