"""Ring reduce-scatter: every block travels round the ring and is added to at each rank.

Order of reduction, by positions on the ring: the block of the rank at position p is
((x[p+1] + x[p+2]) + ...) + x[p], rounded to the dtype after each addition.
"""

from functools import partial

from rankwise.core.collectives import ring
from rankwise.core.collectives.program import Program, Span, Task

COLLECTIVE = "reduce_scatter"


def rounds(task: Task) -> list[ring.RingRound]:
    """Each rank begins with the block of the rank before it, which comes home last."""
    return [ring.RingRound(-step - 1, combines=True) for step in range(task.size - 1)]


def part(task: Task, index: int) -> Span:
    """Where the block of the rank at a position lies."""
    return task.block(task.at(index))


def program(task: Task) -> Program:
    """What one rank of the ring does."""
    return ring.program(task, rounds(task), partial(part, task))
