"""Direct gather: every rank sends its block to the root, which takes the nearest one first."""

from rankwise.core.collectives.program import Program, Receive, Send, Task

COLLECTIVE = "gather"


def program(task: Task) -> Program:
    """The program of one rank."""
    if task.rank != task.root:
        yield Send(task.root, task.block(task.rank))
        return
    for distance in range(1, task.size):
        source = (task.root + distance) % task.size
        yield Receive(source, task.block(source))
