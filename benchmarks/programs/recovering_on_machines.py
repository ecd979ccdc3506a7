"""Steps until the job is stopped; each rank tells when it has done the first of a call.

python recovering_on_machines.py numpy|torch recover|restart
"""

import os
import sys
import time
from collections.abc import Iterator

import rankwise


def numpy_steps() -> Iterator[None]:
    import numpy as np

    from rankwise import collectives

    while not rankwise.should_stop():
        collectives.all_reduce(np.ones(64))
        yield


def torch_steps() -> Iterator[None]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    while not rankwise.should_stop():
        model(torch.ones(4, 64)).sum().backward()
        yield
    dist.destroy_process_group()


def train() -> None:
    for number, _ in enumerate({"numpy": numpy_steps, "torch": torch_steps}[sys.argv[1]]()):
        if number == 0:
            print(f"first step {os.getpid()} {time.monotonic_ns()}.", flush=True)


if sys.argv[2] == "recover":
    rankwise.recover(train)
else:
    train()
