"""A region: the windows of some ranks and what they need to talk, as memory without a name.

Life. One process makes a region: `create` in a memfd of its own, `place` in shared memory that it
already has. The ranks find it there: forked children use the very object; a child that shares the
larger memory calls `find` with the offset; an unrelated process gets the descriptor through a
socket (`send`, `receive`). A memfd has no name, appears in no directory, and is gone with the last
process that holds it, so there is nothing to remove after any death.

Death. Ranks cannot see each other die: a process that can (their parent; a holder of their pidfds,
see `watch`) calls `mark_dead`. It writes why, then that, then rings every doorbell and the
segment's word of arrivals: all who wait for that rank, now or later, raise `PeerDied`. A rank that
has left before is not missed. If the one who marks dies itself, waits still end at their deadline.
"""

import fcntl
import os
import socket
import struct
from contextlib import suppress
from enum import IntEnum
from mmap import MAP_SHARED, mmap
from typing import TYPE_CHECKING, Self

from rankwise.base.errors import LocalProtocolError, TreeValueError, WindowError
from rankwise.base.units import format_bytes
from rankwise.drivers.real.segments import DEFAULT_BUFFER_BYTES, Segment
from rankwise.drivers.real.windows.layout import (
    DEATH_REASON_BYTES,
    DEFAULT_SIGNAL_COUNT,
    IDENTITY,
    MAGIC,
    NAME_BYTES,
    PAGE,
    VERSION,
    WindowLayout,
)

if TYPE_CHECKING:
    from rankwise.drivers.real.futex import FutexWord


class Presence(IntEnum):
    """Where a rank is in its life in a region."""

    ABSENT = 0
    JOINED = 1
    LEFT = 2


