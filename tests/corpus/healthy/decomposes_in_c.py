"""Rank 0 is in one call of LAPACK for longer than the hang timeout; the other one waits."""
# /// healthy
# ranks = 2
# hang_timeout = 1.5
# ///

import time

import numpy as np

import rankwise
from rankwise import collectives

if rankwise.rank() == 0:
    end, size = time.monotonic() + 2.2, 400
    while time.monotonic() < end:
        np.linalg.svd(np.random.default_rng(0).random((size, size)))
        size += 200
collectives.barrier()
