"""Rank 1 matches a pattern that takes for ever, in C, and lets no other thread run."""
# /// culprit
# kind = "absence"
# blamed = [1]
# patience = 2
# says = "rank 1 has not come to all_reduce #2 (sum) of (4,) float32 ({call}), in which {others}: it is at {culprit}"
# simulated = "who holds the interpreter holds all simulated ranks"
# ///

import os
import re
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

dist.all_reduce(x)
if rank == 1:
    print("now", flush=True)
    re.match("(a|a)*$", "a" * 100 + "b")  # line: culprit
dist.all_reduce(x)  # line: call
