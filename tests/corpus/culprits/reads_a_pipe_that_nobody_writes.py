"""Rank 0 reads commands from a pipe whose other end is its own."""
# /// culprit
# kind = "absence"
# blamed = [0]
# hang_timeout = 2
# says = "rank 0 has not come to barrier #1 ({call}), in which {others}"
# stands = "{culprit}"
# there = "rank 0 has let no other rank run for 2 s"
# two_nodes = true
# ///

import os

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

if rank == 0:
    source, _ = os.pipe()
    print("now", flush=True)
    os.read(source, 1)  # line: culprit
collectives.barrier()  # line: call
