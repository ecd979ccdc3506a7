"""A rank of a job on several nodes that writes down what happens to it.

    member.py DIRECTORY [end]

Notes in `started.<rank>.<pid>` when its first line ran; with `end` it is done then. Else it waits
for SIGTERM and notes that in `told.<rank>.<pid>`; and rank 1 fails when the pipe `go` lets it, if
there is one, which it notes in `failed`.
"""

import os
import signal
import sys
import time

STARTED = time.monotonic_ns()
DIRECTORY, RANK = sys.argv[1], os.environ["RANK"]


def note(name: str, instant: int) -> None:
    path = os.path.join(DIRECTORY, name)
    with open(f"{path}.tmp", "w") as file:
        file.write(f"{instant} {os.environ['WORLD_SIZE']}")
    os.rename(f"{path}.tmp", path)


def on_sigterm(*_: object) -> None:
    note(f"told.{RANK}.{os.getpid()}", time.monotonic_ns())
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, on_sigterm)
    note(f"started.{RANK}.{os.getpid()}", STARTED)
    if sys.argv[2:] == ["end"]:
        return
    if RANK == "1" and os.path.exists(os.path.join(DIRECTORY, "go")):
        with open(os.path.join(DIRECTORY, "go")) as pipe:
            pipe.readline()
        note("failed", time.monotonic_ns())
        os._exit(1)
    while True:
        signal.pause()


main()
