"""Reading a worker's stream: from its pipe, in big chunks, into its sinks."""

import contextlib
import os
from collections.abc import Iterable
from fcntl import F_SETPIPE_SZ, fcntl, ioctl
from struct import Struct
from termios import FIONREAD
from typing import Protocol

from rankwise.base.units import Instant

CHUNK_BYTES = 128 << 10
"""The most that is read at once: what still fits in the processor's cache while every sink works
on it. A pipe's worth of 1 MiB takes a third more of the agent's time."""

_PIPE_BYTES_MAX = 1 << 20
_PIPE_BYTES_MIN = 64 << 10
# The kernel lets a user's pipes hold 64 MiB and then makes every new one tiny, also those of other
# programs. A quarter of that is ours.
_PIPE_BYTES_TOGETHER = 16 << 20

_INT = Struct("i")


class Sink(Protocol):
    """Receives one stream, chunk by chunk. Never blocks on anything but a disk."""

    @property
    def is_congested(self) -> bool:
        """Whether the stream should not be read for now, since what it says cannot be placed."""
        ...

    def take(self, chunk: bytes, now: Instant) -> None:
        """Receive the next bytes, at least one; `now` is when they were read."""
        ...

    def end(self, now: Instant) -> None:
        """Receive the news that nothing more will come. Called once."""
        ...


class StreamPump:
    """Moves one stream from a pipe to its sinks. Owns the pipe's reading end.

    `on_readable` is for the reactor. `is_ended` is true once the stream has ended and the sinks
    know. While `is_congested`, `on_readable` should not be called.
    """

    def __init__(self, fd: int, sinks: Iterable[Sink]) -> None:
        self.fd = fd
        self.byte_count = 0
        """How many bytes have been read."""
        self.is_ended = False
        self._sinks = tuple(sinks)
        os.set_blocking(fd, False)

    @property
    def is_congested(self) -> bool:
        """Whether a sink asks for a pause."""
        return any(sink.is_congested for sink in self._sinks)

    def on_readable(self, now: Instant) -> None:
        """Read one chunk; at the end of the stream, tell the sinks."""
        if not self.is_ended:
            self._read(now)

    def drain(self, now: Instant) -> None:
        """Read all that is in the pipe at this moment, congested or not, then stop.

        All that a worker wrote before it ended is then in the sinks, even if the pipe has no end
        because a process that the worker left behind holds it open, and writes on.
        """
        if self.is_ended:
            return
        remaining = self._bytes_in_pipe()
        if not remaining:
            self._read(now)  # which finds the end of the stream, as a rule
        while remaining > 0 and (count := self._read(now)):
            # Counted down: a process that was left behind writes on, and would be read for ever.
            remaining -= count

    def end(self, now: Instant) -> None:
        """Take what is in the pipe, tell the sinks that this is all, close. Harmless when done."""
        if self.fd >= 0:
            self.drain(now)
            self._end(now)
            os.close(self.fd)
            self.fd = -1

    def _read(self, now: Instant) -> int:
        try:
            chunk = os.read(self.fd, CHUNK_BYTES)
        except BlockingIOError:
            return 0
        if not chunk:
            self._end(now)
            return 0
        self.byte_count += len(chunk)
        for sink in self._sinks:
            sink.take(chunk, now)
        return len(chunk)

    def _end(self, now: Instant) -> None:
        if not self.is_ended:
            self.is_ended = True
            for sink in self._sinks:
                sink.end(now)

    def _bytes_in_pipe(self) -> int:
        count: int = _INT.unpack(ioctl(self.fd, FIONREAD, bytes(_INT.size)))[0]
        return count


def open_stream_pipe(stream_count: int) -> tuple[int, int]:
    """A pipe for one of `stream_count` streams: the reading end, and the worker's writing end.

    It is as large as is decent, up to 1 MiB: the more a pipe holds, the less often the worker
    waits and the agent wakes. Neither end is inherited unless passed on.
    """
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    # Shared out, since the kernel limits what pipes of one user hold together.
    share = _PIPE_BYTES_TOGETHER // max(stream_count, 1)
    # The kernel rounds up to a power of two, we round down.
    capacity = min(max(1 << (share.bit_length() - 1), _PIPE_BYTES_MIN), _PIPE_BYTES_MAX)
    if capacity > _PIPE_BYTES_MIN:  # which it has anyway
        with contextlib.suppress(OSError):  # the user's other pipes have used up the allowance
            fcntl(write_fd, F_SETPIPE_SZ, capacity)
    return read_fd, write_fd
