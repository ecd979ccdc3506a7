"""The arena: memory of a worker process and all its descendants, at the same addresses.

One anonymous, shared, sparse mapping, made before anything is forked. It takes addresses, not
memory: pages appear when they are first touched, also those that are given out long after the fork,
and they are the same for all. It has no name, so nothing of it can be left behind.

    callables    for each number where its pickle lies: u64 offset, u64 length
    counters     two u64 per child: words begun, words done; written by that child
    commands     a frame per child
    frames       one per slot of the ring
    heap         what tasks' `alloc` gives out; managed by the task graph
    rest         everything else: pickles, buffers, windows, bootstrap channels
"""

import ctypes
import mmap
import struct
from typing import Final

import msgspec

from rankwise.base.errors import TreeError, TreeValueError
from rankwise.base.units import format_bytes
from rankwise.core.tree.heap import Heap
from rankwise.drivers.real.interrupts import gate_here

SIZE: Final = 256 << 30
FRAME_BYTES: Final = 64 << 10
FRAME_HEAD: Final = struct.Struct("=QQ")
"""Of a slot's frame: the bytes that follow, and the simulated instant at which it may begin."""
CALLABLES_MAX: Final = 1 << 16
PAGE: Final = mmap.PAGESIZE
_COUNTERS_STRIDE: Final = 64  # a cache line, so that children do not take it from each other
_NO_RESERVE: Final = 0x4000
_REMOVE: Final = 9


class ArenaLayout(msgspec.Struct, frozen=True):
    """Where things are, as offsets."""

    child_count: int
    ring_depth: int
    heap_bytes: int

    @property
    def counters(self) -> int:
        """Of child 0; the others follow, `_COUNTERS_STRIDE` apart."""
        return 16 * CALLABLES_MAX

    @property
    def commands(self) -> int:
        """Frame of child 0; the others follow."""
        return _page_up(self.counters + _COUNTERS_STRIDE * max(1, self.child_count))

    @property
    def frames(self) -> int:
        """Frame of slot 0; the others follow."""
        return self.commands + FRAME_BYTES * self.child_count

    @property
    def heap(self) -> int:
        """The first byte of the heap."""
        return self.frames + FRAME_BYTES * self.ring_depth

    @property
    def rest(self) -> int:
        """The first byte of the rest."""
        return _page_up(self.heap + self.heap_bytes)

    def command(self, child: int) -> int:
        """A child's frame for commands."""
        return self.commands + FRAME_BYTES * child

    def counter(self, child: int) -> int:
        """Where a child counts."""
        return self.counters + _COUNTERS_STRIDE * child


class ArenaExhausted(TreeError, MemoryError):
    """No address is left for what was to be shared."""


class Arena:
    """The mapping; made by the worker process, inherited by its descendants."""

    def __init__(self, layout: ArenaLayout) -> None:
        if layout.rest + (1 << 30) > SIZE:
            raise TreeValueError(
                f"the heap has {format_bytes(layout.heap_bytes)}, more than an arena holds",
                hint="give a smaller heap_ring_size",
            )
        self.layout = layout
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            self.memory = mmap.mmap(-1, SIZE, flags=flags)
        except OSError as error:
            raise TreeValueError(
                f"{format_bytes(SIZE)} of addresses could not be reserved: {error.strerror}",
                hint="no memory is taken by that; look at ulimit -v and vm.overcommit_memory",
            ) from error
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(self._anchor)
        self._rest = Heap(layout.rest, SIZE - layout.rest)
        self._sizes: dict[int, int] = {}

    def allocate(self, size_bytes: int) -> int:
        """Offset of so many bytes of the rest, at a page of their own; they hold zeros."""
        size_bytes = max(PAGE, _page_up(size_bytes))
        with gate_here().closed():
            offset = self._rest.take(size_bytes)
            if offset is not None:
                self._sizes[offset] = size_bytes
        if offset is None:
            raise ArenaExhausted(
                f"{format_bytes(size_bytes)} were asked for, and no such piece is left of the "
                f"{format_bytes(SIZE)} of addresses that a tree shares",
                hint="share less at a time; close() frees what was shared",
            )
        return offset

    def contains(self, start: int, size_bytes: int) -> bool:
        """Whether these bytes, given by address, all lie in it."""
        return self.address <= start and start + size_bytes <= self.address + SIZE

    def release(self, offset: int) -> None:
        """Give back what `allocate` gave; its pages go back to the kernel."""
        with gate_here().closed():
            size_bytes = self._sizes.pop(offset)
            self._rest.give_back(offset, size_bytes)
            self.discard(offset, size_bytes)

    def discard_all_of(self, offset: int) -> None:
        """Let the kernel take the pages of what `allocate` gave; the addresses stay taken."""
        self.discard(offset, self._sizes[offset])

    def discard(self, offset: int, size_bytes: int) -> None:
        """Let the kernel take whole pages back; they hold zeros when they are touched again."""
        begin, end = _page_up(offset), (offset + size_bytes) // PAGE * PAGE
        if end > begin:
            self.memory.madvise(_REMOVE, begin, end - begin)

    def close(self) -> None:
        """Unmap it here, unless a buffer still refers to it; twice is once."""
        self._anchor = None
        try:
            self.memory.close()
        except BufferError:
            # A numpy view keeps it, as it must: the kernel takes it when the view is gone.
            return


def _page_up(count: int) -> int:
    return -(-count // PAGE) * PAGE


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
