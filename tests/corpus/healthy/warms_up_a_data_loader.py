"""Workers of a data loader prepare the first batch for longer than the hang timeout."""
# /// healthy
# ranks = 2
# hang_timeout = 1.5
# ///

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)


class Records(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        end = time.monotonic() + 2.2 * (index == 0)
        while time.monotonic() < end:
            pass
        return index


for _ in torch.utils.data.DataLoader(Records(), num_workers=1):
    dist.all_reduce(x)
