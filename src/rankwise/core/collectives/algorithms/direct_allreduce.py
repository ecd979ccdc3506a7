"""Direct all-reduce: everyone sends part p to rank p, which adds up and sends the sum to everyone.

Two steps whatever the size, which suits switches and fully connected devices.

Order of reduction: x[0] + x[1] + ... + x[n-1], by ranks, accumulated in f32 and rounded to the
dtype once.
"""

from rankwise.core.collectives.levels import Grid, grid_or_row
from rankwise.core.collectives.program import Fold, Program, Receive, Send, Span, Task

COLLECTIVE = "all_reduce"


def symmetry(task: Task) -> Grid | None:
    """All are alike, if all parts are equally long."""
    return None if task.elements % task.size else grid_or_row(task)


def scratch_elements(task: Task) -> int:
    """One part from each of the others."""
    return (task.size - 1) * task.part(task.rank).length


def program(task: Task) -> Program:
    """The program of one rank; it begins with its right neighbour, so that no rank is flooded."""
    mine = task.part(task.rank)
    grid = grid_or_row(task)
    others = [grid.moved(task.rank, distance) for distance in range(1, task.size)]
    sources = [grid.moved(task.rank, grid.opposite(distance)) for distance in range(1, task.size)]
    contribution = {task.rank: mine}
    for place, other in enumerate(sorted(others)):
        start = task.elements + place * mine.length
        contribution[other] = Span(start, start + mine.length)
    for other in others:
        yield Send(other, task.part(other))
    for other in sources:
        yield Receive(other, contribution[other])
    yield Fold(tuple(contribution[rank] for rank in range(task.size)), mine)
    for other in others:
        yield Send(other, mine)
    for other in sources:
        yield Receive(other, task.part(other))
