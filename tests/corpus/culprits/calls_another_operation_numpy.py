"""Rank 1 broadcasts where the others reduce."""
# /// culprit
# kind = "disagreement"
# blamed = [1]
# says = "call #3: rank 1 called broadcast from rank 0 of (4,) float64 ({culprit}), {others} called all_reduce (sum) of (4,) float64 ({call})"
# two_nodes = true
# of_two = "call #3: ranks 0 and 1 disagree: rank 0 called all_reduce (sum) of (4,) float64 ({call}), rank 1 called broadcast from rank 0 of (4,) float64 ({culprit})"
# ///

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

for step in range(2):
    collectives.all_reduce(x)
print("now", flush=True)
if rank == 1:
    collectives.broadcast(x, 0)  # line: culprit
else:
    collectives.all_reduce(x)  # line: call
