"""Recursive doubling: ranks exchange everything with the one 1, 2, 4, ... positions away.

log2(n) steps that each carry all of the data: the least latency, for small data. With a number of
ranks that is no power of two, some sit out (`power_of_two`).

Order of reduction: pairs that sit out first (x[0] + x[1], ...), then neighbours by positions:
((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7)), rounded to the dtype after each addition.
"""

from rankwise.core.collectives.algorithms.power_of_two import (
    gather_the_spare,
    position_count,
    position_of,
    rank_at,
    return_to_the_spare,
)
from rankwise.core.collectives.levels import Grid, halves_of
from rankwise.core.collectives.program import Program, Receive, Send, Span, Task

COLLECTIVE = "all_reduce"


def symmetry(task: Task) -> Grid | None:
    """Partners change positions by halves."""
    return halves_of(task)


def program(task: Task) -> Program:
    """The program of one rank."""
    yield from gather_the_spare(task)
    position = position_of(task)
    if position is None:
        return
    everything = Span(0, task.elements)
    distance = 1
    while distance < position_count(task.size):
        partner = rank_at(position ^ distance, task.size)
        yield Send(partner, everything)
        yield Receive(partner, everything, combines=True)
        distance *= 2
    yield from return_to_the_spare(task)
