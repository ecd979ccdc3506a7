"""Ring all-reduce: reduce-scatter round the ring, then all-gather round the ring.

The data are cut in as many parts as there are ranks. In each of the first n-1 steps every rank
sends one part to its right neighbour and adds the part that comes from the left; in the n-1 steps
after that the finished parts travel round. Every link carries 2 (n-1)/n of the data, which is the
least that is possible.

Order of reduction, by positions on the ring: part p is ((x[p] + x[p+1]) + x[p+2]) + ... + x[p-1],
rounded to the dtype after each addition.
"""

from rankwise.core.collectives import ring
from rankwise.core.collectives.program import Program, Span, Task

COLLECTIVE = "all_reduce"


def rounds(task: Task) -> list[ring.RingRound]:
    """Reduce-scatter, then all-gather."""
    steps = range(task.size - 1)
    scatter = [ring.RingRound(-step, combines=True) for step in steps]
    return scatter + [ring.RingRound(1 - step, combines=False) for step in steps]


def part(task: Task, index: int) -> Span:
    """Where a part lies."""
    return task.part(index)


def program(task: Task) -> Program:
    """What one rank of the ring does."""
    return ring.program(task, rounds(task), task.part)
