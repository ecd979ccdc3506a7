"""Ring algorithms, as what all of them are: rounds in which every rank does the same.

In a round every rank sends one part of the workspace to the next rank on the ring, and receives the
part that the rank before it sends. Which part, follows from where on the ring the rank is. So the
rounds of one rank say what all ranks do: a program (`program`) is made from them for each rank, and
the message level of the simulator times them for all ranks at once without any program.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from rankwise.core.collectives.program import Program, Receive, Send, Span, Task


class RingRound(NamedTuple):
    """One round of a ring.

    From the second on, a rank sends in each round what it has received in the round before.

    Attributes:
        offset: the rank at position p sends part p + offset, counted modulo the size.
        combines: whether the receiver combines the part with its own.
    """

    offset: int
    combines: bool


def program(task: Task, rounds: Iterable[RingRound], part: Callable[[int], Span]) -> Program:
    """What one rank of the ring does; `part` says where a part lies."""
    here = task.position
    left, right = task.at(here - 1), task.at(here + 1)
    for each in rounds:
        yield Send(right, part(here + each.offset))
        yield Receive(left, part(here + each.offset - 1), combines=each.combines)
