"""Rank 1 iterates until something converges, which it never does."""
# /// culprit
# kind = "absence"
# blamed = [1]
# patience = 2
# says = "rank 1 has not come to all_reduce #2 (sum) of (4,) float64 ({call}), in which {others}: it is at {culprit}"
# simulated = "computing takes no virtual time"
# two_nodes = true
# ///

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

collectives.all_reduce(x)
if rank == 1:
    print("now", flush=True)
    sum(1 for _ in iter(int, 1))  # line: culprit
collectives.all_reduce(x)  # line: call
