"""Rank 0 waits for its thread that writes a checkpoint slowly; the other one waits for rank 0."""
# /// healthy
# ranks = 2
# hang_timeout = 1.5
# ///

import tempfile
import threading
import time

import rankwise
from rankwise import collectives


def save() -> None:
    with tempfile.TemporaryFile(buffering=0) as file:
        for _ in range(14):
            file.write(bytes(128 << 10))
            time.sleep(0.2)


if rankwise.rank() == 0:
    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
collectives.barrier()
