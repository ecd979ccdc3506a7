"""What is for terminals: signs of life while a simulation runs, and how wide tables may be."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.sim.hardware.engine import GraphEngine


def terminal_width() -> int | None:
    """How many characters a line of a terminal has; None where output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _can_redraw() -> bool:
    """Whether stderr is a terminal, and not one that can only add lines."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in {"dumb", "unknown"}


@contextmanager
def watched(engine: "GraphEngine", name: str) -> Iterator[None]:
    """Show on stderr, if that is a terminal that can redraw, how far a simulation has come.

    It is only looked at, from the thread that redraws: nothing here may wait for it.
    """
    if not _can_redraw():
        yield
        return
    from rich.console import Console  # noqa: PLC0415  # only on a terminal
    from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TimeElapsedColumn  # noqa: PLC0415  # the same
    from rich.text import Text  # noqa: PLC0415  # the same

    from rankwise.sim.hardware.quantities import format_picoseconds  # noqa: PLC0415  # the same

    class SimulatedTime(ProgressColumn):
        def render(self, task: Task) -> Text:
            del task
            return Text(
                f"{name}: {format_picoseconds(engine.now)} simulated, "
                f"{len(engine.op_log)} operations"
            )

    columns = (SpinnerColumn(), SimulatedTime(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(name, total=None)
        yield


@contextmanager
def counted(total: int) -> Iterator[Callable[[], None]]:
    """Show a bar of `total` runs where it can be redrawn; call what it gives after each."""
    if not _can_redraw():
        yield lambda: None
        return
    from rich.console import Console  # noqa: PLC0415  # only on a terminal
    from rich.progress import Progress  # noqa: PLC0415  # the same

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("sweep", total=total)
        yield lambda: progress.advance(task)
