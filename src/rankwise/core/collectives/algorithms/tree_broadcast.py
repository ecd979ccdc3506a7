"""Binomial tree broadcast: in each step everyone who has the data gives them to one more.

Counted from the root, rank v has the data from v without its lowest bit, and gives them to v plus
each lower bit, the highest first: the largest subtree has the longest way to go.
"""

from rankwise.core.collectives.program import Program, Receive, Send, Span, Task

COLLECTIVE = "broadcast"


def lower_bits(number: int, size: int) -> list[int]:
    """The powers of two below the lowest bit of `number` (all, for 0), the highest first."""
    limit = number & -number if number else 1 << (size - 1).bit_length()
    return [1 << bit for bit in reversed(range(limit.bit_length() - 1))]


def program(task: Task) -> Program:
    """The program of one rank."""
    everything = Span(0, task.elements)
    number = (task.rank - task.root) % task.size
    if number:
        yield Receive((number - (number & -number) + task.root) % task.size, everything)
    for bit in lower_bits(number, task.size):
        if number + bit < task.size:
            yield Send((number + bit + task.root) % task.size, everything)
