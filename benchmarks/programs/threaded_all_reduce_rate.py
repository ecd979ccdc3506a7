"""The same, in the threaded process group with which torch tests itself.

`SCRIPT RANKS COUNT [pinned]`: pinned, its threads stay on one core, as simulated ranks do.
"""

# ruff: noqa: SLF001, FBT003  # there is no public way to it

import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

ranks, count = int(sys.argv[1]), int(sys.argv[2])
if "pinned" in sys.argv:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
torch._C._distributed_c10d._set_thread_isolation_mode(True)  # its signature
threaded._install_threaded_pg()
store = dist.HashStore()
took = [0.0]


def run(rank: int) -> None:
    dist.init_process_group(backend="threaded", rank=rank, world_size=ranks, store=store)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    start = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(tensor)
    if rank == 0:
        took[0] = time.perf_counter() - start


threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(ranks * count / took[0], took[0] / count, flush=True)
