"""Ring all-to-all: blocks are passed from neighbour to neighbour until they are where they belong.

In step s every rank passes on the n-s blocks that have still to travel; the first of those that
come in is for itself. From the second step on they lie side by side and travel as one message: how
many messages there are, and with them how many latencies, grows with n. A block crosses as many
links as its destination is away, so each link carries n (n-1)/2 blocks: fine on a ring, where
nothing else is possible, and poor on a switch.
"""

from rankwise.core.collectives.program import Copy, Program, Receive, Send, Span, Task

COLLECTIVE = "all_to_all"


def scratch_elements(task: Task) -> int:
    """Two stores for blocks in transit: what comes in must not overwrite what goes out."""
    return 2 * (task.size - 1) * task.elements


def program(task: Task) -> Program:
    """What one rank of the ring does."""
    size, here = task.size, task.position
    left, right = task.at(here - 1), task.at(here + 1)
    result = size * task.elements

    def arrived(source: int) -> Span:
        return Span(result + source * task.elements, result + (source + 1) * task.elements)

    def in_transit(step: int, first: int) -> Span:
        start = 2 * result + step % 2 * (size - 1) * task.elements
        return Span(start + first * task.elements, start + (size - step) * task.elements)

    yield Copy(task.block(task.rank), arrived(task.rank))
    for ahead in range(1, size):
        yield Send(right, task.block(task.at(here + ahead)))
    for index in range(size - 1):
        start = in_transit(1, index).start
        yield Receive(left, Span(start, start + task.elements))
    for step in range(1, size):
        mine = in_transit(step, 0).start
        yield Copy(Span(mine, mine + task.elements), arrived(task.at(here - step)))
        if step < size - 1:
            yield Send(right, in_transit(step, 1))
            yield Receive(left, in_transit(step + 1, 0))
