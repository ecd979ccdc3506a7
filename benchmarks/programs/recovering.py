"""Steps of a DDP model on gloo, one of whose ranks kills itself; tells when, and when all go on.

python recovering.py DIRECTORY recover|restart
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import rankwise

DIRECTORY = Path(sys.argv[1])
STEPS = 20


def note(name: str) -> None:
    (DIRECTORY / name).write_text(str(time.monotonic_ns()))


def train() -> None:
    rank, restarts = rankwise.rank(), rankwise.restart_count()
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        if step == 0:
            note(f"step.{restarts}.{rank}")
        if restarts == 0 and rank == 3 and step == STEPS // 2:
            note("killed")
            os.kill(os.getpid(), signal.SIGKILL)
    del model, optimizer
    dist.barrier()
    dist.destroy_process_group()


torch.set_num_threads(1)
if sys.argv[2] == "recover":
    rankwise.recover(train)
else:
    train()
