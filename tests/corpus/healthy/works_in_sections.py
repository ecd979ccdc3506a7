"""Sections that sleep, for longer than the hang timeout."""
# /// healthy
# ranks = 2
# hang_timeout = 6
# ///

import time

import numpy as np

import rankwise

rank = rankwise.rank()
x = np.ones(4)

end = time.monotonic() + 7
while time.monotonic() < end:
    with rankwise.section("poll"):
        time.sleep(0.02)
