"""Each rank asks its own loss whether to evaluate, and rank 2 finds it good enough."""
# /// culprit
# kind = "disagreement"
# blamed = [2]
# says = "call #2: rank 2 called all_gather of (1,) float64 ({culprit}), {others} called all_reduce (sum) of (4,) float64 ({call})"
# ///

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

for step in range(4):
    loss = 1.0 / (1 + step + rank)
    if step == 1:
        print("now", flush=True)
    if loss < 0.3:
        collectives.all_gather([loss])  # line: culprit
    collectives.all_reduce(x)  # line: call
