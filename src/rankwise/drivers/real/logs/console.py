"""The console: standard output and standard error of the agent, which never make it wait.

An `Outlet` is one open file with a queue in front. Output goes out at once as far as the other side
takes it; the rest waits until the reactor says that more can be written. Everything handed to
`write` leaves in one piece, so lines that are written whole are never torn by others, even when
they leave in parts. When both descriptors are the same file, such as the same terminal, they share
one outlet for the same reason.

On a terminal a line may stay *open*: what a silent stream has begun to say, such as a prompt, is
shown without a newline (see `channel.py`). It is ended before another stream writes, so the lines
of others begin at the left all the same.

The queue is bounded by those who fill it: an outlet that `is_congested` asks the pumps to stop
reading, which in the end makes the workers wait, as a slow terminal does.

When the reader is gone (EPIPE, or EIO of a terminal that was closed) the outlet swallows
everything in silence: a closed console means that nothing more is wanted, and the job goes on.
"""

import contextlib
import os
from collections import deque
from collections.abc import Callable
from errno import EBADF, EIO, EPIPE
from typing import TYPE_CHECKING

from rankwise.drivers.real.logs.shared_fd import DirectWriter, SharedWriter, shared_writer

if TYPE_CHECKING:
    from rankwise.drivers.real.logs.channel import ConsoleChannel

CONGESTED_BYTES = 2 << 20
"""Waiting bytes from which an outlet asks its writers to pause."""

RELAXED_BYTES = 512 << 10
"""Waiting bytes at which they may go on."""

_SMALL = 64 << 10


