"""The loader of rank 1 sleeps for longer than the others have patience."""
# /// culprit
# kind = "absence"
# blamed = [1]
# patience = 2
# says = "rank 1 has not come to all_reduce #3 (sum) of (4,) float32 ({call}), in which {others}: it is at {culprit}, in load"
# simulated = "sleeping is no waiting there, and time-outs of torch are no virtual time's"
# ///

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)


def load():
    print("now", flush=True)
    time.sleep(600)  # line: culprit


for step in range(5):
    if step == 2 and rank == 1:
        load()
    dist.all_reduce(x)  # line: call