class WindowRegion:
    """One region; made with `create`, `place`, `find`, `attach` or `receive`."""

    def __init__(self, memory: mmap, layout: WindowLayout, name: str, fd: int | None) -> None:
        self.layout = layout
        self.name = name
        self.fd = fd
        self.segment = Segment.within(memory, layout.segment)
        self._memory: mmap | None = memory
        self._doorbells: list[FutexWord] = []
        self._address = 0

    @classmethod
    def create(
        cls,
        name: str,
        rank_count: int,
        window_bytes: int,
        *,
        signal_count: int = DEFAULT_SIGNAL_COUNT,
        chunk_bytes: int = DEFAULT_BUFFER_BYTES,
    ) -> Self:
        """Make a region in a memfd of its own; the caller closes it.

        Raises:
            ConfigError: a count or a size is out of range.
            WindowError: the system has no descriptor or no memory for it.
        """
        layout = WindowLayout(rank_count, window_bytes, signal_count, chunk_bytes)
        what = (
            f"cannot make a region of {format_bytes(layout.total_bytes)} for the {rank_count} "
            f"windows of {name!r}"
        )
        try:
            fd = os.memfd_create("rankwise-windows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise WindowError(
                f"{what}: {error.strerror}", hint="raise the limit of open files (ulimit -n)"
            ) from error
        try:
            os.ftruncate(fd, layout.total_bytes)
            fcntl.fcntl(
                fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            memory = mmap(fd, layout.total_bytes, MAP_SHARED)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise WindowError(
                    f"{what}: {error.strerror}",
                    hint="use smaller windows, or raise the limits of memory and of file size "
                    "(ulimit -v, ulimit -f)",
                ) from error
            raise
        region = cls(memory, layout, name, fd)
        region._write_identity()
        return region

    @classmethod
    def place(
        cls,
        memory: mmap,
        offset: int,
        name: str,
        rank_count: int,
        window_bytes: int,
        *,
        signal_count: int = DEFAULT_SIGNAL_COUNT,
        chunk_bytes: int = DEFAULT_BUFFER_BYTES,
    ) -> Self:
        """Make a region in shared memory that the caller has, `region_bytes` long, at `offset`.

        The former contents do not matter; the windows are not cleared. The memory stays the
        caller's, who keeps it mapped as long as the region is used.

        Raises:
            ConfigError: a count or a size is out of range, or there is too little room.
        """
        layout = WindowLayout(rank_count, window_bytes, signal_count, chunk_bytes, offset)
        if offset + layout.total_bytes > len(memory):
            raise TreeValueError(
                f"the {rank_count} windows of {name!r} need {format_bytes(layout.total_bytes)} at "
                f"offset {offset}, but the memory ends at {len(memory)}"
            )
        head = layout.head
        memory[head] = bytes(head.stop - head.start)
        region = cls(memory, layout, name, None)
        region._write_identity()
        return region

    @classmethod
    def find(cls, memory: mmap, offset: int) -> Self:
        """The region that another process has placed at `offset` of memory that both share."""
        end = offset + IDENTITY.size
        if offset < 0 or offset % PAGE or end > len(memory):
            raise TreeValueError(f"there is no region of windows at offset {offset}")
        where = f"at offset {offset}"
        return cls(memory, *cls._read_identity(memory[offset:end], offset, where), None)

    @classmethod
    def attach(cls, fd: int) -> Self:
        """The region in a memfd of another process; the descriptor becomes this object's.

        Raises:
            ConfigError: the descriptor is something else, or from another release. It stays open.
            WindowError: there is no room to map it.
        """
        try:
            size = os.fstat(fd).st_size
            identity = os.pread(fd, IDENTITY.size, 0)
        except OSError as error:
            raise TreeValueError(
                f"descriptor {fd} cannot be read as a region of windows: {error.strerror}"
            ) from error
        layout, name = cls._read_identity(identity, 0, f"in descriptor {fd}")
        if size != layout.total_bytes:
            raise TreeValueError(
                f"the region of windows {name!r} has {size} bytes, expected {layout.total_bytes}"
            )
        try:
            memory = mmap(fd, layout.total_bytes, MAP_SHARED)
        except OSError as error:
            raise WindowError(
                f"cannot map the {format_bytes(size)} of the windows of {name!r}: {error.strerror}",
                hint="raise the limit of memory (ulimit -v)",
            ) from error
        return cls(memory, layout, name, fd)

    def send(self, channel: socket.socket) -> None:
        """Hand the descriptor to the process at the other end of a Unix stream socket."""
        if self.fd is None:
            raise LocalProtocolError(
                f"the windows of {self.name!r} lie in memory that has no descriptor of theirs",
                hint="only regions made with create can be sent",
            )
        socket.send_fds(channel, [MAGIC], [self.fd])

    @classmethod
    def receive(cls, channel: socket.socket) -> Self:
        """The region that the process at the other end has sent, or is about to.

        Raises:
            ConfigError: what came is something else, or the other end has closed.
        """
        message, fds, _, _ = socket.recv_fds(channel, len(MAGIC), 1)
        if message != MAGIC or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise TreeValueError(
                f"expected a region of windows from the socket, but got {len(message)} bytes and "
                f"{len(fds)} descriptors",
                hint="the other end calls send() once, and has a descriptor to spare",
            )
        try:
            return cls.attach(fds[0])
        except BaseException:
            os.close(fds[0])
            raise

    @property
    def rank_count(self) -> int:
        """How many ranks have a window here."""
        return self.layout.rank_count

    @property
    def window_bytes(self) -> int:
        """Size of each window."""
        return self.layout.window_bytes

    @property
    def memory(self) -> mmap:
        """The memory that the region is a part of, from which its layout's offsets count."""
        if self._memory is None:
            raise LocalProtocolError(f"the windows of {self.name!r} are closed")
        return self._memory

    @property
    def address(self) -> int:
        """Where the region begins in this process."""
        if not self._address:
            import ctypes  # noqa: PLC0415  # takes milliseconds, and few ask

            first = ctypes.c_char.from_buffer(self.memory, self.layout.base)
            self._address = ctypes.addressof(first)
        return self._address

    def window_offset(self, rank: int) -> int:
        """Where a rank's window begins in `memory`."""
        return self.layout.window(self._checked(rank))

    def window_address(self, rank: int) -> int:
        """Where a rank's window begins in this process."""
        return self.address - self.layout.base + self.window_offset(rank)

    @property
    def doorbells(self) -> "list[FutexWord]":
        """What each rank sleeps on."""
        if not self._doorbells:
            from rankwise.drivers.real.futex import FutexWord  # noqa: PLC0415  # ctypes takes ms

            quiet = self.layout.segment.quiet
            self._doorbells = [
                FutexWord(self.memory, self.layout.doorbell(rank), quiet)
                for rank in range(self.rank_count)
            ]
        return self._doorbells

    @property
    def signal_cells(self) -> "memoryview[int]":
        """The words of all signals."""
        return memoryview(self.memory)[self.layout.signals : self._signals_end].cast("Q")

    def presence(self, rank: int) -> Presence:
        """Whether a rank has come, and whether it has left."""
        return Presence(self.memory[self.layout.presence(self._checked(rank))])

    def set_presence(self, rank: int, presence: Presence) -> None:
        """Say that a rank has come or left; for that rank."""
        self.memory[self.layout.presence(rank)] = presence
        if presence is Presence.LEFT:
            self._ring_all()

    def is_dead(self, rank: int) -> bool:
        """Whether a rank was marked dead."""
        return bool(self.memory[self.layout.segment.deaths + 4 * rank])

    def fate_of(self, rank: int) -> str:
        """What became of a rank that was marked dead, in words that follow its name."""
        why = self.memory[self.layout.death_reason(rank)].rstrip(b"\0").decode(errors="replace")
        return f"has ended ({why})" if why else "has ended"

    def mark_dead(self, rank: int, why: str = "") -> None:
        """Let all who wait for a rank know that it is gone; for its parent, or who watches it.

        Present and later waits for it raise `PeerDied`, which cites `why`. The first mark stays.
        """
        self._checked(rank)
        if not self.is_dead(rank):
            text = why.encode()[:DEATH_REASON_BYTES].ljust(DEATH_REASON_BYTES, b"\0")
            self.memory[self.layout.death_reason(rank)] = text
        self.segment.mark_dead(rank)
        self._ring_all()

    def close(self) -> None:
        """Let go of the memory, and of the descriptor if there is one. Twice is once.

        Arrays in the windows stay valid: the memory is unmapped when the last of them is gone.
        """
        for doorbell in self._doorbells:
            doorbell.release()
        self._doorbells = []
        self.segment.close()
        if self._memory is not None and self.fd is not None:
            with suppress(BufferError):  # an array refers to it
                self._memory.close()
        self._memory = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<WindowRegion {self.name!r}: {self.rank_count} x {self.window_bytes} bytes>"

    @property
    def _signals_end(self) -> int:
        layout = self.layout
        words = layout.row_words * layout.rank_count * layout.signal_count
        return layout.signals + 8 * words

    def _ring_all(self) -> None:
        for doorbell in self.doorbells:
            doorbell.add_and_wake()

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.rank_count:
            raise TreeValueError(
                f"rank is {rank}, expected 0 to {self.rank_count - 1}: {self.name!r} has "
                f"{self.rank_count} ranks"
            )
        return rank

    def _write_identity(self) -> None:
        layout = self.layout
        identity = IDENTITY.pack(
            MAGIC, VERSION, layout.rank_count, layout.window_bytes, layout.signal_count,
            layout.chunk_bytes, layout.total_bytes, self.name.encode()[:NAME_BYTES],
        )  # fmt: skip
        self.memory[layout.base : layout.base + IDENTITY.size] = identity

    @staticmethod
    def _read_identity(identity: bytes, offset: int, where: str) -> tuple[WindowLayout, str]:
        if len(identity) < IDENTITY.size or not identity.startswith(MAGIC):
            raise TreeValueError(f"what is {where} is not a region of windows")
        version = struct.unpack_from("=I", identity, len(MAGIC))[0]
        if version != VERSION:
            raise TreeValueError(
                f"the region of windows {where} has layout version {version}, expected {VERSION}",
                hint="all processes must use the same release of rankwise",
            )
        _, _, ranks, window_bytes, signals, chunk_bytes, total, name = IDENTITY.unpack(identity)
        layout = WindowLayout(ranks, window_bytes, signals, chunk_bytes, offset)
        if layout.total_bytes != total:
            raise TreeValueError(
                f"the region of windows {where} claims {total} bytes, expected "
                f"{layout.total_bytes}: it is damaged"
            )
        return layout, name.rstrip(b"\0").decode(errors="replace")
