"""What simulated ranks write, on its way to the sinks that the pipes of real ranks feed.

All ranks share one `sys.stdout` and one `sys.stderr`, which find the running rank; a handler of
`logging` that one rank has made writes for the rank that logs. Each chunk goes straight into the
sinks of its stream (`rank_sinks`). There is no pipe to pause: the writer itself blocks until the
console has taken what it was given. Ranks take turns, so the order of lines is deterministic.

Children of a rank are real processes. Their writes to descriptors 1 and 2 come through a pipe of
the rank's, which exists from its first child on, and one thread reads the pipes of all ranks. The
contents of a pipe are shown before a rank writes: a child that a rank has waited for wrote while
that rank had the run token. A child that outlives the attempt finds its pipe closed.

Not included is what C code in this process, `os.system` or `os.posix_spawn` write to descriptors 1
and 2: it goes to the console as it is. So does what a rank prints that has put another file there.

Time: log files retry a full disk after real or virtual time, whichever passes. Progress bars are
redrawn by virtual time alone, so that equal runs print equal lines.
"""

import _thread
import io
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from select import POLLOUT, poll
from selectors import EVENT_READ, DefaultSelector
from typing import cast

from rankwise.base.units import Instant
from rankwise.drivers.real.logs.console import Console, Outlet
from rankwise.drivers.real.logs.file import DiskComplaints
from rankwise.drivers.real.logs.pump import StreamPump, open_stream_pipe
from rankwise.launch.run.job import LogPlan, Streams
from rankwise.launch.run.log_layout import Destinations
from rankwise.launch.run.rank_sinks import RankSinks, StreamSinks
from rankwise.launch.telling.status_line import wipe
from rankwise.simranks.world.ranks import Rank

_start_thread = _thread.start_new_thread
"""A rank finds another function: threads that it starts count as its own."""

_PENDING_BYTES_MAX = 8 << 10
_STANDARD = {Streams.OUT: 1, Streams.ERR: 2}


class RankStream:
    """One stream of one rank: its sinks, and the pipe of its children once there is one.

    Attributes:
        file_bytes: how much was to be written to the log file so far.
    """

    is_congested = False  # as a sink of its own pipe: `take` blocks instead

    def __init__(self, sinks: StreamSinks, outlet: Outlet, owner: "Output") -> None:
        self.sinks = sinks
        self.file_bytes = 0
        self.pump: StreamPump | None = None
        self.children_fd = -1
        """The writing end, for children; ours is closed with the pipe."""
        self._pending = b""
        self._outlet = outlet
        self._owner = owner

    def write(self, data: bytes) -> None:
        """Take what the rank has written; return when the console has it.

        Parts of a line wait for its end: `print` writes each argument by itself.
        """
        self._pending += data
        if data[-1:] == b"\n" or len(self._pending) > _PENDING_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Take what the rank has written so far of a line."""
        # Earlier output of children of any rank comes first.
        self._owner.read_pipes()
        if self._pending:
            data, self._pending = self._pending, b""
            self.take(data, self._owner.now())

    def take(self, chunk: bytes, now: Instant) -> None:
        """Take bytes of the rank or of its children; return when the console has them."""
        owner, outlet = self._owner, self._outlet
        with owner.lock:
            tail, log_file, channel = self.sinks
            tail.take(chunk, now)
            if log_file is not None:
                self.file_bytes += len(chunk)
                # By real time as well: a disk gets room again while no virtual time passes.
                log_file.take(chunk, owner.disk_time())
            if channel is not None:
                channel.take(chunk, now)
        if outlet.wants_write:
            owner.flush(outlet)

    def end(self, now: Instant) -> None:
        """Children's end of the pipe is closed; the rank may write on."""

    def open_pipe(self) -> None:
        """Make the pipe of the rank's children."""
        read_fd, self.children_fd = open_stream_pipe(1)
        self.pump = StreamPump(read_fd, [self])

    def fd_for_children(self, otherwise: int) -> int:
        """Where a forked child writes."""
        return self.children_fd if self.children_fd >= 0 else otherwise

    def read_pipe(self) -> None:
        """Take what children have written by now; one thread at a time."""
        if self.pump is not None:
            self.pump.drain(self._owner.now())

    def finish_line(self) -> None:
        """Show an unfinished last line."""
        self.flush()
        if self.sinks.channel is not None:
            with self._owner.lock:
                self.sinks.channel.end(self._owner.now())
            self._owner.flush_patiently(self._outlet)

    def close(self) -> None:
        """Read the pipe to the end of what is there, and close pipe and file."""
        self.flush()
        if self.pump is not None:
            self.pump.end(self._owner.now())
            self.pump = None
            os.close(self.children_fd)
            self.children_fd = -1
        self.finish_line()
        if self.sinks.log_file is not None:
            self.sinks.log_file.end(self._owner.disk_time())


