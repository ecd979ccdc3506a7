"""Pumps: from a worker's pipe to its sinks, at the console's pace."""

import contextlib
import os
from collections.abc import Iterator
from fcntl import F_GETPIPE_SZ, fcntl

import pytest

from rankwise.base.units import SECOND, Duration, Instant, after
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.logs.channel import ConsoleChannel
from rankwise.drivers.real.logs.console import Console
from rankwise.drivers.real.logs.flow import LogFlow
from rankwise.drivers.real.logs.pump import StreamPump, open_stream_pipe
from rankwise.drivers.real.reactor import Reactor

NOW = Instant(7 * SECOND)
SOON = Duration(20 * SECOND)
"""No test waits this long: it is the deadline after which something is wrong."""


class Collector:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.is_congested = False
        self.taken = b""
        self.ends = 0

    def take(self, chunk: bytes, now: Instant) -> None:  # noqa: ARG002
        self.taken += chunk

    def end(self, now: Instant) -> None:  # noqa: ARG002
        self.ends += 1


class Worker:
    """The writing end of a pump's pipe, which a worker would have."""

    def __init__(self) -> None:
        self.sink = Collector()
        read_fd, self.fd = open_stream_pipe(1)
        self.pump = StreamPump(read_fd, [self.sink])

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()
    worker.pump.end(NOW)


def test_chunks_reach_every_sink_and_are_counted(worker: Worker) -> None:
    os.write(worker.fd, b"partial")

    worker.pump.on_readable(NOW)

    assert worker.sink.taken == b"partial"
    assert worker.pump.byte_count == len(b"partial")
    assert not worker.pump.is_ended


def test_a_false_alarm_is_harmless(worker: Worker) -> None:
    worker.pump.on_readable(NOW)

    assert worker.sink.taken == b""
    assert worker.pump.byte_count == 0
    assert not worker.pump.is_ended


def test_the_end_of_the_stream_is_told_to_the_sinks_once(worker: Worker) -> None:
    os.write(worker.fd, b"last words")
    worker.close()

    worker.pump.on_readable(NOW)
    worker.pump.on_readable(NOW)
    worker.pump.on_readable(NOW)
    worker.pump.end(NOW)
    worker.pump.end(NOW)

    assert worker.sink.taken == b"last words"
    assert worker.pump.is_ended
    assert worker.sink.ends == 1


def test_draining_takes_what_is_there_though_the_pipe_stays_open(worker: Worker) -> None:
    worker.sink.is_congested = True
    content = bytes(range(256)) * 4000
    os.set_blocking(worker.fd, False)
    written = os.write(worker.fd, content)

    worker.pump.drain(NOW)

    assert worker.sink.taken == content[:written]
    assert not worker.pump.is_ended


def test_draining_takes_no_more_than_was_there_when_it_began() -> None:
    read_fd, write_fd = open_stream_pipe(1)

    class Chatterbox(Collector):
        """Whatever is read makes somebody write again, for ever."""

        def take(self, chunk: bytes, now: Instant) -> None:
            super().take(chunk, now)
            if len(self.taken) < 1000:
                os.write(write_fd, b"again\n")

    sink = Chatterbox()
    pump = StreamPump(read_fd, [sink])
    os.write(write_fd, b"first\n")

    pump.drain(NOW)

    assert sink.taken == b"first\n"
    pump.end(NOW)
    assert sink.taken == b"first\nagain\n"
    os.close(write_fd)


def test_ending_takes_the_last_bytes_of_a_pipe_without_end(worker: Worker) -> None:
    os.write(worker.fd, b"last words")

    worker.pump.end(NOW)

    assert worker.sink.taken == b"last words"
    assert worker.sink.ends == 1
    with pytest.raises(BrokenPipeError):
        os.write(worker.fd, b"no server listens")


def test_a_pump_is_congested_when_a_sink_is(worker: Worker) -> None:
    assert not worker.pump.is_congested
    worker.sink.is_congested = True
    assert worker.pump.is_congested


@pytest.mark.parametrize(
    ("stream_count", "smallest"), [(1, 64 << 10), (8, 64 << 10), (100, 4096), (1000, 4096)]
)
def test_pipes_are_large_but_not_greedy(stream_count: int, smallest: int) -> None:
    read_fd, write_fd = open_stream_pipe(stream_count)

    capacity = fcntl(write_fd, F_GETPIPE_SZ)

    assert smallest <= capacity <= 1 << 20
    assert capacity * stream_count <= max(16 << 20, stream_count * (64 << 10))
    os.close(read_fd)
    os.close(write_fd)


