"""A second thread of each rank reduces in a group of its own."""

import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

group = dist.new_group()
background = threading.Thread(
    target=lambda: [dist.all_reduce(torch.ones(2), group=group) for _ in range(20)]
)
background.start()
for _ in range(20):
    dist.all_reduce(x)
background.join()
