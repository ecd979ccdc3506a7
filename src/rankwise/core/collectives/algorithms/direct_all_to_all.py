"""Direct all-to-all: every rank sends each block to its destination, the nearest first.

In a grid of ranks, near is by axes, from the inside out: at each place of the order, the
destinations of all ranks are different.
"""

from rankwise.core.collectives.levels import Grid, grid_or_row
from rankwise.core.collectives.program import Copy, Program, Receive, Send, Span, Task

COLLECTIVE = "all_to_all"


def symmetry(task: Task) -> Grid | None:
    """All are alike."""
    return grid_or_row(task)


def program(task: Task) -> Program:
    """The program of one rank."""
    result, grid = task.size * task.elements, grid_or_row(task)

    def arrived(source: int) -> Span:
        return Span(result + source * task.elements, result + (source + 1) * task.elements)

    yield Copy(task.block(task.rank), arrived(task.rank))
    for distance in range(1, task.size):
        target = grid.moved(task.rank, distance)
        yield Send(target, task.block(target))
    for distance in range(1, task.size):
        source = grid.moved(task.rank, grid.opposite(distance))
        yield Receive(source, arrived(source))
