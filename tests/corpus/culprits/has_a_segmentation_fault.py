"""Rank 0 reads address 0."""
# /// culprit
# kind = "failure"
# blamed = [0]
# says = "rank 0 was killed by SIGSEGV"
# stands = "{culprit}"
# simulated = "a segmentation fault ends the process that simulates"
# two_nodes = true
# ///

import ctypes

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

collectives.all_reduce(x)
if rank == 0:
    print("now", flush=True)
    ctypes.string_at(0)  # line: culprit
collectives.all_reduce(x)
