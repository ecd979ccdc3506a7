"""What is for terminals: signs of life while a simulation runs, and how wide tables may be."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rankwise.base.wording import counted as counted_in_words
from rankwise.launch.status_line import shown

if TYPE_CHECKING:
    from rankwise.launch.on_sim.rehearsal import Rehearsal
    from rankwise.sim.hardware.engine import GraphEngine


def terminal_width() -> int | None:
    """How many characters a line of a terminal has; None where output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


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

    with shown(words):
        yield latest.append
