"""Rank 1 forgets the barrier at the end of an epoch."""
# /// culprit
# kind = "disagreement"
# blamed = [1]
# says = "call #2: rank 1 called all_reduce (sum) of (4,) float64 ({culprit}), {others} called barrier ({call})"
# ///

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

for epoch in range(2):
    if rank == 1:
        print("now", flush=True)
    collectives.all_reduce(x)  # line: culprit
    if rank != 1:
        collectives.barrier()  # line: call
