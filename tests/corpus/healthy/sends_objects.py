"""Objects of different sizes are gathered, broadcast and scattered."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

gathered = [None] * 3
dist.all_gather_object(gathered, "x" * 100 * rank)
objects = [{"step": 7}, "y" * 1000] if rank == 0 else [None, None]
dist.broadcast_object_list(objects, 0)
mine = [None]
dist.scatter_object_list(mine, ["a", "bb", "ccc"] if rank == 0 else None, 0)
assert mine[0] == "abc"[rank] * (rank + 1)
dist.monitored_barrier()
