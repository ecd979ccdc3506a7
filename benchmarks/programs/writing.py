"""A rank that writes lines: `writing.py COUNT`, or `writing.py stamps COUNT`, now and then one."""

import os
import sys
import time

rank = os.environ["RANK"]
if sys.argv[1] == "stamps":
    for number in range(int(sys.argv[2])):
        time.sleep(0.02)
        print(f"S{rank} {number} {time.monotonic_ns()}", flush=True)
else:
    out = open(1, "w", buffering=1 << 16, closefd=False)
    filling = "x" * (100 - len(f"L{rank} 0000000  E\n"))
    for number in range(int(sys.argv[1])):
        out.write(f"L{rank} {number:07d} {filling} E\n")
    out.flush()
