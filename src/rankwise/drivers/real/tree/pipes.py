"""Descriptors with an owner, and pipes of words."""

import os
import select
from contextlib import ExitStack

from rankwise.base.units import Duration

_NANOSECONDS_PER_MILLISECOND = 1_000_000


class Descriptor:
    """A descriptor that is closed once."""

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        """Close it, if it is open."""
        if self.number >= 0:
            number, self.number = self.number, -1
            os.close(number)


def open_pipe(stack: ExitStack) -> tuple[Descriptor, Descriptor]:
    """The reading and the writing end of a new pipe, closed with the stack."""
    read, write = map(Descriptor, os.pipe())
    stack.callback(read.close)
    stack.callback(write.close)
    return read, write


def opened_again(read: Descriptor, stack: ExitStack) -> Descriptor:
    """The same pipe's reading end, but one that never waits.

    Whether a read waits belongs to the open file, which a fork shares, so there must be two of it.
    """
    path = f"/proc/self/fd/{read.number}"
    again = Descriptor(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    stack.callback(again.close)
    return again


def read_without_waiting(fd: int, count: int) -> bytes:
    """What is there, up to `count` bytes."""
    try:
        return os.read(fd, count)
    except BlockingIOError:
        return b""


def wait_readable(fd: int, patience: Duration) -> bool:
    """Wait until there is something to read, or for `patience`; whether there is."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    milliseconds = -(-max(0, patience) // _NANOSECONDS_PER_MILLISECOND)
    return bool(poll.poll(min(milliseconds, 0x7FFFFFFF)))
