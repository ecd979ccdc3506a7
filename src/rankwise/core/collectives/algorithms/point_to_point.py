"""One message from rank 0 of a pair to rank 1: what `send` and `recv` run as."""

from rankwise.core.collectives.program import Program, Receive, Send, Span, Task

COLLECTIVE = "send_receive"


def program(task: Task) -> Program:
    """What one end does."""
    everything = Span(0, task.elements)
    if task.rank == 0:
        yield Send(1, everything)
    else:
        yield Receive(0, everything)
