"""Where ranks are in a network of levels: who is close to whom, and along which axes.

`Task.axes` says how many devices are in a unit of each level, from the inside out; the axes of a
torus are levels of their own. Ranks on one device are a level inside of all of them.

A *grid* of ranks has as many ranks along each axis, whatever their places on the others. Algorithms
go along its axes. Ranks that do not fill a grid have units of different sizes.

Most algorithms treat all ranks alike: if each rank is moved by as much along the axes of a grid,
programs become each other, but for where in the workspace their spans lie. A module says so by a
function `symmetry(task)` that returns this grid, or None if spans would have different lengths.
Then one program tells all of them: there is no need to write those of 4,096 ranks.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from rankwise.core.collectives.program import Program, Receive, Send, Span, Task, part_of


class Grid(NamedTuple):
    """Ranks along axes, the innermost first.

    Attributes:
        lengths: how many ranks there are along each axis; 2 or more.
        ranks: of all places, the innermost axis varying fastest.
        places: for each rank, where in `ranks` it is.
    """

    lengths: tuple[int, ...]
    ranks: tuple[int, ...]
    places: tuple[int, ...]

    def along(self, rank: int, axis: int) -> tuple[list[int], int]:
        """The ranks on a line along an axis, in order, and where on it a rank is."""
        stride = prod(self.lengths[:axis])
        place = self.places[rank]
        here = place // stride % self.lengths[axis]
        first = place - here * stride
        return [self.ranks[first + step * stride] for step in range(self.lengths[axis])], here

    def moved(self, rank: int, by: int) -> int:
        """The rank that is as far from a rank, along each axis, as place `by` is from place 0."""
        place, stride, moved = self.places[rank], 1, 0
        for length in self.lengths:
            moved += (place // stride + by // stride) % length * stride
            stride *= length
        return self.ranks[moved]

    def opposite(self, place: int) -> int:
        """The place that is as far from place 0 the other way along each axis."""
        stride, found = 1, 0
        for length in self.lengths:
            found += -(place // stride) % length * stride
            stride *= length
        return found


def grid_of(task: Task) -> Grid | None:
    """The grid that the ranks of a task fill; None if they do not."""
    return grid_of_homes(task.homes or tuple(range(task.size)), task.axes)


def grid_or_row(task: Task) -> Grid:
    """The grid that the ranks of a task fill; if they do not, all of them in a row."""
    return grid_of(task) or row_of(task.size)


@lru_cache(maxsize=64)
def row_of(count: int) -> Grid:
    """So many ranks along one axis."""
    return Grid((count,), tuple(range(count)), tuple(range(count)))


def halves_of(task: Task) -> Grid | None:
    """The ranks along axes of two, if they are a power of two: for exchanges with partners."""
    if task.size & (task.size - 1):
        return None
    ranks = tuple(range(task.size))
    return Grid((2,) * (task.size.bit_length() - 1) or (1,), ranks, ranks)


@lru_cache(maxsize=64)
def grid_of_homes(devices: tuple[int, ...], axes: tuple[int, ...]) -> Grid | None:
    """The grid that ranks on such devices fill; None if they do not."""
    size = len(devices)
    ranks = sorted(range(size), key=lambda rank: (devices[rank], rank))
    lengths: list[int] = []
    # A unit is known by its number; `inside` counts its parts that have ranks.
    units: list[Sequence[int]] = [range(size), devices]
    units += [[device // unit for device in devices] for unit in axes]
    for parts, wholes in pairwise(units):
        inside: dict[int, set[int]] = {}
        for rank in ranks:
            inside.setdefault(wholes[rank], set()).add(parts[rank])
        counts = {len(each) for each in inside.values()}
        if len(counts) != 1:
            return None
        lengths += [count for count in counts if count > 1]
    outermost = len(set(units[-1]))
    if outermost > 1:  # devices beyond what the axes tell of
        lengths.append(outermost)
    places = [0] * size
    for place, rank in enumerate(ranks):
        places[rank] = place
    return Grid(tuple(lengths) or (1,), tuple(ranks), tuple(places))


def units_of(task: Task) -> list[list[int]]:
    """The ranks by the largest units that are more than one, such as nodes; else by device."""
    homes = task.homes or tuple(range(task.size))
    for unit in (*reversed(task.axes), 1):
        by_unit: dict[int, list[int]] = {}
        for rank, home in enumerate(homes):
            by_unit.setdefault(home // unit, []).append(rank)
        if len(by_unit) > 1:
            return list(by_unit.values())
    return [list(range(task.size))]


def all_reduce_along(
    grid: Grid, rank: int, order: Sequence[int], whole: Span, channel: int = 0
) -> Program:
    """All-reduce a span along axes, in that order, over one channel.

    Along each axis but the last, a ring reduces part j to its j-th rank; along the last one, a ring
    all-reduces what is left; then rings gather the parts, back to the first axis.
    """
    kept: list[tuple[list[int], int, Span]] = []
    span = whole
    for axis in order[:-1]:
        line, here = grid.along(rank, axis)
        yield from reduce_round(line, here, _parts(span, len(line)), channel)
        kept.append((line, here, span))
        span = part_of(span, here, len(line))
    line, here = grid.along(rank, order[-1])
    yield from ring_round(line, here, span, channel)
    for line, here, outer in reversed(kept):
        yield from gather_round(line, here, _parts(outer, len(line)), channel)


def ring_round(ranks: Sequence[int], here: int, span: Span, channel: int = 0) -> Program:
    """All-reduce a span round a ring of some of the ranks."""
    count = len(ranks)
    parts = _parts(span, count)
    left, right = ranks[here - 1], ranks[(here + 1) % count]
    for step in range(count - 1):
        yield Send(right, parts[(here - step) % count], channel)
        yield Receive(left, parts[(here - step - 1) % count], combines=True, channel=channel)
    # Part here+1 is finished here; in the words of `gather_round` it is our place's.
    yield from gather_round(ranks, here, [*parts[1:], parts[0]], channel)


def reduce_round(
    ranks: Sequence[int], here: int, parts: Sequence[Span], channel: int = 0
) -> Program:
    """Reduce part j to the j-th of the ranks."""
    count = len(ranks)
    left, right = ranks[here - 1], ranks[(here + 1) % count]
    for step in range(count - 1):
        yield Send(right, parts[(here - step - 1) % count], channel)
        yield Receive(left, parts[(here - step - 2) % count], combines=True, channel=channel)


def gather_round(
    ranks: Sequence[int], here: int, parts: Sequence[Span], channel: int = 0
) -> Program:
    """Hand part j, which the j-th of the ranks has, to all of them."""
    count = len(ranks)
    left, right = ranks[here - 1], ranks[(here + 1) % count]
    for step in range(count - 1):
        yield Send(right, parts[(here - step) % count], channel)
        yield Receive(left, parts[(here - step - 1) % count], channel=channel)


def _parts(span: Span, count: int) -> list[Span]:
    return [part_of(span, index, count) for index in range(count)]
