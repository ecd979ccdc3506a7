"""Direct reduce-scatter: every rank sends each block to its owner, who adds them up.

Order of reduction: x[0] + x[1] + ... + x[n-1], by ranks, accumulated in f32 and rounded to the
dtype once.
"""

from rankwise.core.collectives.levels import Grid, grid_or_row
from rankwise.core.collectives.program import Fold, Program, Receive, Send, Span, Task

COLLECTIVE = "reduce_scatter"


def scratch_elements(task: Task) -> int:
    """A block from each rank; that of the rank itself stays unused."""
    return task.size * task.elements


def symmetry(task: Task) -> Grid | None:
    """All are alike."""
    return grid_or_row(task)


def program(task: Task) -> Program:
    """The program of one rank."""
    grid = grid_or_row(task)
    staged = task.size * task.elements
    mine = task.block(task.rank)
    contribution = [
        Span(staged + task.block(rank).start, staged + task.block(rank).stop)
        for rank in range(task.size)
    ]
    contribution[task.rank] = mine
    for distance in range(1, task.size):
        owner = grid.moved(task.rank, distance)
        yield Send(owner, task.block(owner))
    for distance in range(1, task.size):
        source = grid.moved(task.rank, grid.opposite(distance))
        yield Receive(source, contribution[source])
    yield Fold(tuple(contribution), mine)
