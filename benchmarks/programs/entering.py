"""Prints what an all_reduce of 4 KiB takes, entered in the ledger and not, by turns.

Four figures: the least CPU time and the median wall time per call, not entered, then entered. With
several ranks it is the CPU time of a rank's whole process, gloo's threads included. Where the run
has no ledger, all calls are of the same kind.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import rankwise

CALLS = 200


class Took(NamedTuple):
    """Seconds per call."""

    cpu: float
    wall: float


def taken(call: Callable[[], object]) -> Took:
    clock = time.thread_time if rankwise.world_size() == 1 else time.process_time
    wall_at, begun_at = time.perf_counter(), clock()
    for _ in range(CALLS):
        call()
    return Took((clock() - begun_at) / CALLS, (time.perf_counter() - wall_at) / CALLS)


def calls(library: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """The same operation, not entered and entered."""
    if library == "torch":
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        tensor = torch.ones(1024)
        entered = dist.all_reduce
        # Torch wraps its functions as well.
        is_entered = "torch_calls" in entered.__code__.co_filename
        plain_one = entered.__wrapped__ if is_entered else entered
        return lambda: plain_one(tensor), lambda: entered(tensor)
    import numpy as np

    from rankwise.collectives.default import default_communicator

    array, communicator = np.ones(1024, np.float32), default_communicator()
    entries = communicator._entries  # noqa: SLF001  # there is no other way to compare

    def plain() -> None:
        communicator._entries = None  # noqa: SLF001  # the same
        communicator.all_reduce(array, out=array)

    def with_entry() -> None:
        communicator._entries = entries  # noqa: SLF001  # the same
        communicator.all_reduce(array, out=array)

    return plain, with_entry


def main() -> None:
    plain, entered = calls(sys.argv[1])
    turns = [(taken(plain), taken(entered)) for _ in range(int(sys.argv[2]))]
    if rankwise.rank() == 0:
        for kind in zip(*turns, strict=True):
            print(min(took.cpu for took in kind), statistics.median(took.wall for took in kind))


if __name__ == "__main__":
    main()
