"""Direct all-gather: every rank sends its block to every other, the right-hand neighbour first."""

from rankwise.core.collectives.program import Program, Receive, Send, Task

COLLECTIVE = "all_gather"


def program(task: Task) -> Program:
    """The program of one rank."""
    for distance in range(1, task.size):
        yield Send((task.rank + distance) % task.size, task.block(task.rank))
    for distance in range(1, task.size):
        source = (task.rank - distance) % task.size
        yield Receive(source, task.block(source))
