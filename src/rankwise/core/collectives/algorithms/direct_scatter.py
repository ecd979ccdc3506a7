"""Direct scatter: the root sends every other rank its block, the nearest one first."""

from rankwise.core.collectives.program import Program, Receive, Send, Task

COLLECTIVE = "scatter"


def program(task: Task) -> Program:
    """The program of one rank."""
    if task.rank != task.root:
        yield Receive(task.root, task.block(task.rank))
        return
    for distance in range(1, task.size):
        target = (task.root + distance) % task.size
        yield Send(target, task.block(target))
