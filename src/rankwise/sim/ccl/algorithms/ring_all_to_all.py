"""Ring all-to-all: blocks are passed from neighbour to neighbour until they are where they belong.

In step s every rank passes on the n-s blocks that have still to travel; the first of those that
come in is for itself. A block crosses as many links as its destination is away, so each link
carries n (n-1)/2 blocks: fine on a ring, where nothing else is possible, and poor on a switch.
"""

from rankwise.sim.ccl.program import Copy, Program, Receive, Send, Span, Task

COLLECTIVE = "all_to_all"


def scratch_elements(task: Task) -> int:
    """Two stores for blocks in transit: what comes in must not overwrite what goes out."""
    return 2 * max(0, task.size - 2) * task.elements


def program(task: Task) -> Program:
    """What one rank of the ring does."""
    size, here = task.size, task.position
    left, right = task.at(here - 1), task.at(here + 1)
    result = size * task.elements

    def arrived(source: int) -> Span:
        return Span(result + source * task.elements, result + (source + 1) * task.elements)

    def in_transit(step: int, index: int) -> Span:
        start = 2 * result + (step % 2 * (size - 2) + index) * task.elements
        return Span(start, start + task.elements)

    yield Copy(task.block(task.rank), arrived(task.rank))
    for step in range(1, size):
        for index in range(size - step):
            first = task.block(task.at(here + 1 + index))
            yield Send(right, first if step == 1 else in_transit(step - 1, index))
        yield Receive(left, arrived(task.at(here - step)))
        for index in range(size - step - 1):
            yield Receive(left, in_transit(step, index))
