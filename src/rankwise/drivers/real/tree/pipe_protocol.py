"""The words in the pipes between a worker process and its children: 64 bits each.

    task pipe          slot : 24 | callable : 24 | flags : 8 | counter : 8
    completion pipe    subject : 24 | kind : 8 | value : 32

A pipe's write of up to 4096 bytes is atomic, and so is a read of whole words: no reader ever sees
half a word. The lowest 32 bits of a completion word about a slot are what `ChildrenReported` takes.
"""

import os
import select
import struct
from contextlib import ExitStack
from typing import Final

from rankwise.base.units import Duration

WORD_BYTES: Final = 8
pack_word: Final = struct.Struct("=Q").pack
unpack_word: Final = struct.Struct("=Q").unpack

FIELD_BITS: Final = 24
FIELD_MASK: Final = (1 << FIELD_BITS) - 1
FLAGS_SHIFT: Final = 48
COUNTER_SHIFT: Final = 56

AHEAD: Final = 1 << FLAGS_SHIFT
"""Return this word unless the counter is the child's own."""
HAS_FRAME: Final = 2 << FLAGS_SHIFT
"""The slot's frame holds arguments."""
MORE: Final = 4 << FLAGS_SHIFT
"""Another word was written along with this one."""
COMMAND: Final = 8 << FLAGS_SHIFT
"""No task: the child's command frame says what is wanted. Its length stands in the slot's place."""
RELEASE: Final = 16 << FLAGS_SHIFT
"""No task: come to your end."""
FLUSH: Final = 32 << FLAGS_SHIFT
"""No task: write what you have not told yet."""
PROGRAM: Final = 64 << FLAGS_SHIFT
"""No task of the graph: run the recorded program of this number."""
NO_TASK: Final = COMMAND | RELEASE | FLUSH | PROGRAM

KIND_SHIFT: Final = 24
VALUE_SHIFT: Final = 32
VALUE_BITS: Final = 32
VALUE_MASK: Final = (1 << VALUE_BITS) - 1
COMPLETED, FAILED, RETURNED = 0, 1, 2
"""Kinds about a slot; a completed one's value is the length of what it left in its frame."""
LEFT_IN_FILE: Final = VALUE_MASK
"""The value of a completed slot that left more than a frame holds."""
READY, REFUSED, ENDED, ANSWERED, PROGRAM_ENDED, PROGRAM_FAILED, NOT_STARTED = 3, 4, 5, 6, 7, 8, 9
WOKEN = 10
"""Kinds about a child. Value: nothing; nothing (the reason is in the report file); the exit code,
or minus the signal; the length of the answer in the command frame; nothing; nothing (the reason as
above), twice.
`WOKEN` is about no child: the worker process has written it, to end its own wait."""


def completion(kind: int, subject: int, value: int = 0) -> bytes:
    """A word for the completion pipe."""
    return pack_word(subject | kind << KIND_SHIFT | (value & VALUE_MASK) << VALUE_SHIFT)


def signed_value(word: int) -> int:
    """The value of a completion word that may be negative."""
    value = word >> VALUE_SHIFT
    return value - (VALUE_MASK + 1) if value >> (VALUE_BITS - 1) else value


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