class Flow:
    """A reactor with a console that is a pipe, read by the test."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.reactor = Reactor(self.clock)
        self.console_reader, self.console_writer = os.pipe()
        os.set_blocking(self.console_reader, False)
        self.console = Console(stdout_fd=self.console_writer, stderr_fd=self.console_writer)
        self.flow = LogFlow(self.reactor, self.console, self.clock)
        self.ended: list[StreamPump] = []

    def start(self, prefix: str) -> tuple[StreamPump, int]:
        read_fd, write_fd = open_stream_pipe(100)
        pump = StreamPump(read_fd, [ConsoleChannel(self.console.stdout, prefix=prefix)])
        self.flow.add(pump, lambda: self.ended.append(pump))
        os.set_blocking(write_fd, False)
        return pump, write_fd

    def run_what_is_ready(self) -> None:
        self.reactor.run_once(self.clock.now())

    def read_console(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(self.console_reader, 1 << 20)
        return b""

    def run_and_read_until_ended(self, count: int) -> bytes:
        shown = b""
        deadline = after(self.clock.now(), SOON)
        while len(self.ended) < count or self.console.wants_write:
            assert self.clock.now() < deadline
            shown += self.read_console()
            self.reactor.run_once(deadline)
        return shown + self.read_console()


@pytest.fixture
def flow() -> Iterator[Flow]:
    flow = Flow()
    yield flow
    flow.reactor.close()
    flow.console.close()
    os.close(flow.console_reader)
    os.close(flow.console_writer)


def test_a_lone_line_appears_without_waiting_for_anything(flow: Flow) -> None:
    pump, write_fd = flow.start("[0]:")

    os.write(write_fd, b"hello\n")
    flow.reactor.run_once(after(flow.clock.now(), SOON))

    assert flow.read_console() == b"[0]:hello\n"
    flow.flow.finish(pump)
    os.close(write_fd)


def test_a_stream_that_ends_is_closed_and_told(flow: Flow) -> None:
    pump, write_fd = flow.start("[0]:")
    os.write(write_fd, b"no newline")
    os.close(write_fd)

    shown = flow.run_and_read_until_ended(1)

    assert shown == b"[0]:no newline\n"
    assert flow.ended == [pump]
    assert pump.fd == -1


def test_a_stream_that_is_finished_shows_its_last_line_and_is_not_told(flow: Flow) -> None:
    pump, write_fd = flow.start("[0]:")
    os.write(write_fd, b"no newline")

    flow.flow.finish(pump)
    flow.flow.finish(pump)

    assert flow.read_console() == b"[0]:no newline\n"
    assert flow.ended == []
    os.close(write_fd)


def test_a_slow_console_makes_the_workers_wait_and_loses_nothing(flow: Flow) -> None:
    workers = [flow.start(f"[{rank}]:")[1] for rank in range(2)]
    written = [0, 0]
    chunk = b"x" * 999 + b"\n"

    # Nobody reads the console: after a while, the pipes of the workers are full for good.
    def is_progress_made() -> bool:
        before = sum(written)
        for rank, write_fd in enumerate(workers):
            with contextlib.suppress(BlockingIOError):
                while True:
                    written[rank] += os.write(write_fd, chunk)
        flow.run_what_is_ready()
        return sum(written) > before

    while is_progress_made():
        assert sum(written) < 50_000_000
    assert flow.console.stdout.is_congested
    for write_fd in workers:
        os.close(write_fd)
    shown = flow.run_and_read_until_ended(2)

    for rank in range(2):
        lines = [line for line in shown.split(b"\n") if line.startswith(b"[%d]:" % rank)]
        assert sum(len(line) - 4 + 1 for line in lines) == written[rank] + (
            written[rank] % 1000 > 0
        )
    assert flow.ended != []


def test_a_console_that_goes_away_lets_the_workers_run_on(flow: Flow) -> None:
    _, write_fd = flow.start("[0]:")
    while not flow.console.stdout.is_congested:
        os.write(write_fd, b"x" * 999 + b"\n")
        flow.run_what_is_ready()
    # The test's own reading end is the only one: from here on, nobody reads.
    os.dup2(flow.console_writer, flow.console_reader)
    os.close(write_fd)

    deadline = after(flow.clock.now(), SOON)
    while not flow.ended:
        assert flow.clock.now() < deadline
        flow.reactor.run_once(deadline)

    assert flow.console.stdout.is_gone
