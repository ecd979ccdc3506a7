"""Results of a worker's present chunk, in memory that survives the worker.

The worker writes the pickle of each result there before it begins the next call. That takes less
than a microsecond, and the pool is not woken: it reads the notes only if the worker dies. With the
last result they become the answer.

Notes are *pieces*: each has a length and a pickle of a list of results.
"""

import os
import struct
from typing import TYPE_CHECKING

from rankwise.drivers.real.pool.array_memory import MappingMode, map_received
from rankwise.drivers.real.pool.messages import INLINE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER = struct.Struct("<QQQ")
_LENGTH = struct.Struct("<Q")
_ROOM_BYTES = INLINE_BYTES_MAX - 1024
"""With the last results of a chunk it is to fit into a message."""


def new_notes() -> int:
    """A descriptor of memory for the notes of one worker."""
    fd = os.memfd_create("rankwise-pool-notes", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _HEADER.size + _ROOM_BYTES)
    except BaseException:
        os.close(fd)
        raise
    return fd


def piece(pickled: bytes) -> bytes:
    """A pickle with its length before it."""
    return _LENGTH.pack(len(pickled)) + pickled


def pieces(content: "bytes | memoryview") -> "Iterator[memoryview]":
    """The pickles in some content."""
    rest = memoryview(content)
    while rest:
        end = _LENGTH.size + _LENGTH.unpack_from(rest)[0]
        yield rest[_LENGTH.size : end]
        rest = rest[end:]


class NotesWriter:
    """The worker's end; it takes over the descriptor."""

    def __init__(self, fd: int) -> None:
        memory = map_received(fd, 0, os.fstat(fd).st_size, MappingMode.SHARED, is_shared=False)
        self._header = memory[: _HEADER.size].cast("Q")
        self._room = memory[_HEADER.size :]
        self._used = 0

    def begin(self, task: int, first: int) -> None:
        """Forget all notes; the next are those of a task, from this result on."""
        self._used = 0
        self._header[0] = 0  # first: a reader must not take old notes for new ones
        self._header[1], self._header[2] = task, first

    def add(self, noted: bytes) -> bool:
        """Note a piece; False if there is no room."""
        end = self._used + len(noted)
        if end > _ROOM_BYTES:
            return False
        self._room[self._used : end] = noted
        # Last: a worker may be killed between any two lines.
        self._used = self._header[0] = end
        return True

    @property
    def content(self) -> bytes:
        """All that was noted."""
        return bytes(self._room[: self._used])


def read_notes(fd: int, task: int, first: int) -> bytes:
    """What a dead worker has noted of a task from a result on; empty if nothing."""
    content = os.pread(fd, _HEADER.size + _ROOM_BYTES, 0)
    used, task_noted, first_noted = _HEADER.unpack_from(content)
    if (task_noted, first_noted) != (task, first) or used > _ROOM_BYTES:
        return b""
    return content[_HEADER.size : _HEADER.size + used]
