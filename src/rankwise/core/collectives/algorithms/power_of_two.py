"""How algorithms for 2**k ranks serve any number of them.

With n ranks and p the largest power of two in n, the first 2 (n-p) ranks pair up: the even one
gives its data to the odd one, sits out, and is given the result at the end. The p that are left
have *positions* 0 ... p-1 in the order of their ranks.
"""

from rankwise.core.collectives.program import Program, Receive, Send, Span, Task


def position_count(size: int) -> int:
    """The largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)


def position_of(task: Task) -> int | None:
    """The position of a rank; None if it sits out."""
    spare = task.size - position_count(task.size)
    if task.rank >= 2 * spare:
        return task.rank - spare
    return task.rank // 2 if task.rank % 2 else None


def rank_at(position: int, size: int) -> int:
    """The rank that has a position."""
    spare = size - position_count(size)
    return 2 * position + 1 if position < spare else position + spare


def has_pupil(task: Task) -> bool:
    """Whether the rank below gives its data to this one and sits out."""
    return task.rank % 2 == 1 and task.rank < 2 * (task.size - position_count(task.size))


def gather_the_spare(task: Task) -> Program:
    """Take in the data of the one who sits out, or give ours and await the result."""
    everything = Span(0, task.elements)
    if position_of(task) is None:
        yield Send(task.rank + 1, everything)
        yield Receive(task.rank + 1, everything)
    elif has_pupil(task):
        yield Receive(task.rank - 1, everything, combines=True)


def return_to_the_spare(task: Task) -> Program:
    """Give the result to the one who sat out."""
    if has_pupil(task):
        yield Send(task.rank - 1, Span(0, task.elements))
