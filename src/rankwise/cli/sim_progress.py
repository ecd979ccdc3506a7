"""What is for terminals: signs of life while a simulation runs, and how wide tables may be."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from rankwise.base.wording import counted as counted_in_words
from rankwise.launch.telling.status_line import shown

if TYPE_CHECKING:
    from rankwise.sim.hardware.engine import GraphEngine
    from rankwise.simranks.run.rehearsal import Rehearsal


def terminal_width() -> int | None:
    """How many characters a line of a terminal has; None where output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def clock(seconds: float) -> str:
    """A duration as it is told beside what goes on: `0:42`, `1:02:03`."""
    whole = round(seconds)
    minutes = f"{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{whole // 3600}:{minutes}" if whole >= 3600 else minutes.removeprefix("0")


class Estimate:
    """How many of many cases are done, and how long the rest takes if they go on like that.

    Args:
        total: how many there are.
        name: what they belong to.
        noun: what one of them is.
    """

    def __init__(self, total: int, name: str = "sweep", noun: str = "case") -> None:
        self._total = total
        self._name = name
        self._cases = f"{total:,} {noun}{'s' * (total != 1)}"
        self._done = self._ran = 0
        self._at = 0.0

    def note(self, done: int, ran: int, at: float) -> None:
        """So many are done, and so many of these have run and were not known before."""
        self._done, self._ran, self._at = done, ran, at

    def left_in_words(self, at: float) -> str:
        """The rest; nothing before a case has run."""
        if not self._ran:
            return ""
        each = self._at / self._ran
        left = each * (self._total - self._done) - (at - self._at)
        # A case that takes longer than those before it is expected to end at any time.
        return f", about {clock(max(1.0, left))} left"

    def in_words(self, at: float, begun_at: float = 0.0) -> str:
        """The whole line, so many seconds after the begin; the first case began at `begun_at`."""
        left = self.left_in_words(at - begun_at)
        return f"{self._name}: {self._done:,} of {self._cases}, {clock(at)}{left}"


@contextmanager
def watched(engine: "GraphEngine", name: str) -> Iterator[None]:
    """Show how far a simulation has come.

    The whole is not known, as the program decides it: the simulated time has no estimate.
    """
    from rankwise.sim.hardware.quantities import format_picoseconds  # noqa: PLC0415  # not for --help

    def words(elapsed: float) -> str:
        return (
            f"{name}: {format_picoseconds(engine.now)} simulated, "
            f"{len(engine.op_log):,} operations, {clock(elapsed)}"
        )

    with shown(words):
        yield


@contextmanager
def counted(
    total: int, name: str = "sweep", noun: str = "case", *, has_sinks: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """Show how many cases of a sweep, or of something else, are done, with an estimate.

    Call what it gives with how many are done, and how many of these have run in this sweep.
    """
    estimate, begun_at = Estimate(total, name, noun), monotonic()
    with shown(estimate.in_words, has_sinks=has_sinks):
        yield lambda done, ran: estimate.note(done, ran, monotonic() - begun_at)


class FiguresOfOther:
    """How many figures another process has measured, by the file that it writes: `done total`."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path
        self._estimate: Estimate | None = None
        self._read, self._first, self._begun_at = "", 0, 0.0

    def in_words(self, at: float) -> str:
        """The whole line, so many seconds after the begin."""
        with suppress(OSError, ValueError):  # it has not begun, or writes just now
            read = self._path.read_text("ascii")
            done, total = map(int, read.split())
            if self._estimate is None:
                self._estimate = Estimate(total, self._name, "figure")
                self._first, self._begun_at = done, at  # before that, it has started
            if read != self._read:
                self._read = read
                self._estimate.note(done, done - self._first, at - self._begun_at)
        if self._estimate is None:
            return f"{self._name}: {clock(at)}"
        return self._estimate.in_words(at, self._begun_at)


@contextmanager
def progress_shown() -> Iterator[Callable[[str], None]]:
    """Show the latest text that was told, with the time that has passed since the begin."""
    latest = ""

    def tell(text: str) -> None:
        nonlocal latest
        latest = text

    with shown(lambda elapsed: f"{clock(elapsed)}  {latest}"):
        yield tell


@contextmanager
def predicted(name: str) -> Iterator[Callable[["Rehearsal"], None]]:
    """Show how far a prediction has come; call what it gives with each run that begins.

    How many steps there will be is the program's affair: the line tells what one takes.
    """
    latest: list[Rehearsal] = []

    def words(elapsed: float) -> str:
        prediction = latest[-1].prediction if latest else None
        if prediction is None:
            return f"{name}: {clock(elapsed)}"
        from rankwise.sim.hardware.quantities import format_picoseconds  # noqa: PLC0415  # on terminals

        clocks = list(prediction.clocks.values())
        steps = min((len(each.steps) for each in clocks), default=0)
        told = f"{name}: {format_picoseconds(prediction.now)} predicted, {clock(elapsed)}"
        if not steps:
            return told
        return f"{told}, {counted_in_words(steps, 'step')}, about {elapsed / steps:.2g} s for each"

    with shown(words, has_sinks=True):
        yield latest.append
