"""What simulated ranks write: whole lines with a prefix on the console, and log files.

All ranks share one `sys.stdout` and one `sys.stderr`, which look for the rank that runs; a handler
of `logging` that one rank has made thereby writes as whichever rank logs. What C code or a child
process writes to descriptors 1 and 2 passes by here, and so does what a rank prints that has put
another file in the place of one of them.
"""

import io
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from errno import EBADF, EPIPE
from typing import BinaryIO, cast

from rankwise.base.units import Instant
from rankwise.drivers.real.logs.file import DiskComplaints
from rankwise.drivers.real.logs.lines import LineSplitter, prefixed
from rankwise.drivers.real.logs.stamps import stamped
from rankwise.drivers.real.logs.tail import Tail
from rankwise.launch.job import LogPlan, Streams
from rankwise.launch.log_layout import Destinations, console_streams, line_prefix

_NOW = Instant(0)
"""Progress bars are shown whenever their line is finished: output has no clock here."""


class Console:
    """Standard output or standard error of this process, for all ranks.

    Args:
        fd: the descriptor.
        outlet: another one for the same, which the ranks do not know: they may replace `fd`. It
            is closed at the end of the run, and `fd` takes its place.
        name: for complaints.
        say: tells the user, once, that nothing can be written there.

    Attributes:
        fd: the same; what a process that a rank has forked writes to.
        byte_count: how much was to be written so far.
    """

    def __init__(self, fd: int, outlet: int, name: str, say: Callable[[str], None]) -> None:
        self.fd = fd
        self.outlet = outlet
        self._pid = os.getpid()
        self.byte_count = 0
        self._name = name
        self._say: Callable[[str], None] | None = say

    def write(self, data: bytes) -> None:
        """Write all of it; a reader that is gone does not want to hear."""
        self.byte_count += len(data)
        try:
            _write(self.outlet if os.getpid() == self._pid else self.fd, data)
        except OSError as error:
            say, self._say = self._say, None
            if say is not None and error.errno not in (EPIPE, EBADF):
                say(
                    f"cannot write to {self._name}: {error.strerror or error}; what ranks print is"
                    " not shown there, the run goes on"
                )


class RankStream:
    """One stream of one rank.

    Args:
        console: where its lines go; None keeps them from there.
        prefix: stands before each of them.
        file: takes its bytes as they are.
        path: the file's name, for complaints.
        needles: lines that contain one of these go to `filtered` as well.

    Attributes:
        file_bytes: how much was to be written to the file so far.
    """

    def __init__(
        self,
        *,
        console: Console | None,
        prefix: bytes,
        file: BinaryIO | None,
        path: str,
        complaints: DiskComplaints,
        needles: tuple[bytes, ...] = (),
        filtered: BinaryIO | None = None,
    ) -> None:
        self.tail = Tail()
        self.file_bytes = 0
        self._console = console
        self._prefix = prefix
        self._file = file
        self._path = path
        self._complaints = complaints
        self._needles = needles
        self._filtered = filtered
        self._splitter = LineSplitter()

    def write(self, data: bytes) -> None:
        """Take what the rank has written."""
        self.tail.take(data, _NOW)
        if self._file is not None:
            self.file_bytes += len(data)
            try:
                self._file.write(data)
            except OSError as error:
                self._complaints.complain(self._path, error)
        if lines := self._splitter.feed(data, _NOW):
            self._show(lines)

    def close(self) -> None:
        """Show an unfinished last line."""
        if lines := self._splitter.flush():
            self._show(lines)

    def _show(self, lines: bytes) -> None:
        if self._filtered is not None:
            for line in lines.splitlines(keepends=True):
                if any(needle in line for needle in self._needles):
                    self._filtered.write(line)
        if self._console is not None:
            self._console.write(prefixed(lines, stamped(self._prefix)))


