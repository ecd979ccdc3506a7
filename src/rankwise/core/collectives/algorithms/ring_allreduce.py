"""Ring all-reduce: reduce-scatter round the ring, then all-gather round the ring.

The data are cut in as many parts as there are ranks. In each of the first n-1 steps every rank
sends one part to its right neighbour and adds the part that comes from the left; in the n-1 steps
after that the finished parts travel round. Every link carries 2 (n-1)/n of the data, which is the
least that is possible.

Order of reduction, by positions on the ring: part p is ((x[p] + x[p+1]) + x[p+2]) + ... + x[p-1],
rounded to the dtype after each addition.
"""

from rankwise.core.collectives.program import Program, Receive, Send, Task

COLLECTIVE = "all_reduce"


def program(task: Task) -> Program:
    """What one rank of the ring does."""
    here = task.position
    left, right = task.at(here - 1), task.at(here + 1)
    for step in range(task.size - 1):
        yield Send(right, task.part(here - step))
        yield Receive(left, task.part(here - step - 1), combines=True)
    for step in range(task.size - 1):
        yield Send(right, task.part(here - step + 1))
        yield Receive(left, task.part(here - step))
