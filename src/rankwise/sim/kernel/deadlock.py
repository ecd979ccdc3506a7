"""Tell who waits for what, since when, and on which line of user code.

A simulated world in which nothing can happen any more while somebody waits is told at once and in
full, because the answer to "why does it hang" is always in that list.
"""

import os.path
from collections.abc import Iterable
from types import FrameType

from rankwise.base.errors import Deadlock, Waiting
from rankwise.sim.kernel.events import Process, Steps

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep  # noqa: PTH100, PTH120 (compared as text with file names of code objects)
_SHOWN_IN_MESSAGE = 16


def where_of(frames: Iterable[FrameType]) -> str:
    """Name the innermost line of user code among `frames`, which come innermost first.

    Code of this package counts only if there is no other.
    """
    fallback = ""
    for frame in frames:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return place
        fallback = fallback or place
    return fallback


def frames_of_stack(innermost: FrameType | None) -> list[FrameType]:
    """List a stack's frames, innermost first."""
    frames = []
    while innermost is not None:
        frames.append(innermost)
        innermost = innermost.f_back
    return frames


def frames_of_generator(generator: Steps) -> list[FrameType]:
    """List the frames of a suspended generator and of those that it delegates to."""
    frames: list[FrameType] = []
    inner: object = generator
    while inner is not None:
        frame = getattr(inner, "gi_frame", None)
        if frame is None:
            break
        frames.append(frame)
        inner = getattr(inner, "gi_yieldfrom", None)
    frames.reverse()
    return frames


def waiting_of(process: Process) -> Waiting:
    """Describe one process that waits."""
    locate = process._locate  # noqa: SLF001 (the kernel is one module in files)
    generator = process._generator  # noqa: SLF001
    return Waiting(
        who=str(process),
        what=str(process.waits_for),
        since=process._since,  # noqa: SLF001
        where=locate() if locate is not None else where_of(frames_of_generator(generator)),
    )


def deadlock_of(processes: Iterable[Process], now: int, awaited: str = "") -> Deadlock:
    """Make the error that lists every process that waits, daemons last."""
    waiting = [process for process in processes if process.waits_for is not None]
    waiting.sort(key=lambda process: process.is_daemon)
    return deadlock_among([waiting_of(process) for process in waiting], now, awaited)


def deadlock_among(waiting: list[Waiting], now: int, awaited: str = "") -> Deadlock:
    """Make the error for waits that were collected elsewhere."""
    lines = [f"nothing is left to do at instant {now}"]
    if awaited:
        lines[0] += f", and {awaited} has not happened"
    lines[0] += f"; {len(waiting)} wait" + (":" if waiting else "")
    lines += [f"  {each}" for each in waiting[:_SHOWN_IN_MESSAGE]]
    if len(waiting) > _SHOWN_IN_MESSAGE:
        lines.append(f"  ... and {len(waiting) - _SHOWN_IN_MESSAGE} more (see .waiting)")
    return Deadlock("\n".join(lines), tuple(waiting))