class Output:
    """The streams of all ranks of one run.

    Args:
        plan: where output goes.
        consoles: standard output and standard error.
        whose: the number of the rank that writes; None if it belongs to none.
        is_dropped: whether what is written now is of a rank that is over.
        is_own: whether the rank that runs has another file than the console at a descriptor.

    Attributes:
        stdout, stderr: what ranks find as `sys.stdout` and `sys.stderr`.
    """

    def __init__(
        self,
        plan: LogPlan,
        consoles: tuple[Console, Console],
        complaints: DiskComplaints,
        whose: Callable[[], int | None],
        is_dropped: Callable[[], bool],
        *,
        is_own: Callable[[int], bool],
    ) -> None:
        self._plan = plan
        self._consoles = consoles
        self._complaints = complaints
        self._files = ExitStack()
        self._streams: dict[tuple[int, Streams], RankStream] = {}
        self.stdout, self.stderr = (
            io.TextIOWrapper(
                cast(
                    "BinaryIO",
                    _Dispatching(self._streams, stream, console, whose, is_dropped, is_own=is_own),
                ),
                encoding="utf-8",
                errors="surrogateescape" if stream is Streams.OUT else "backslashreplace",
                line_buffering=True,
                write_through=True,
            )
            for stream, console in zip((Streams.OUT, Streams.ERR), consoles, strict=True)
        )

    def begin_attempt(
        self, size: int, destinations: Destinations, role: str, local_rank_of: Callable[[int], int]
    ) -> None:
        """Open the files of an attempt; `destinations` are by rank."""
        self.end_attempt()
        plan = self._plan
        for rank in range(size):
            for stream, console, paths, needles, filtered in (
                (Streams.OUT, self._consoles[0], destinations.stdouts, plan.stdout_filters,
                 destinations.filtered_stdout),
                (Streams.ERR, self._consoles[1], destinations.stderrs, plan.stderr_filters,
                 destinations.filtered_stderr),
            ):  # fmt: skip
                local_rank = local_rank_of(rank)
                is_shown = bool(console_streams(plan, local_rank) & stream)
                prefix = line_prefix(
                    plan, role=role, local_rank=local_rank, rank=rank, stream=stream
                )
                path = paths.get(rank, "")
                self._streams[rank, stream] = RankStream(
                    console=console if is_shown else None,
                    prefix=prefix.encode(errors="surrogateescape"),
                    file=self._open(path),
                    path=path,
                    complaints=self._complaints,
                    needles=tuple(needle.encode() for needle in needles),
                    filtered=self._open(filtered),
                )

    def end_rank(self, rank: int) -> None:
        """Show the unfinished last lines of a rank that is over."""
        for stream in (Streams.OUT, Streams.ERR):
            self._streams[rank, stream].close()

    def tail(self, rank: int, stream: Streams, count: int) -> tuple[str, ...]:
        """What a rank last wrote to a stream."""
        found = self._streams.get((rank, stream))
        return () if found is None else found.tail.lines(count)

    @property
    def byte_count(self) -> int:
        """How much ranks have printed: what has been written for it, to consoles and files."""
        to_files = sum(stream.file_bytes for stream in self._streams.values())
        return to_files + sum(console.byte_count for console in self._consoles)

    def end_attempt(self) -> None:
        """Close the files."""
        self._streams.clear()
        self._files.close()

    def _open(self, path: str) -> BinaryIO | None:
        if not path:
            return None
        try:
            return self._files.enter_context(open(path, "ab", buffering=0))
        except OSError as error:
            self._complaints.complain(path, error)
            return None


class _Dispatching(io.RawIOBase):
    """Bytes to the stream of the rank that runs; to the console itself if none does."""

    def __init__(
        self,
        streams: dict[tuple[int, Streams], RankStream],
        stream: Streams,
        console: Console,
        whose: Callable[[], int | None],
        is_dropped: Callable[[], bool],
        *,
        is_own: Callable[[int], bool],
    ) -> None:
        super().__init__()
        self._is_own = is_own
        self._streams = streams
        self._stream = stream
        self._console = console
        self._whose = whose
        self._is_dropped = is_dropped

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._console.fd

    def isatty(self) -> bool:
        return False  # as a pipe, which ranks of real runs write to

    def close(self) -> None:
        """Stay open: it is everybody's."""

    def write(self, data: "bytes | bytearray | memoryview", /) -> int:  # type: ignore[override]
        data = bytes(data)
        if self._is_dropped():
            return len(data)
        for number in {self._console.fd, int(self._stream)}:
            if self._is_own(number):
                _write(number, data)
                return len(data)
        rank = self._whose()
        stream = None if rank is None else self._streams.get((rank, self._stream))
        if stream is None:
            self._console.write(data)
        else:
            stream.write(data)
        return len(data)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, or as much as can be written."""
    with suppress(OSError):
        _write(fd, data)


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
