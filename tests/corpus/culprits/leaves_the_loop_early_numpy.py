"""Rank 1 has one batch less than the others."""
# /// culprit
# kind = "departure"
# blamed = [1]
# says = "rank 1 was done after all_reduce #4 (sum) of (4,) float64 ({call}), while {others} in all_reduce #5 (sum) of (4,) float64 ({call})"
# two_nodes = true
# ///

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

for batch in range(5 - (rank == 1)):
    if batch == 4:
        print("now", flush=True)
    collectives.all_reduce(x)  # line: call
