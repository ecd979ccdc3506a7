"""Rank 0 writes a checkpoint to a disk that is full."""
# /// culprit
# kind = "failure"
# blamed = [0]
# says = "rank 0 failed: OSError: [Errno 28] No space left on device"
# two_nodes = true
# ///

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

collectives.all_reduce(x)
if rank == 0:
    print("now", flush=True)
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(bytes(100))
collectives.barrier()
