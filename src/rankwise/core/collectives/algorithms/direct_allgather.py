"""Direct all-gather: every rank sends its block to every other, the right-hand neighbour first."""

from rankwise.core.collectives.levels import Grid, grid_or_row
from rankwise.core.collectives.program import Program, Receive, Send, Task

COLLECTIVE = "all_gather"


def symmetry(task: Task) -> Grid | None:
    """All are alike."""
    return grid_or_row(task)


def program(task: Task) -> Program:
    """The program of one rank."""
    grid = grid_or_row(task)
    for distance in range(1, task.size):
        yield Send(grid.moved(task.rank, distance), task.block(task.rank))
    for distance in range(1, task.size):
        source = grid.moved(task.rank, grid.opposite(distance))
        yield Receive(source, task.block(source))
