"""Hierarchical all-reduce: inside each device first, then between devices, then inside again.

Ranks that share a device talk over its own network, which is faster than the links between
devices. If all devices have equally many ranks, the data are cut in as many parts: a ring inside
the device reduces part j to its j-th rank, a ring of all j-th ranks reduces it between devices, and
a ring inside hands the parts round. Otherwise the ranks of a device add to its first rank one after
the other, the first ranks run a ring, and each gives its result to the ranks of its device.

Order of reduction: inside a device as `ring_reduce_scatter` does it (or x[first] + x[second] +
... if the devices differ), then between the devices as `ring_allreduce` does it, by devices in the
order of their first ranks; rounded to the dtype after each addition.
"""

from collections.abc import Sequence

from rankwise.core.collectives.program import Program, Receive, Send, Span, Task, part_of

COLLECTIVE = "all_reduce"


def groups_by_device(task: Task) -> list[list[int]]:
    """The ranks by device, in the order of each device's first rank."""
    homes = task.homes or tuple(range(task.size))
    by_home: dict[int, list[int]] = {}
    for rank, home in enumerate(homes):
        by_home.setdefault(home, []).append(rank)
    return list(by_home.values())


def program(task: Task) -> Program:
    """What one rank does."""
    groups = groups_by_device(task)
    mine = next(group for group in groups if task.rank in group)
    everything = Span(0, task.elements)
    if len({len(group) for group in groups}) == 1:
        place = mine.index(task.rank)
        parts = [part_of(everything, index, len(mine)) for index in range(len(mine))]
        yield from _reduce_round(mine, place, parts)
        bridge = [group[place] for group in groups]
        yield from _ring(bridge, bridge.index(task.rank), parts[place])
        yield from _gather_round(mine, place, parts)
        return
    first, *rest = mine
    if task.rank != first:
        yield Send(first, everything)
        yield Receive(first, everything)
        return
    for rank in rest:
        yield Receive(rank, everything, combines=True)
    firsts = [group[0] for group in groups]
    yield from _ring(firsts, firsts.index(first), everything)
    for rank in rest:
        yield Send(rank, everything)


def _ring(ranks: Sequence[int], here: int, span: Span) -> Program:
    """All-reduce a span round a ring of some of the ranks."""
    count = len(ranks)
    parts = [part_of(span, index, count) for index in range(count)]
    left, right = ranks[here - 1], ranks[(here + 1) % count]
    for step in range(count - 1):
        yield Send(right, parts[(here - step) % count])
        yield Receive(left, parts[(here - step - 1) % count], combines=True)
    # Part here+1 is finished here; in the words of `_gather_round` it is our place's.
    yield from _gather_round(ranks, here, [*parts[1:], parts[0]])


def _reduce_round(ranks: Sequence[int], here: int, parts: Sequence[Span]) -> Program:
    """Reduce part j to the j-th of the ranks."""
    count = len(ranks)
    left, right = ranks[here - 1], ranks[(here + 1) % count]
    for step in range(count - 1):
        yield Send(right, parts[(here - step - 1) % count])
        yield Receive(left, parts[(here - step - 2) % count], combines=True)


def _gather_round(ranks: Sequence[int], here: int, parts: Sequence[Span]) -> Program:
    """Hand part j, which the j-th of the ranks has, to all of them."""
    count = len(ranks)
    left, right = ranks[here - 1], ranks[(here + 1) % count]
    for step in range(count - 1):
        yield Send(right, parts[(here - step) % count])
        yield Receive(left, parts[(here - step - 1) % count])
