"""Ranks have batches of different sizes, and pad them as they should."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

mine = torch.ones(rank + 1)
sizes = [torch.empty(1, dtype=torch.int64) for _ in range(3)]
dist.all_gather(sizes, torch.tensor([len(mine)]))
longest = int(max(sizes))
rows = [torch.empty(longest) for _ in range(3)]
dist.all_gather(rows, torch.nn.functional.pad(mine, (0, longest - len(mine))))
dist.all_to_all_single(torch.empty(3), torch.ones(3))
dist.barrier()
