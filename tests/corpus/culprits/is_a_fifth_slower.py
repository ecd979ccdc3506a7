"""Rank 1 takes a fifth longer for each step than the others."""
# /// culprit
# kind = "lateness"
# blamed = [1]
# tells = "rank 1 came last in "
# simulated = "lateness there is told of with --faults, in virtual time"
# ///

import time

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

print("now", flush=True)
for step in range(32):
    time.sleep(0.2 * (1.2 if rank == 1 else 1))
    collectives.all_reduce(x)
