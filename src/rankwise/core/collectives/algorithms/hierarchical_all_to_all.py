"""Hierarchical all-to-all: along one axis of the network after the other, from the inside out.

Along an axis, a rank sends to each of its line all blocks whose destinations have the place of that
one on the axis, as one message. Then it has the blocks of the whole line for those destinations
that have its own place. So few large messages go over the outer levels: with 32 nodes of 8 devices,
31 of 8 blocks instead of 248 of one. The blocks of a message are copied together before, block by
block. Ranks on one axis, or that fill no grid, send directly.
"""

from collections.abc import Iterator
from itertools import product
from math import prod

from rankwise.core.collectives.algorithms import direct_all_to_all
from rankwise.core.collectives.levels import Grid, grid_or_row
from rankwise.core.collectives.program import Copy, Program, Receive, Send, Span, Task

COLLECTIVE = "all_to_all"


def symmetry(task: Task) -> Grid | None:
    """All are alike."""
    return grid_or_row(task)


def scratch_elements(task: Task) -> int:
    """All blocks as they are sent, and as they are received."""
    return 2 * task.size * task.elements


def program(task: Task) -> Program:
    """The program of one rank."""
    grid, elements, size = grid_or_row(task), task.elements, task.size
    if len(grid.lengths) == 1:
        yield from direct_all_to_all.program(task)
        return
    result, packed, received = (size * elements * number for number in (1, 2, 3))
    is_in_order = list(grid.ranks) == sorted(grid.ranks)
    lengths = grid.lengths
    own = _digits(grid, grid.places[task.rank])

    def blocks(start: int, first: int, count: int = 1) -> Span:
        return Span(start + first * elements, start + (first + count) * elements)

    order: tuple[int, ...] | None = None
    """Which axes the places of blocks in `received` count, the slowest first; None at first."""
    for axis, length in enumerate(lengths):
        line, here = grid.along(task.rank, axis)
        behind = order
        # This axis counts slowest, so that what goes to one rank of the line lies together.
        order = (axis, *(other for other in reversed(range(len(lengths))) if other != axis))
        count = size // length
        # At last, places are those of the result.
        into = result if is_in_order and axis + 1 == len(lengths) else received
        for ahead in range(length):
            there = (here + ahead) % length
            for digits in _from(own, lengths, axis, there):
                if behind is None:
                    source = task.block(grid.ranks[_place(digits, lengths)])
                else:
                    source = blocks(received, _counted(digits, lengths, behind))
                yield Copy(source, blocks(packed, _counted(digits, lengths, order)))
            if ahead:  # a rank's own blocks need no message
                yield Send(line[there], blocks(packed, there * count, count))
        yield Copy(blocks(packed, here * count, count), blocks(into, here * count, count))
        for ahead in range(1, length):
            there = (here - ahead) % length
            yield Receive(line[there], blocks(into, there * count, count))
    if is_in_order:
        return
    # Now the places of blocks count where they are from.
    assert order is not None, "a grid has an axis"
    for digits in _from(own, lengths):
        source_rank = grid.ranks[_place(digits, lengths)]
        yield Copy(blocks(received, _counted(digits, lengths, order)), blocks(result, source_rank))


def _digits(grid: Grid, place: int) -> tuple[int, ...]:
    found = []
    for length in grid.lengths:
        place, digit = divmod(place, length)
        found.append(digit)
    return tuple(found)


def _from(
    own: tuple[int, ...], lengths: tuple[int, ...], axis: int = -1, fixed: int = 0
) -> Iterator[tuple[int, ...]]:
    """All places, beginning at our own, so that all ranks do alike; on one axis a fixed one."""
    rows = [
        [fixed] if number == axis else [(first + ahead) % length for ahead in range(length)]
        for number, (first, length) in enumerate(zip(own, lengths, strict=True))
    ]
    return product(*rows)


def _place(digits: tuple[int, ...], lengths: tuple[int, ...]) -> int:
    return sum(digit * prod(lengths[:axis]) for axis, digit in enumerate(digits))


def _counted(digits: tuple[int, ...], lengths: tuple[int, ...], order: tuple[int, ...]) -> int:
    """The place of a block where axes count in an order, the slowest first."""
    number = 0
    for axis in order:
        number = number * lengths[axis] + digits[axis]
    return number
