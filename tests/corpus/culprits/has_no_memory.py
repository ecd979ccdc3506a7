"""Rank 2 asks for more memory than it may have."""
# /// culprit
# kind = "failure"
# blamed = [2]
# says = "rank 2 failed: MemoryError"
# ///

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

collectives.all_reduce(x)
if rank == 2:
    print("now", flush=True)
    bytearray(1 << 60)
collectives.barrier()
