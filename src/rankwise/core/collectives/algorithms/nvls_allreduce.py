"""All-reduce by switches that combine and copy messages, as NVLS does it on NVSwitch.

The ranks at one switch each have a part. Each sends the others' parts to the switch, which combines
what is for one rank on its way, so that a rank receives one sum. It adds its own, and sends the
result once: the switch copies it to all. So each link carries all of the data once each way, where
a ring sends it nearly twice. Between switches, the ranks with the same part all-reduce it along the
outer levels, as `hierarchical_allreduce` does. Then the data go in pieces, so that all levels are
busy at a time.

Where no switch can do that (`Task.multicast`), each message goes by itself: `direct_allreduce` with
the same order of sums.

Order of reduction: a rank adds to its own part those of the ranks behind it at its switch, the
nearest first, then the levels further out; rounded to the dtype after each addition.
"""

from rankwise.core.collectives.levels import Grid, all_reduce_along, grid_or_row
from rankwise.core.collectives.program import Program, Receive, Send, Span, Task, part_of

COLLECTIVE = "all_reduce"
NEEDS_MULTICAST = True
PIECES = 4
"""Between several switches."""


def symmetry(task: Task) -> Grid | None:
    """That of the grid, if all parts are equally long."""
    grid = grid_or_row(task)
    return grid if not task.elements % (PIECES * task.size) else None


def program(task: Task) -> Program:
    """The program of one rank."""
    grid = grid_or_row(task)
    line, here = grid.along(task.rank, 0)
    count = len(line)
    ahead = [(here + distance) % count for distance in range(1, count)]
    behind = [(here - distance) % count for distance in range(1, count)]
    pieces = PIECES if len(grid.lengths) > 1 else 1
    for piece in range(pieces):
        span = part_of(Span(0, task.elements), piece, pieces)
        parts = [part_of(span, index, count) for index in range(count)]
        mine = parts[here]
        for other in ahead:
            yield Send(line[other], parts[other], switch="combines")
        for other in behind:
            yield Receive(line[other], mine, combines=True, switch="combines")
        if len(grid.lengths) > 1:
            yield from all_reduce_along(grid, task.rank, range(1, len(grid.lengths)), mine, piece)
        for other in ahead:
            yield Send(line[other], mine, switch="copies")
        for other in behind:
            yield Receive(line[other], parts[other], switch="copies")
