"""Exchange all-reduce: everyone sends everything to everyone, and adds up by itself.

One step, whatever the size, which carries n-1 times the data: for small ones.

Order of reduction: x[0] + x[1] + ... + x[n-1], by ranks, accumulated in f32 and rounded to the
dtype once.
"""

from rankwise.core.collectives.program import Fold, Program, Receive, Send, Span, Task

COLLECTIVE = "all_reduce"


def scratch_elements(task: Task) -> int:
    """The data of all the others."""
    return (task.size - 1) * task.elements


def program(task: Task) -> Program:
    """The program of one rank."""
    mine = Span(0, task.elements)
    contributions = [
        Span(place * task.elements, (place + 1) * task.elements) for place in range(1, task.size)
    ]
    contributions.insert(task.rank, mine)
    for distance in range(1, task.size):
        yield Send((task.rank + distance) % task.size, mine)
    for distance in range(1, task.size):
        source = (task.rank - distance) % task.size
        yield Receive(source, contributions[source])
    yield Fold(tuple(contributions), mine)
