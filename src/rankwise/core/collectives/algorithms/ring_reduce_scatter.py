"""Ring reduce-scatter: every block travels round the ring and is added to at each rank.

Order of reduction, by positions on the ring: the block of the rank at position p is
((x[p+1] + x[p+2]) + ...) + x[p], rounded to the dtype after each addition.
"""

from rankwise.core.collectives.program import Program, Receive, Send, Task

COLLECTIVE = "reduce_scatter"


def program(task: Task) -> Program:
    """What one rank of the ring does."""
    here = task.position
    left, right = task.at(here - 1), task.at(here + 1)
    for step in range(task.size - 1):
        yield Send(right, task.block(task.at(here - step - 1)))
        yield Receive(left, task.block(task.at(here - step - 2)), combines=True)
