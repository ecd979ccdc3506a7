"""One rank is slow and all wait for it: measure each rank's own work, apart from the waiting."""

import time

import numpy as np

import rankwise
from rankwise import collectives

work_s = 0.0
for _ in range(20):
    begun = time.perf_counter()
    time.sleep(0.02 if rankwise.rank() == 3 else 0.002)  # the step; rank 3 has a slow disk
    work_s += time.perf_counter() - begun
    collectives.barrier()  # here the others wait, and a timer around the whole loop sees no rank

per_rank = collectives.all_gather(np.array([work_s]))[:, 0]
if rankwise.rank() == 0:
    slowest, usual = int(per_rank.argmax()), float(np.median(per_rank))
    for rank, seconds in enumerate(per_rank):
        print(f"rank {rank}: {1000 * seconds / 20:6.1f} ms of work in each step")
    print(f"slowest: rank {slowest}, {per_rank[slowest] / usual:.0f} x the median")
