"""Halving-doubling: reduce-scatter by halves, then all-gather by doubling.

In the first step a rank exchanges half of the data with the rank half of the positions away, then a
quarter with the one a quarter away, and so on: 2 log2(n) steps that carry 2 (n-1)/n of the data in
all. With a number of ranks that is no power of two, some sit out (`power_of_two`).

Order of reduction: pairs that sit out first (x[0] + x[1], ...), then by positions, the farthest
first: with four positions (s0 + s2) + (s1 + s3), rounded to the dtype after each addition.
"""

from rankwise.core.collectives.algorithms.power_of_two import (
    gather_the_spare,
    position_count,
    position_of,
    rank_at,
    return_to_the_spare,
)
from rankwise.core.collectives.levels import Grid, halves_of
from rankwise.core.collectives.program import Program, Receive, Send, Span, Task, part_of

COLLECTIVE = "all_reduce"


def symmetry(task: Task) -> Grid | None:
    """Partners change positions by halves, if all parts are equally long."""
    return halves_of(task) if not task.elements % task.size else None


def program(task: Task) -> Program:
    """The program of one rank."""
    yield from gather_the_spare(task)
    position = position_of(task)
    if position is None:
        return
    kept = Span(0, task.elements)
    exchanges: list[tuple[int, Span, Span]] = []
    distance = position_count(task.size) // 2
    while distance:
        is_upper = bool(position & distance)
        mine, theirs = part_of(kept, is_upper, 2), part_of(kept, not is_upper, 2)
        partner = rank_at(position ^ distance, task.size)
        yield Send(partner, theirs)
        yield Receive(partner, mine, combines=True)
        exchanges.append((partner, mine, theirs))
        kept = mine
        distance //= 2
    for partner, mine, theirs in reversed(exchanges):
        yield Send(partner, mine)
        yield Receive(partner, theirs)
    yield from return_to_the_spare(task)
