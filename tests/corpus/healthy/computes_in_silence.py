"""Both ranks compute for longer than the hang timeout, and print nothing."""
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
while time.monotonic() < end:
    x = np.sin(x)
collectives.all_reduce(x)
