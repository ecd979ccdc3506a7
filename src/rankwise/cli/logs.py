"""`rankwise logs`: what the ranks of a run write, from another terminal.

The agent has the end of each stream in memory, and knows the log files where there are any; it
sends what is read from then on. Lines are put together here.
"""

import base64
import os
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from rankwise.base.units import SECOND, Duration, Instant
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.cli.runs_here import RUN_ARGUMENT, agents_called, answers, deadline_after, name_of
from rankwise.drivers.real.logs.lines import LineSplitter, prefixed
from rankwise.drivers.real.logs.terminal import harmless

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rankwise.launch.control.client import RunSummary

PATIENCE = Duration(10 * SECOND)
_CHUNK_BYTES = 1 << 20


class RankType(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """A rank's number."""

    name = "rank"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the text."""
        if not str(value).isdecimal():
            self.fail(f"{value!r} is not a rank, expected one number such as 0 or 3", param, ctx)
        return int(value)


@click.command("logs", context_settings=CONTEXT_SETTINGS)
@RUN_ARGUMENT
@click.option("--rank", type=RankType(), metavar="N", help="Show only this rank.")
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the run ends.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0),
    metavar="N",
    help="Show only the last N lines of a stream.",
)
def logs(run: str | None, *, rank: int | None, follow: bool, lines: int | None) -> None:
    """Show the output of the ranks of RUN: their log files, or the last 32 KiB of each stream.

    RUN is a name that `rankwise ps` shows, the beginning of one, or the pid of an agent.
    Leave it out if there is one run. On several nodes, it shows the ranks on this machine.
    """
    from rankwise.launch.control.client import expect_over, listen_to_all  # noqa: PLC0415  # not for --help
    from rankwise.launch.control.server import ControlRequest  # noqa: PLC0415  # the same

    agents = agents_called(run)
    name = name_of(agents[0])
    request = ControlRequest("logs", rank=rank, follow=follow)
    shown = LogPrinter(has_prefix=rank is None)
    replies = listen_to_all(agents, request, deadline_after(PATIENCE))
    show(answers(replies, tells=rank is None), shown, lines)  # each rank is of one agent
    shown.end()
    if follow:
        for agent in agents:
            expect_over(agent)
        click.echo(f"rankwise: {name} has ended", err=True)


def show(
    replies: "Iterable[tuple[RunSummary, dict[str, Any]]]", shown: "LogPrinter", lines: int | None
) -> None:
    """Show what agents tell: the last `lines` of each stream that is, and all that follows."""
    history: dict[RunSummary, int] = {}
    for agent, piece in replies:
        if "streams" in piece:  # so many pieces tell of what was
            history[agent] = piece["streams"]
            continue
        shown.take(piece, lines if history[agent] > 0 else None)
        history[agent] -= 1


class LogPrinter:
    """Puts the pieces of all streams together to lines, and shows them."""

    def __init__(self, *, has_prefix: bool) -> None:
        self._has_prefix = has_prefix
        self._splitters: dict[tuple[int, int, str], LineSplitter] = {}

    def take(self, piece: dict[str, Any], lines: int | None) -> None:
        """Show the lines that a piece completes, or only the last `lines` and what follows."""
        name = piece["rank"], piece["attempt"], piece["stream"]
        splitter = self._splitters.setdefault(name, LineSplitter())
        chunks = _content(piece)
        if lines is not None:
            chunks = [_last_lines(chunks, lines)]
        for chunk in chunks:
            self._show(name, splitter.feed(chunk, Instant(time.monotonic_ns())))

    def end(self) -> None:
        """Show what has no newline."""
        for name, splitter in self._splitters.items():
            self._show(name, splitter.flush())

    def _show(self, name: tuple[int, int, str], lines: bytes) -> None:
        if not lines:
            return
        rank, _, stream = name
        out: BinaryIO = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
        if out.isatty():
            lines = harmless(lines)
        out.write(prefixed(lines, b"[%d]:" % rank if self._has_prefix else b""))
        out.flush()


def _content(piece: dict[str, Any]) -> "Iterable[bytes]":
    """The bytes of a piece, from where they are."""
    return _file(piece) if "path" in piece else [base64.b64decode(piece["data"])]


def _file(piece: dict[str, Any]) -> "Iterator[bytes]":
    """A log file, as long as it was when the agent answered: what follows comes from the agent."""
    left = piece["size_bytes"]
    try:
        with open(piece["path"], "rb") as file:  # noqa: PTH123  # pathlib costs milliseconds
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                left -= len(chunk)
                yield chunk
    except OSError as error:
        path = os.fspath(piece["path"])
        click.echo(f"rankwise: {path} cannot be read: {error.strerror}", err=True)


def _last_lines(chunks: "Iterable[bytes]", count: int) -> bytes:
    """The last lines, and what was begun of the next one."""
    kept: deque[bytes] = deque(maxlen=count)
    begun = b""
    for chunk in chunks:
        *whole, begun = (begun + chunk).split(b"\n")
        kept.extend(whole)
    return b"".join(line + b"\n" for line in kept) + begun
