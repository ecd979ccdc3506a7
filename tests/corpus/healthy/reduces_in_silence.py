"""Small reductions for longer than the hang timeout, and nothing printed."""
# /// healthy
# ranks = 2
# hang_timeout = 1.5
# ///

import time

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

end = time.monotonic() + 2.2
while collectives.all_reduce(np.array([time.monotonic() < end]), "min")[0]:
    time.sleep(0.02)
