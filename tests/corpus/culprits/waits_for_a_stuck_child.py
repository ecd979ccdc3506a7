"""Rank 1 waits for a program that converts data and never ends."""
# /// culprit
# kind = "absence"
# blamed = [1]
# hang_timeout = 2
# says = "rank 1 has not come to barrier #1 ({call}), in which {others}"
# stands = "{culprit}"
# simulated = "there ranks are threads: what a stuck one has started would outlive the test"
# ///

import subprocess

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

if rank == 1:
    print("now", flush=True)
    subprocess.run(["sleep", "600"], check=True)  # line: culprit
collectives.barrier()  # line: call
