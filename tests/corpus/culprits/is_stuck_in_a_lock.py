"""Rank 2 takes a lock that it has already."""
# /// culprit
# kind = "absence"
# blamed = [2]
# hang_timeout = 2
# says = "rank 2 has not come to all_reduce #2 (sum) of (4,) float64 ({call}), in which {others}"
# stands = "{culprit}"
# ///

import threading

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

lock = threading.Lock()
collectives.all_reduce(x)
if rank == 2:
    print("now", flush=True)
    lock.acquire()
    lock.acquire()  # line: culprit
collectives.all_reduce(x)  # line: call
