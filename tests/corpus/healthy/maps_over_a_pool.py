"""Rank 0 has a pool of processes compute for longer than the hang timeout; the other one waits."""
# /// healthy
# ranks = 2
# hang_timeout = 1.5
# ///

import multiprocessing
import time

import rankwise
from rankwise import collectives


def tokenize(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


if rankwise.rank() == 0:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(tokenize, [2.2])
collectives.barrier()
