"""Binomial tree reduction: the way of `tree_broadcast`, backwards.

Order of reduction, with ranks counted from the root: a rank adds to its own data the sums of the
ranks 1, 2, 4, ... above it, nearest first: with four ranks (x0 + x1) + (x2 + x3); rounded to the
dtype after each addition.
"""

from rankwise.core.collectives.algorithms.tree_broadcast import lower_bits
from rankwise.core.collectives.program import Program, Receive, Send, Span, Task

COLLECTIVE = "reduce"


def program(task: Task) -> Program:
    """The program of one rank."""
    everything = Span(0, task.elements)
    number = (task.rank - task.root) % task.size
    for bit in reversed(lower_bits(number, task.size)):
        if number + bit < task.size:
            yield Receive((number + bit + task.root) % task.size, everything, combines=True)
    if number:
        yield Send((number - (number & -number) + task.root) % task.size, everything)
