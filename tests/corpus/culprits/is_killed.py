"""Rank 1 is killed, as by a kernel that is out of memory."""
# /// culprit
# kind = "failure"
# blamed = [1]
# says = "rank 1 was killed by SIGKILL"
# ///

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

dist.all_reduce(x)
if rank == 1:
    print("now", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(x)
