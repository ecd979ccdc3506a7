"""Each rank has a shell start what computes in the background, and looks now and then."""
# /// healthy
# ranks = 2
# hang_timeout = 1.5
# ///

import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

from rankwise import collectives

code = """
import sys, time
end = time.monotonic() + 2.2
while time.monotonic() < end: pass
open(sys.argv[1], "x")
"""
with tempfile.TemporaryDirectory() as directory:
    done = Path(directory, "done")
    os.system(shlex.join([sys.executable, "-S", "-c", code, str(done)]) + " &")
    while not done.exists():
        time.sleep(0.2)
collectives.barrier()