class Output:
    """The streams of all ranks of one run.

    Args:
        plan: where output goes.
        role: what prefixes call the ranks.
        console: standard output and standard error, at descriptors that no rank can replace.
        standard: the descriptors that ranks know these by.
        complaints: is told of full disks.
        now: virtual time.
        real_now: real time.
        writer: the rank that writes; None if the thread belongs to none.
        is_own: whether a rank has another file than the console at a descriptor.

    Attributes:
        stdout, stderr: what ranks find as `sys.stdout` and `sys.stderr`.
        lock: held while sinks take a chunk, never while anything waits.
        patience_ms: how long a console that takes nothing holds up what is not a rank's; None for
            as long as it likes. A run that is stopped sets it.
    """

    def __init__(
        self,
        plan: LogPlan,
        role: str,
        console: Console,
        standard: tuple[int, int],
        complaints: DiskComplaints,
        *,
        now: Callable[[], Instant],
        real_now: Callable[[], Instant],
        writer: Callable[[], Rank | None],
        is_own: Callable[[Rank, int], bool],
    ) -> None:
        self.console: Console | None = console
        self.now = now
        self.writer, self.is_own = writer, is_own
        # Reentrant: a signal's handler may print while the main thread holds it.
        self.lock = threading.RLock()
        self.patience_ms: int | None = None
        self.pid = os.getpid()
        self.streams: dict[tuple[int, Streams], RankStream] = {}
        self._sinks = RankSinks(plan, role, console, complaints)
        self._real_now = real_now
        self._real_begin = real_now()
        self._past_file_bytes = 0
        self._reader: _PipeReader | None = None
        self.stdout, self.stderr = (
            io.TextIOWrapper(
                cast("io.BytesIO", _Dispatching(self, stream, fd)),
                encoding="utf-8",
                errors="surrogateescape" if stream is Streams.OUT else "backslashreplace",
                line_buffering=True,
                write_through=True,
            )
            for stream, fd in zip((Streams.OUT, Streams.ERR), standard, strict=True)
        )

    def disk_time(self) -> Instant:
        """Time for disks that may get room again: real and virtual time added up."""
        return Instant(self.now() + self._real_now() - self._real_begin)

    def flush(self, outlet: Outlet) -> None:
        """Block until the console has taken what it was given."""
        self._flush(outlet, None)

    def flush_patiently(self, outlet: Outlet) -> None:
        """The same for what is not a rank: it waits no longer than `patience_ms`."""
        if not self._flush(outlet, self.patience_ms):
            self.patience_ms = 0  # waited for once, it has taken nothing

    def _flush(self, outlet: Outlet, patience_ms: int | None) -> bool:
        while outlet.wants_write:
            watch = poll()
            watch.register(outlet.fd, POLLOUT)
            if not watch.poll(patience_ms):
                return False
            with self.lock:
                outlet.on_writable()
        return True

    def write_raw(self, stream: Streams, data: bytes) -> None:
        """Write what belongs to no rank."""
        outlet = self.outlet(stream)
        with self.lock:
            outlet.write(data)
        self.flush_patiently(outlet)

    def outlet(self, stream: Streams) -> Outlet:
        """Where the console shows a stream."""
        return self._sinks.outlet(stream)

    def begin_attempt(
        self, size: int, destinations: Destinations, local_rank_of: Callable[[int], int]
    ) -> None:
        """Open the files of an attempt; `destinations` are by rank."""
        self.end_attempt()
        self._sinks.begin_attempt(destinations)
        for rank in range(size):
            for stream in (Streams.OUT, Streams.ERR):
                sinks = self._sinks.make(rank, local_rank_of(rank), stream, directory=rank)
                self.streams[rank, stream] = RankStream(sinks, self.outlet(stream), self)

    def pipes_for_children(self, rank: int) -> tuple[int, int] | None:
        """Where children of a rank write: descriptors for 1 and 2; None if there is no pipe.

        The pipes exist from the first call on.
        """
        try:
            streams = [self.streams[rank, stream] for stream in (Streams.OUT, Streams.ERR)]
        except KeyError:
            return None
        for each in streams:
            if each.pump is None:
                try:
                    each.open_pipe()
                except OSError:  # no descriptors left: its children write past the prefixes
                    return None
                # A thread, because a child writes while its rank waits for it in C with the token.
                self._reader = self._reader or _PipeReader()
                self._reader.add(each)
        return streams[0].children_fd, streams[1].children_fd

    def read_pipes(self) -> None:
        """Take what children of all ranks have written by now."""
        if self._reader is not None:
            self._reader.read_ready()

    def end_rank(self, rank: int) -> None:
        """Take what children of a rank that is over have written, and show its last lines."""
        for stream in (Streams.OUT, Streams.ERR):
            self.streams[rank, stream].finish_line()

    def tail(self, rank: int, stream: Streams, count: int) -> tuple[str, ...]:
        """What a rank last wrote to a stream."""
        found = self.streams.get((rank, stream))
        return () if found is None else found.sinks.tail.lines(count)

    @property
    def byte_count(self) -> int:
        """How many bytes were written for ranks, to consoles and files."""
        to_files = sum(stream.file_bytes for stream in self.streams.values())
        console = self.console
        to_console = 0 if console is None else sum(each.byte_count for each in console.outlets)
        return self._past_file_bytes + to_files + to_console

    def end_attempt(self) -> None:
        """End all streams and close their files."""
        if self._reader is not None:
            self._reader.stop()
            self._reader = None
        # Kept, as the count must only grow: its growth is progress of the rank.
        self._past_file_bytes += sum(stream.file_bytes for stream in self.streams.values())
        for stream in self.streams.values():
            stream.close()
        self.streams.clear()
        self._sinks.end_attempt()

    def leave_console(self) -> None:
        """The run is over: what threads that ranks leave behind print goes past the sinks."""
        self.console = None


