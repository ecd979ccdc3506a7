"""What the workers of these tests do. Imported by them, so it imports next to nothing."""

import os
import signal
import sys
import threading
from collections.abc import Mapping


def greet(name: str) -> dict[str, object]:
    print(f"hello {name}")
    print(f"complaint of {name}", file=sys.stderr)
    return {"name": name, "greeting": os.environ.get("GREETING")}


def wait_for_ever() -> None:
    threading.Event().wait()


def raise_on(rank: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError(f"rank {rank} raises")
    wait_for_ever()


def exit_with(code: int) -> None:
    sys.exit(code)


def die_of(signum: int) -> None:
    os.kill(os.getpid(), signum)


def ten_megabytes() -> bytes:
    return b"x" * 10_000_000


def own_cpus() -> set[int]:
    return os.sched_getaffinity(0)


def rank_variables() -> Mapping[str, str | None]:
    return {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}


def ignore_sigterm_and_say_so(path: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(path, "w") as fifo:  # noqa: PTH123
        fifo.write("ready")
    wait_for_ever()
