"""A child process of each rank computes for longer than the hang timeout."""
# /// healthy
# ranks = 2
# hang_timeout = 1.5
# ///

import subprocess
import sys

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

code = "import time; end = time.monotonic() + 2.2\nwhile time.monotonic() < end: pass"
subprocess.run([sys.executable, "-S", "-c", code], check=True)
collectives.barrier()
