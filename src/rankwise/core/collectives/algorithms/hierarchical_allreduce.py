"""Hierarchical all-reduce: inside the smallest units, then between larger ones, and back.

Units are the levels of the network: ranks on one device, devices of a node, nodes. If all units of
a level have equally many ranks, a ring inside of each reduces part j to its j-th rank, rings of the
j-th ranks go on with it one level further out, and a ring all-reduces at the outermost level. Then
rings inside hand the parts round. So each level carries only what the levels inside have left.

Otherwise the ranks of an outermost unit add to its first rank one after the other, the first ranks
run a ring, and each gives its result to the ranks of its unit.

Order of reduction: inside the innermost units as `ring_reduce_scatter` does it (or x[first] +
x[second] + ... if units differ), then the levels further out, the last as `ring_allreduce` does it,
by devices; rounded to the dtype after each addition.
"""

from math import prod

from rankwise.core.collectives.levels import Grid, all_reduce_along, grid_of, ring_round, units_of
from rankwise.core.collectives.program import Program, Receive, Send, Span, Task

COLLECTIVE = "all_reduce"


def symmetry(task: Task) -> Grid | None:
    """That of the grid, if all parts are equally long."""
    grid = grid_of(task)
    return grid if grid is not None and not task.elements % prod(grid.lengths) else None


def program(task: Task) -> Program:
    """The program of one rank."""
    everything = Span(0, task.elements)
    grid = grid_of(task)
    if grid is not None:
        yield from all_reduce_along(grid, task.rank, range(len(grid.lengths)), everything)
        return
    units = units_of(task)
    first, *rest = next(unit for unit in units if task.rank in unit)
    if task.rank != first:
        yield Send(first, everything)
        yield Receive(first, everything)
        return
    for rank in rest:
        yield Receive(rank, everything, combines=True)
    firsts = [unit[0] for unit in units]
    yield from ring_round(firsts, firsts.index(first), everything)
    for rank in rest:
        yield Send(rank, everything)
