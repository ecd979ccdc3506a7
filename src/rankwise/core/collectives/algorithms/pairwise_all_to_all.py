"""Pairwise all-to-all: one block after the other, each to another destination.

In step d every rank sends to the rank d places ahead, by axes as `direct_all_to_all`, and receives
from the one d places behind. A message is staged in two blocks of scratch, so two messages of a
rank are under way at most: they meet fewer others on the links, and need fewer buffers.
"""

from rankwise.core.collectives.levels import Grid, grid_or_row
from rankwise.core.collectives.program import Copy, Program, Receive, Send, Span, Task

COLLECTIVE = "all_to_all"


def symmetry(task: Task) -> Grid | None:
    """All are alike."""
    return grid_or_row(task)


def scratch_elements(task: Task) -> int:
    """Two blocks that are on their way."""
    return 2 * task.elements


def program(task: Task) -> Program:
    """The program of one rank."""
    result, grid = task.size * task.elements, grid_or_row(task)

    def arrived(source: int) -> Span:
        return Span(result + source * task.elements, result + (source + 1) * task.elements)

    yield Copy(task.block(task.rank), arrived(task.rank))
    for distance in range(1, task.size):
        target = grid.moved(task.rank, distance)
        source = grid.moved(task.rank, grid.opposite(distance))
        start = 2 * result + distance % 2 * task.elements
        staged = Span(start, start + task.elements)
        yield Copy(task.block(target), staged)
        yield Send(target, staged)
        yield Receive(source, arrived(source))
