"""A rank that fails at a moment it writes down; the others write down when they are told.

    failing.py DIRECTORY exit|kill

Every rank says in `started.<attempt>.<rank>` when its first line ran. In attempt 0, rank 2 waits
until it reads a line from the pipe `go`, notes the time in `failed` and dies; the others wait for
SIGTERM. In later attempts every rank ends at once.
"""

import os
import signal
import sys
import time

STARTED = time.monotonic_ns()
if os.environ.get("WITH_TORCH"):
    import torch.distributed

    assert torch.distributed.is_available()  # what is measured includes having it
    STARTED = time.monotonic_ns()


def note(name: str, value: int) -> None:
    path = os.path.join(sys.argv[1], name)
    with open(f"{path}.tmp", "w") as file:
        file.write(str(value))
    os.rename(f"{path}.tmp", path)


def on_sigterm(*_: object) -> None:
    note(f"told.{os.environ['RANK']}", time.monotonic_ns())
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, on_sigterm)
    rank, attempt = os.environ["RANK"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    note(f"started.{attempt}.{rank}", STARTED)
    if attempt != "0":
        return
    if rank != "2":
        while True:
            signal.pause()
    with open(os.path.join(sys.argv[1], "go")) as pipe:
        pipe.readline()
    note("failed", time.monotonic_ns())
    if sys.argv[2] == "exit":
        os._exit(1)
    os.kill(os.getpid(), signal.SIGKILL)


main()
