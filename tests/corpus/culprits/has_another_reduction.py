"""Rank 2 takes the maximum where the others add up."""
# /// culprit
# kind = "disagreement"
# blamed = [2]
# says = "call #1: rank 2 called all_reduce (max) of (4,) float64 ({call}), {others} called all_reduce (sum) of (4,) float64 ({call})"
# ///

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

print("now", flush=True)
collectives.all_reduce(x, "max" if rank == 2 else "sum")  # line: call
