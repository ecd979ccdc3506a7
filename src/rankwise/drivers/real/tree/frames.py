"""Frames: what goes along with the word of a task, and what the task leaves there."""

from rankwise.base.errors import TreeValueError
from rankwise.base.units import format_bytes
from rankwise.drivers.real.tree.arena import FRAME_BYTES, FRAME_HEAD


class TaskFrames:
    """A frame per slot of the ring, in memory that children share.

    Args:
        memory: the arena's.
        start: where the frame of slot 0 is.
    """

    def __init__(self, memory: memoryview, start: int) -> None:
        self._memory = memory
        self._start = start

    def write(self, slot: int, body: bytes) -> None:
        """Write a task's arguments.

        Raises:
            ConfigError: they are too long.
        """
        if len(body) > FRAME_BYTES - FRAME_HEAD.size:
            raise TreeValueError(
                f"a task's arguments take {format_bytes(len(body))}, and a frame has "
                f"{format_bytes(FRAME_BYTES)}",
                hint="put what is long into a tensor",
            )
        place = self._start + slot * FRAME_BYTES
        FRAME_HEAD.pack_into(self._memory, place, len(body), 0)
        place += FRAME_HEAD.size
        self._memory[place : place + len(body)] = body

    def set_clock(self, slot: int, clock: int) -> None:
        """Say at which simulated instant the task may begin."""
        place = self._start + slot * FRAME_BYTES
        length = FRAME_HEAD.unpack_from(self._memory, place)[0]
        FRAME_HEAD.pack_into(self._memory, place, length, clock)

    def left(self, slot: int, length: int) -> bytes:
        """What the task has left there."""
        place = self._start + slot * FRAME_BYTES
        return bytes(self._memory[place : place + length])
