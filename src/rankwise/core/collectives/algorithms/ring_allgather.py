"""Ring all-gather: every block travels round the ring, n-1 hops, and each rank keeps a copy."""

from functools import partial

from rankwise.core.collectives import ring
from rankwise.core.collectives.program import Program, Span, Task

COLLECTIVE = "all_gather"


def rounds(task: Task) -> list[ring.RingRound]:
    """Each rank begins with its own block."""
    return [ring.RingRound(-step, combines=False) for step in range(task.size - 1)]


def part(task: Task, index: int) -> Span:
    """Where the block of the rank at a position lies."""
    return task.block(task.at(index))


def program(task: Task) -> Program:
    """What one rank of the ring does."""
    return ring.program(task, rounds(task), partial(part, task))
