"""Counts steps and calls collectives until it is stopped; at first says what counting costs.

Prints the CPU time of a call of `should_stop`, in seconds, once per rank.
"""

import time

import numpy as np

import rankwise
from rankwise import collectives

CALLS = 20_000

rankwise.should_stop()
begun = time.thread_time()
for _ in range(CALLS):
    rankwise.should_stop()
print((time.thread_time() - begun) / CALLS, flush=True)

gradients = np.ones(1024, dtype=np.float32)
while not rankwise.should_stop():
    time.sleep(0.05)
    collectives.all_reduce(gradients)