class Outlet:
    """One open file of the console, with the bytes that wait to be written.

    Attributes:
        is_terminal: whether people look at it.
        on_blocked: called when bytes begin to wait, so that the reactor watches `fd`.
        on_unfinished: called when a stream begins a line and does not end it, on a terminal.
        activity: counts what is written, and what comes of unfinished lines.
        byte_count: bytes handed to it so far, written or not.
        unfinished: the streams whose line is held back, in the order of their last words.
        open_line: the stream whose unfinished line is the last thing on the terminal.
    """

    def __init__(
        self,
        fd: int,
        *,
        name: str = "the console",
        say: Callable[[str], None] | None = None,
        congested_bytes: int = CONGESTED_BYTES,
        relaxed_bytes: int = RELAXED_BYTES,
    ) -> None:
        self.name = name
        self.is_terminal = os.isatty(fd)
        self.on_blocked: Callable[[], None] | None = None
        self.on_unfinished: Callable[[], None] | None = None
        self.activity = 0
        self.byte_count = 0
        self.unfinished: dict[ConsoleChannel, None] = {}
        self.open_line: ConsoleChannel | None = None
        self._say = say
        self._congested_bytes = congested_bytes
        self._relaxed_bytes = relaxed_bytes
        self._queue: deque[bytes | bytearray] = deque()
        self._head_offset = 0
        self._waiting_bytes = 0
        self._is_congested = False
        self._writer: SharedWriter | None = None
        # If the descriptor is closed, we were started without it: there is no reader.
        with contextlib.suppress(OSError):
            self._writer = shared_writer(fd)
        self._is_gone = self._writer is None

    @property
    def fd(self) -> int:
        """What to watch while `wants_write`."""
        assert self._writer is not None, "an outlet without descriptor never wants to write"
        return self._writer.fd

    @property
    def is_gone(self) -> bool:
        """Whether its reader is gone."""
        return self._is_gone

    @property
    def wants_write(self) -> bool:
        """Whether `on_writable` should be called when `fd` can be written."""
        return self._waiting_bytes > 0

    @property
    def is_congested(self) -> bool:
        """Whether so much waits that its writers should pause."""
        return self._is_congested

    def hold(self, stream: "ConsoleChannel") -> None:
        """Note that a stream's last line has no end yet."""
        self.activity += 1
        self.unfinished.pop(stream, None)
        self.unfinished[stream] = None
        if self.on_unfinished is not None:
            self.on_unfinished()

    def show_unfinished(self) -> None:
        """Show what streams have begun to say, after a pause of all of them."""
        streams = list(self.unfinished)
        self.unfinished.clear()
        for stream in streams:
            stream.show_unfinished()

    def write(self, data: bytes, *, open_line: "ConsoleChannel | None" = None) -> None:
        """Send `data` in one piece, now or later.

        It begins a line, even if another one is open. It ends in a newline, unless it leaves the
        line of a stream open.
        """
        if self.open_line is not None:
            data = b"\n" + data
        self.go_on(data, open_line=open_line)

    def go_on(self, data: bytes, *, open_line: "ConsoleChannel | None" = None) -> None:
        """The same, where `data` goes on with the line that is open."""
        if self._is_gone or not data:
            return
        self.activity += 1
        self.byte_count += len(data)
        self.open_line = open_line
        if not self._waiting_bytes:
            written = self._send(data, 0)
            if written is None or written == len(data):
                return
            self._queue.append(data)
            self._head_offset = written
            self._waiting_bytes = len(data) - written
            if self.on_blocked is not None:
                self.on_blocked()
        else:
            self._enqueue(data)
            self._waiting_bytes += len(data)
        if self._waiting_bytes > self._congested_bytes:
            self._is_congested = True

    def on_writable(self) -> None:
        """Send what waits, as far as it is taken now."""
        while self._queue:
            head = self._queue[0]
            offset = self._send(head, self._head_offset)
            if offset is None:
                return
            self._waiting_bytes -= offset - self._head_offset
            self._head_offset = offset
            if offset < len(head):
                break
            self._queue.popleft()
            self._head_offset = 0
        if self._waiting_bytes <= self._relaxed_bytes:
            self._is_congested = False

    def close(self) -> None:
        """Forget what waits, and give back what was opened. The shared descriptor stays open."""
        self._swallow_everything()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _enqueue(self, data: bytes) -> None:
        """Append; single lines are collected, so that they do not cost a system call each."""
        last = self._queue[-1]
        if isinstance(last, bytearray) and len(last) < _SMALL:
            last += data
        else:
            self._queue.append(bytearray(data) if len(data) < _SMALL else data)

    def _send(self, data: bytes | bytearray, offset: int) -> int | None:
        """Write `data` from `offset` on; return up to where it was taken, None if we gave up."""
        writer = self._writer
        assert writer is not None
        with memoryview(data) as view:
            try:
                while offset < len(view):
                    with view[offset:] as rest:
                        offset += writer.write(rest)
            except BlockingIOError:
                pass
            except OSError as error:
                self._give_up(error, writer)
                return None
        return offset

    def _swallow_everything(self) -> None:
        # The descriptor stays open until `close`, since a reactor may be watching it.
        self._is_gone = True
        self._queue.clear()
        self._head_offset = self._waiting_bytes = 0
        self._is_congested = False

    def _give_up(self, error: OSError, writer: SharedWriter) -> None:
        self._swallow_everything()
        is_reader_gone = error.errno in (EPIPE, EBADF) or (
            error.errno == EIO and not isinstance(writer, DirectWriter)
        )
        if self._say is not None and not is_reader_gone:
            self._say(
                f"cannot write to {self.name}: {error.strerror or error}; output of "
                "ranks is no longer shown there, the run continues"
            )


class Console:
    """Where people look: `stdout` and `stderr`, which are one outlet if they are one file."""

    def __init__(
        self,
        *,
        stdout_fd: int = 1,
        stderr_fd: int = 2,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.stdout = Outlet(stdout_fd, name="standard output", say=say)
        self.stderr = (
            self.stdout
            if _is_same_file(stdout_fd, stderr_fd)
            else Outlet(stderr_fd, name="standard error", say=say)
        )
        self.outlets = tuple(dict.fromkeys((self.stdout, self.stderr)))

    @property
    def wants_write(self) -> bool:
        """Whether anything still waits to be written."""
        return any(outlet.wants_write for outlet in self.outlets)

    def close(self) -> None:
        """Forget what waits and give back what was opened; descriptors 1 and 2 stay open."""
        for outlet in self.outlets:
            outlet.close()


def _is_same_file(first_fd: int, second_fd: int) -> bool:
    try:
        return os.path.sameopenfile(first_fd, second_fd)
    except OSError:
        return False
