"""Ring all-gather: every block travels round the ring, n-1 hops, and each rank keeps a copy."""

from rankwise.core.collectives.program import Program, Receive, Send, Task

COLLECTIVE = "all_gather"


def program(task: Task) -> Program:
    """What one rank of the ring does."""
    here = task.position
    left, right = task.at(here - 1), task.at(here + 1)
    for step in range(task.size - 1):
        yield Send(right, task.block(task.at(here - step)))
        yield Receive(left, task.block(task.at(here - step - 1)))
