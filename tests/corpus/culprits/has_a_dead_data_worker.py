"""A worker of rank 1's data loader is killed."""
# /// culprit
# kind = "failure"
# blamed = [1]
# says = "rank 1 failed: RuntimeError: DataLoader worker (pid"
# simulated = "workers of a data loader are real processes"
# ///

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)


class Records(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if (rank, index) == (1, 2):
            print("now", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return index


# One record at a time: while another one is on its way, its connection may break first.
for _ in torch.utils.data.DataLoader(Records(), num_workers=1, prefetch_factor=1):
    dist.all_reduce(x)
