"""Prints the least CPU time per all_reduce of 4 KiB, entered in the ledger and not, by turns.

With several ranks it is that of a rank's whole process, gloo's threads included.
"""

import sys
import time
from collections.abc import Callable

import rankwise

CALLS, TURNS = 200, 150


def cpu_seconds(call: Callable[[], object]) -> float:
    clock = time.thread_time if rankwise.world_size() == 1 else time.process_time
    begun_at = clock()
    for _ in range(CALLS):
        call()
    return (clock() - begun_at) / CALLS


def calls(library: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """The same operation, not entered and entered."""
    if library == "torch":
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        tensor = torch.ones(1024)
        entered = dist.all_reduce
        return lambda: entered.__wrapped__(tensor), lambda: entered(tensor)
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
    turns = [(cpu_seconds(plain), cpu_seconds(entered)) for _ in range(TURNS)]
    if rankwise.rank() == 0:
        print(min(turn[0] for turn in turns), min(turn[1] for turn in turns))


if __name__ == "__main__":
    main()
