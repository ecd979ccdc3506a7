"""What real processes write arrives: all of it, in whole lines, on pipes and on terminals."""

import contextlib
import os
import pty
import random
import signal
import subprocess
import sys
import threading
import tty
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankwise.base.units import SECOND, Duration, after
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.logs import flow
from rankwise.drivers.real.logs.channel import ConsoleChannel
from rankwise.drivers.real.logs.console import Console
from rankwise.drivers.real.logs.file import DiskComplaints, LogFile
from rankwise.drivers.real.logs.flow import LogFlow
from rankwise.drivers.real.logs.pump import StreamPump, open_stream_pipe
from rankwise.drivers.real.logs.tail import Tail
from rankwise.drivers.real.reactor import Reactor

if TYPE_CHECKING:
    from rankwise.drivers.real.logs.pump import Sink

pytestmark = pytest.mark.system

SOON = Duration(30 * SECOND)
"""No test waits this long: it is the deadline after which something is wrong."""

# Writes lines of all sizes in pieces of all sizes, on both streams, and ends without a newline.
WRITER = """
import os, random, sys
rank = int(sys.argv[1])
chance = random.Random(rank)
for fd, name in ((1, "out"), (2, "err")):
    lines = [b"%s %d " % (name.encode(), number) + b"ab\\0\\xff"[: chance.randrange(5)] * 10
             for number in range(2000)]
    lines[1000] += b"x" * 1_000_000
    content = memoryview(b"\\n".join(lines))
    while content:
        content = content[os.write(fd, content[: chance.choice((1, 100, 5000, 100_000))]) :]
"""

# Leaves a child behind that inherits both streams, and dies.
ORPHAN_MAKER = """
import os, signal
child = os.fork()
if not child:
    signal.pause()
os.write(1, b"%d\\n" % child)
os.write(2, b"last words")
os.kill(os.getpid(), signal.SIGKILL)
"""


def lines_of(rank: int) -> tuple[list[bytes], list[bytes]]:
    """What WRITER writes: it makes the same choices."""
    chance = random.Random(rank)
    streams = []
    for name in (b"out", b"err"):
        lines = [
            b"%s %d " % (name, number) + b"ab\0\xff"[: chance.randrange(5)] * 10
            for number in range(2000)
        ]
        lines[1000] += b"x" * 1_000_000
        streams.append(lines)
        rest = len(b"\n".join(lines))
        while rest > 0:
            rest -= min(rest, chance.choice((1, 100, 5000, 100_000)))
    return streams[0], streams[1]


class Stage:
    """Workers, their pumps, and a console that a thread reads."""

    def __init__(self, console_reader: int, console_writer: int, directory: Path) -> None:
        self.clock = SystemClock()
        self.reactor = Reactor(self.clock)
        self.console = Console(stdout_fd=console_writer, stderr_fd=console_writer)
        self.flow = LogFlow(self.reactor, self.console, self.clock)
        self.directory = directory
        self.processes: list[subprocess.Popen[bytes]] = []
        self.running: set[StreamPump] = set()
        self.shown = b""
        self.reader = threading.Thread(target=self._read_console, args=(console_reader,))
        self.reader.start()

    def _read_console(self, fd: int) -> None:
        chunks = deque[bytes]()
        with contextlib.suppress(OSError):  # a terminal without users says EIO
            while chunk := os.read(fd, 1 << 16):
                chunks.append(chunk)
        os.close(fd)
        self.shown = b"".join(chunks)

    def start(self, rank: int, script: str) -> list[StreamPump]:
        pumps = []
        writers = []
        for name in ("stdout", "stderr"):
            read_fd, write_fd = open_stream_pipe(6)
            path = self.directory / f"{rank}-{name}.log"
            sinks: list[Sink] = [
                LogFile(str(path), DiskComplaints(pytest.fail)),
                Tail(),
                ConsoleChannel(self.console.stdout, prefix=f"[{rank}]:"),
            ]
            pump = StreamPump(read_fd, sinks)
            self.running.add(pump)
            self.flow.add(pump, partial(self.running.discard, pump))
            pumps.append(pump)
            writers.append(write_fd)
        command = [sys.executable, "-S", "-c", script, str(rank)]
        self.processes.append(subprocess.Popen(command, stdout=writers[0], stderr=writers[1]))
        for write_fd in writers:
            os.close(write_fd)
        return pumps

    def run_until(self, condition: Callable[[], bool]) -> None:
        deadline = after(self.clock.now(), SOON)
        while not condition():
            assert self.clock.now() < deadline
            self.reactor.run_once(deadline)

    def close(self, console_writer: int) -> bytes:
        """End everything; return what the console has shown."""
        for pump in self.running.copy():
            self.flow.finish(pump)
        for process in self.processes:
            process.kill()
            process.wait()
        self.run_until(lambda: not self.console.wants_write)
        self.reactor.close()
        self.console.close()
        os.close(console_writer)
        self.reader.join()
        return self.shown


@pytest.fixture(params=["pipe", "terminal"])
def console_ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    if request.param == "pipe":
        yield os.pipe()
        return
    reader, terminal = pty.openpty()
    tty.setraw(terminal)
    yield reader, terminal


def test_all_that_workers_write_arrives_in_whole_lines(
    console_ends: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine writers get no processor for so long that a terminal would show the
    # beginnings of their lines.
    monkeypatch.setattr(flow, "QUIET", SOON)
    stage = Stage(*console_ends, tmp_path)
    is_terminal = os.isatty(console_ends[1])
    for rank in range(3):
        stage.start(rank, WRITER)

    stage.run_until(lambda: not stage.running)
    shown = stage.close(console_ends[1]).split(b"\n")

    assert shown.pop() == b""
    for rank in range(3):
        for name, lines in zip(("stdout", "stderr"), lines_of(rank), strict=True):
            assert (tmp_path / f"{rank}-{name}.log").read_bytes() == b"\n".join(lines)
            prefix = b"[%d]:%s" % (rank, name.removeprefix("std").encode())
            on_console = [line for line in shown if line.startswith(prefix)]
            expected = [b"[%d]:%s" % (rank, line) for line in lines]
            if is_terminal:
                expected = [line.replace(b"\0", b"^@") for line in expected]
            assert on_console == expected
    assert len(shown) == 3 * 2 * 2000


def test_last_words_are_heard_though_a_grandchild_holds_the_pipe_open(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    stage = Stage(reader, writer, tmp_path)
    pumps = stage.start(0, ORPHAN_MAKER)
    (process,) = stage.processes

    process.wait()
    for pump in pumps:
        stage.flow.finish(pump)
        stage.running.discard(pump)

    shown = stage.close(writer)
    orphan = int((tmp_path / "0-stdout.log").read_bytes())
    os.kill(orphan, signal.SIGKILL)
    assert sorted(shown.split(b"\n")) == [b"", b"[0]:%d" % orphan, b"[0]:last words"]
    assert (tmp_path / "0-stderr.log").read_bytes() == b"last words"
