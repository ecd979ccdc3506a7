"""Direct all-to-all: every rank sends each block to its destination, the nearest first."""

from rankwise.core.collectives.program import Copy, Program, Receive, Send, Span, Task

COLLECTIVE = "all_to_all"


def program(task: Task) -> Program:
    """The program of one rank."""
    result = task.size * task.elements

    def arrived(source: int) -> Span:
        return Span(result + source * task.elements, result + (source + 1) * task.elements)

    yield Copy(task.block(task.rank), arrived(task.rank))
    for distance in range(1, task.size):
        target = (task.rank + distance) % task.size
        yield Send(target, task.block(target))
    for distance in range(1, task.size):
        source = (task.rank - distance) % task.size
        yield Receive(source, arrived(source))
