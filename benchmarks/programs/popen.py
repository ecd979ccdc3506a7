"""N plain processes, started one after another and waited for: what no launcher can beat."""

import os
import subprocess
import sys

count, script = int(sys.argv[1]), sys.argv[2]
workers = [
    subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(count)},
        start_new_session=True,
    )
    for rank in range(count)
]
sys.exit(max(worker.wait() for worker in workers))
