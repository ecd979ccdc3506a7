"""What is for terminals: signs of life while a simulation runs, and how wide tables may be."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.sim.hardware.engine import GraphEngine


def terminal_width() -> int | None:
    """How many characters a line of a terminal has; None where output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _can_redraw() -> bool:
    """Whether stderr is a terminal, and not one that can only add lines."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in {"dumb", "unknown"}


AFTER_S = 2.0
"""What is over by then shows no sign of life."""
_REDRAWN_EVERY_S = 0.25


class _Line:
    """A line of a terminal that a thread redraws, from `AFTER_S` on, until it is closed.

    The thread only asks `words`: nothing may wait for it, and it waits for nothing else.
    """

    def __init__(self, words: Callable[[float], str]) -> None:
        self._words = words
        self._begun_at = time.monotonic()
        self._end = threading.Event()
        self._is_shown = False
        self._thread = threading.Thread(target=self._redraw, name="progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        if self._is_shown:
            _write_to_terminal("\r\x1b[K")

    def _redraw(self) -> None:
        pause = AFTER_S
        while not self._end.wait(pause):
            pause = _REDRAWN_EVERY_S
            text = self._words(time.monotonic() - self._begun_at)
            width = shutil.get_terminal_size().columns - 1
            self._is_shown = True
            _write_to_terminal(f"\r\x1b[K{text[:width]}")


def _write_to_terminal(text: str) -> None:
    with suppress(OSError, ValueError):  # the terminal has gone
        sys.stderr.write(text)
        sys.stderr.flush()


def clock(seconds: float) -> str:
    """A duration as it is told beside what goes on: `0:42`, `1:02:03`."""
    whole = round(seconds)
    minutes = f"{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{whole // 3600}:{minutes}" if whole >= 3600 else minutes.removeprefix("0")


def remaining_in_words(done: float, total: float, elapsed: float) -> str:
    """How long the rest takes if it goes on like this; nothing before anything is done."""
    if done <= 0 or elapsed <= 0:
        return ""
    return f", about {clock(elapsed * max(0.0, total - done) / done)} left"


@contextmanager
def shown(words: Callable[[float], str]) -> Iterator[None]:
    """Show what `words` says of the seconds that have passed, if stderr can be redrawn."""
    if not _can_redraw():
        yield
        return
    with _Line(words):
        yield


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
def counted(total: int, what: str = "sweep", unit: str = "cases") -> Iterator[Callable[[], None]]:
    """Show how many of `total` are done, with an estimate; call what it gives after each."""
    done = 0

    def one_more() -> None:
        nonlocal done
        done += 1

    def words(elapsed: float) -> str:
        left = remaining_in_words(done, total, elapsed)
        return f"{what}: {done:,} of {total:,} {unit}, {clock(elapsed)}{left}"

    with shown(words):
        yield one_more


@contextmanager
def told_while() -> Iterator[Callable[[str], None]]:
    """Show the latest text that was told, with the time that has passed since the begin."""
    latest = ""

    def tell(text: str) -> None:
        nonlocal latest
        latest = text

    with shown(lambda elapsed: f"{clock(elapsed)}  {latest}"):
        yield tell
