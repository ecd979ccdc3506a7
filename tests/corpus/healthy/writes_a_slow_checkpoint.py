"""Rank 0 writes for longer than the hang timeout; the other waits at a barrier."""
# /// healthy
# ranks = 2
# hang_timeout = 1.5
# ///

import tempfile
import time

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

if rank == 0:
    with tempfile.TemporaryFile() as file:
        for _ in range(110):
            file.write(bytes(1 << 18))
            file.flush()
            file.seek(0)
            time.sleep(0.02)
collectives.barrier()
