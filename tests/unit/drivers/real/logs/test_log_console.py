"""The console: never blocks, never tears, never ends a job."""

import contextlib
import os
import pty
import socket
import tty
from collections.abc import Iterator
from fcntl import F_SETPIPE_SZ, fcntl
from itertools import cycle
from pathlib import Path
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.units import SECOND, Duration, Instant
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.logs.channel import ConsoleChannel
from rankwise.drivers.real.logs.console import CONGESTED_BYTES, Console, Outlet
from rankwise.drivers.real.logs.shared_fd import (
    PIPE_BUF,
    CautiousWriter,
    ReopenedWriter,
    SharedWriter,
    SocketWriter,
)

SOON = Duration(20 * SECOND)
"""No test waits this long: it is the deadline after which something is wrong."""

CLOCK = SystemClock()


class Pipe:
    """A pipe whose reader reads when told to."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        fcntl(self.writer, F_SETPIPE_SZ, PIPE_BUF)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_reader()
        os.close(self.writer)

    def close_reader(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.reader)
        self.reader = -1


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    with Pipe() as pipe:
        yield pipe


def read_while_it_waits(outlet: Outlet, reader: int, count: int = 1 << 16) -> bytes:
    """Everything that the outlet has written or still wants to write."""
    chunks = []
    while outlet.wants_write:
        chunks.append(os.read(reader, count))
        outlet.on_writable()
    os.set_blocking(reader, False)
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(reader, count):
            chunks.append(chunk)
    return b"".join(chunks)


def test_a_reader_that_does_not_read_makes_nobody_wait_and_loses_nothing(pipe: Pipe) -> None:
    outlet = Outlet(pipe.writer)
    lines = [b"%07d %s\n" % (number, b"x" * 500) for number in range(6000)]

    for line in lines:
        outlet.write(line)

    assert outlet.wants_write
    # Or every line would cost a system call of its own.
    assert len(outlet._queue) < 100
    assert read_while_it_waits(outlet, pipe.reader) == b"".join(lines)
    assert not outlet.wants_write
    outlet.close()


def test_the_shared_descriptor_stays_blocking_and_open(pipe: Pipe) -> None:
    outlet = Outlet(pipe.writer)

    outlet.write(b"x" * 100_000)
    assert os.get_blocking(pipe.writer)
    outlet.close()

    assert os.read(pipe.reader, 10) == b"x" * 10
    os.fstat(pipe.writer)


def test_congestion_begins_above_the_bound_and_ends_well_below_it(pipe: Pipe) -> None:
    outlet = Outlet(pipe.writer, congested_bytes=50_000, relaxed_bytes=10_000)
    announced: list[bool] = []
    outlet.on_blocked = lambda: announced.append(outlet.wants_write)

    outlet.write(b"x" * 50_000)
    assert not outlet.is_congested
    outlet.write(b"x" * 50_000)
    assert outlet.is_congested
    remaining = 100_000
    while outlet.is_congested:
        remaining -= len(os.read(pipe.reader, 1000))
        outlet.on_writable()

    assert announced == [True]
    assert 10_000 - PIPE_BUF <= remaining <= 10_000 + PIPE_BUF
    outlet.close()


def test_a_reader_that_has_gone_is_met_with_silence(pipe: Pipe) -> None:
    said: list[str] = []
    outlet = Outlet(pipe.writer, say=said.append)
    outlet.write(b"x" * (3 * CONGESTED_BYTES))
    assert outlet.is_congested

    pipe.close_reader()
    outlet.on_writable()

    assert outlet.is_gone
    assert not outlet.wants_write
    assert not outlet.is_congested
    outlet.write(b"to nobody\n")
    assert said == []
    outlet.close()


def test_a_console_that_was_never_there_is_met_with_silence() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)

    outlet = Outlet(writer)
    outlet.write(b"to nobody\n")

    assert outlet.is_gone
    assert not outlet.wants_write


def test_a_console_on_a_full_disk_is_told_once() -> None:
    said: list[str] = []
    fd = os.open("/dev/full", os.O_WRONLY)
    outlet = Outlet(fd, name="standard output", say=said.append)

    outlet.write(b"one\n")
    outlet.write(b"two\n")

    assert outlet.is_gone
    (sentence,) = said
    assert sentence.startswith("cannot write to standard output: No space left on device; ")
    outlet.close()
    os.close(fd)


def test_a_regular_file_is_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "console.txt"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    outlet = Outlet(fd)

    outlet.write(b"x" * 1_000_000)

    assert not outlet.wants_write
    assert path.stat().st_size == 1_000_000
    outlet.close()
    os.close(fd)


def test_a_terminal_is_never_waited_for_and_shows_everything() -> None:
    reader, terminal = pty.openpty()
    tty.setraw(terminal)
    console = Console(stdout_fd=terminal, stderr_fd=os.dup(terminal))
    lines = [b"line %d\n" % number for number in range(20_000)]

    assert console.stdout is console.stderr
    assert console.stdout.is_terminal
    for line in lines:
        console.stdout.write(line)

    assert console.wants_write
    assert os.get_blocking(terminal)
    shown = b""
    while len(shown) < len(b"".join(lines)):
        shown += os.read(reader, 1 << 16)
        console.stdout.on_writable()
    assert shown == b"".join(lines)
    console.close()


def test_a_terminal_that_is_closed_is_met_with_silence() -> None:
    reader, terminal = pty.openpty()
    said: list[str] = []
    console = Console(stdout_fd=terminal, stderr_fd=terminal, say=said.append)
    console.stdout.write(b"x\n" * 100_000)

    os.close(reader)
    console.stdout.on_writable()

    assert console.stdout.is_gone
    assert said == []
    console.close()
    os.close(terminal)


def test_different_files_have_outlets_of_their_own(pipe: Pipe) -> None:
    with Pipe() as other:
        console = Console(stdout_fd=pipe.writer, stderr_fd=other.writer)

        console.stderr.write(b"error\n")
        console.stdout.write(b"output\n")

        assert os.read(pipe.reader, 100) == b"output\n"
        assert os.read(other.reader, 100) == b"error\n"
        console.close()


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3000)), min_size=1, max_size=30),
    st.lists(st.integers(1, 5000), min_size=1, max_size=5),
)
def test_lines_of_several_streams_are_never_torn_or_lost(
    writes: list[tuple[int, int]], reads: list[int]
) -> None:
    with Pipe() as pipe:
        outlet = Outlet(pipe.writer)
        channels = [ConsoleChannel(outlet, prefix=f"[{rank}]:") for rank in range(3)]
        expected: list[list[bytes]] = [[], [], []]
        read_sizes = cycle(reads)
        console = b""
        for number, (rank, length) in enumerate(writes):
            line = b"%d " % number + b"abc"[rank : rank + 1] * length
            expected[rank].append(b"[%d]:%s" % (rank, line))
            # Each line comes in two chunks, the second with the beginning of another line.
            channels[rank].take(line, Instant(0))
            if outlet.wants_write:
                console += os.read(pipe.reader, next(read_sizes))
                outlet.on_writable()
            channels[rank].take(b"\n", Instant(0))
        console += read_while_it_waits(outlet, pipe.reader)
        outlet.close()

    shown = console.split(b"\n")[:-1]
    assert len(shown) == len(writes)
    for rank in range(3):
        assert [line for line in shown if line.startswith(b"[%d]:" % rank)] == expected[rank]


def filled_up(writer: SharedWriter) -> int:
    """Write until nothing more is taken; return how much was."""
    taken = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            taken += writer.write(memoryview(b"x" * 10_000))
    return taken


def test_a_pipe_that_cannot_be_opened_anew_is_asked_before_each_write(pipe: Pipe) -> None:
    writer = CautiousWriter(pipe.writer)

    assert filled_up(writer) == PIPE_BUF

    os.read(pipe.reader, PIPE_BUF)
    assert writer.write(memoryview(b"y" * 10_000)) == PIPE_BUF
    assert os.get_blocking(pipe.writer)


def test_a_pipe_that_is_opened_anew_takes_what_fits(pipe: Pipe) -> None:
    writer = ReopenedWriter(pipe.writer)

    assert filled_up(writer) == PIPE_BUF

    assert os.get_blocking(pipe.writer)
    writer.close()


def test_a_socket_is_never_waited_for() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outlet = Outlet(ours.fileno())
        writer = outlet._writer
        assert isinstance(writer, SocketWriter)

        taken = filled_up(writer)

        assert taken > 0
        assert ours.getblocking()
        assert os.get_blocking(ours.fileno())
        outlet.close()
        theirs.shutdown(socket.SHUT_RDWR)


def test_a_socket_whose_peer_has_gone_is_met_with_silence() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        said: list[str] = []
        outlet = Outlet(ours.fileno(), say=said.append)
        theirs.close()

        outlet.write(b"to nobody\n")

        assert outlet.is_gone
        assert said == []
        outlet.close()
