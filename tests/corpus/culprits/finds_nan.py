"""The loss of rank 2 is not a number."""
# /// culprit
# kind = "failure"
# blamed = [2]
# says = "rank 2 failed: FloatingPointError: the loss of step 2 is nan"
# ///

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

for step in range(4):
    loss = float("nan") if (rank, step) == (2, 2) else 1.0
    if loss != loss:
        print("now", flush=True)
        raise FloatingPointError(f"the loss of step {step} is {loss}")
    collectives.all_reduce(x)
