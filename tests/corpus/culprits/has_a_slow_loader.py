"""Each batch takes rank 2 longer to load than the others."""
# /// culprit
# kind = "lateness"
# blamed = [2]
# tells = "rank 2 came last in "
# simulated = "lateness there is told of with --faults, in virtual time"
# ///

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)


def batches():
    for _ in range(30):
        time.sleep(0.08 if rank == 2 else 0.01)
        yield x


print("now", flush=True)
for batch in batches():
    dist.all_reduce(batch)
