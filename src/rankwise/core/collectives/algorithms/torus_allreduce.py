"""Torus all-reduce: rings along each axis, in turn, with another part of the data on each.

The data are cut in as many pieces as the grid of ranks has axes. Piece i is reduced along axis i
first, then along the next ones, and gathered back the other way (`hierarchical_allreduce` with
another first axis). So the links of all axes are busy at a time. Ranks that do not fill a grid go
the way of `hierarchical_allreduce`.

Order of reduction: of each piece as `hierarchical_allreduce` has it, from another first axis.
"""

from collections.abc import Iterator
from itertools import zip_longest
from math import prod

from rankwise.core.collectives.algorithms import hierarchical_allreduce
from rankwise.core.collectives.levels import Grid, all_reduce_along, grid_of
from rankwise.core.collectives.program import Instruction, Program, Send, Span, Task, part_of

COLLECTIVE = "all_reduce"


def symmetry(task: Task) -> Grid | None:
    """That of the grid, if all parts of all pieces are equally long."""
    grid = grid_of(task)
    if grid is None or task.elements % (len(grid.lengths) * prod(grid.lengths)):
        return None
    return grid


def program(task: Task) -> Program:
    """The program of one rank."""
    grid = grid_of(task)
    if grid is None:
        yield from hierarchical_allreduce.program(task)
        return
    axes = list(range(len(grid.lengths)))
    everything = Span(0, task.elements)
    pieces = [
        all_reduce_along(
            grid, task.rank, axes[axis:] + axes[:axis], part_of(everything, axis, len(axes))
        )
        for axis in axes
    ]
    # All pieces go on together; in each step, what is sent leaves before anything is waited for.
    for step in zip_longest(*map(_steps, pieces), fillvalue=()):
        yield from sorted(
            (each for instructions in step for each in instructions),
            key=lambda each: not isinstance(each, Send),
        )


def _steps(piece: Iterator[Instruction]) -> Iterator[tuple[Instruction, Instruction]]:
    """The instructions of a ring, in pairs: a send, and a receive."""
    return zip(piece, piece, strict=True)