class _PipeReader:
    """A thread that reads the pipes of ranks' children.

    It reads as long as the attempt lasts; who stops it reads the rest. A rank reads before it
    writes itself, so that lines come in the order in which ranks had the run token.
    """

    def __init__(self) -> None:
        self._selector = DefaultSelector()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wakeup, EVENT_READ)
        self._is_stopping = False
        # Bare locks, since a rank makes this, and finds others in `threading`.
        self._reading, self._has_ended = _thread.allocate_lock(), _thread.allocate_lock()
        self._has_ended.acquire()
        _start_thread(self._read, ())

    def add(self, stream: RankStream) -> None:
        """Read its pipe, too."""
        assert stream.pump is not None, "opened before"
        self._selector.register(stream.pump.fd, EVENT_READ, stream)

    def stop(self) -> None:
        """Return when the thread reads nothing any more."""
        self._is_stopping = True
        os.eventfd_write(self._wakeup, 1)
        # A rank that was given up may still read here, before it writes.
        with self._has_ended, self._reading:
            self._selector.close()
            os.close(self._wakeup)

    def read_ready(self) -> None:
        """Take what is in the pipes; return when it is taken, by whichever thread."""
        with self._reading:  # a pipe that another thread has just emptied is ready no more
            if self._selector.get_map() is None:  # closed: a rank was given up, and writes on
                return
            for key, _ in self._selector.select(0):
                stream: RankStream | None = key.data
                if stream is not None:
                    stream.read_pipe()

    def _read(self) -> None:
        try:
            while not self._is_stopping:
                self._selector.select()
                self.read_ready()
        finally:
            self._has_ended.release()


class _Dispatching(io.RawIOBase):
    """Bytes to the stream of the rank that runs; to the console itself if none does."""

    def __init__(self, output: Output, stream: Streams, fd: int) -> None:
        super().__init__()
        self._output = output
        self._stream = stream
        self._fd = fd
        self._numbers = tuple({fd, _STANDARD[stream]})

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return False  # as a pipe, which ranks of real runs write to

    def flush(self) -> None:
        output = self._output
        if output.console is not None and os.getpid() == output.pid:
            rank = output.writer()
            stream = None if rank is None else output.streams.get((rank.number, self._stream))
            if stream is not None:
                stream.flush()

    def close(self) -> None:
        """Stay open: it is shared."""

    def write(self, data: "bytes | bytearray | memoryview", /) -> int:  # type: ignore[override]
        data, output = bytes(data), self._output
        if output.console is None:
            write_all(self._fd, data)
            return len(data)
        rank = output.writer()
        if rank is None:
            output.write_raw(self._stream, data)
            return len(data)
        for number in self._numbers:
            # The rank has redirected this descriptor, as by `os.dup2`: its file gets the bytes.
            if output.is_own(rank, number):
                _write(number, data)
                return len(data)
        stream = output.streams.get((rank.number, self._stream))
        if os.getpid() != output.pid:  # a child's copies of the sinks are not drained
            write_all(self._fd if stream is None else stream.fd_for_children(self._fd), data)
        # A killed process writes nothing: what its thread prints while it unwinds is dropped.
        elif rank.is_to_end:
            pass
        elif stream is None:
            output.write_raw(self._stream, data)
        else:
            stream.write(data)
        return len(data)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, or as much as can be written."""
    wipe()
    with suppress(OSError):
        _write(fd, data)


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
