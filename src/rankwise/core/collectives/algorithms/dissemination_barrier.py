"""Dissemination barrier: everyone tells the ranks 1, 2, 4, ... further on that it has come.

After ceil(log2 n) such steps, a message of each rank has reached every other one, if indirectly.
"""

from rankwise.core.collectives.program import Program, Receive, Send, Span, Task

COLLECTIVE = "barrier"


def program(task: Task) -> Program:
    """The program of one rank."""
    token = Span(0, 1)
    distance = 1
    while distance < task.size:
        yield Send((task.rank + distance) % task.size, token)
        yield Receive((task.rank - distance) % task.size, token)
        distance *= 2
