"""Tell who waits for what, since when, and on which line of user code.

A simulated world in which nothing can happen any more while processes wait is told at once and in
full, because the answer to "why does it hang" is always in that list.
"""

from collections.abc import Callable, Iterable

from rankwise.base.errors import Deadlock, Waiting
from rankwise.sim.kernel.futures import AllOf, EndOfMany, Process
from rankwise.sim.kernel.places import frames_of_generator, users_line_among

_SHOWN_IN_MESSAGE = 16
_ENDS = (Process, AllOf, EndOfMany)


def deadlock_of(
    processes: Iterable[Process],
    now: int,
    awaited: str = "",
    written: Callable[[int], str] = str,
) -> Deadlock:
    """Make the error that lists every process that waits, those in user code first."""
    waiting = [(each, _described(each)) for each in processes if each.waits_for is not None]
    # First what the user wrote, then what is at work for it; of these, first what waits for
    # something that never comes, then what merely waits for others to end.
    waiting.sort(key=lambda each: (not each[1].where, isinstance(each[0].waits_for, _ENDS)))
    told = tuple(each for _, each in waiting)
    lines = [f"deadlock at instant {written(now)}: nothing is left to do"]
    if awaited:
        lines[0] += f", and {awaited} has not happened"
    lines[0] += f"; {len(told)} wait" + (":" if told else "")
    lines += [f"  {each.describe(written)}" for each in told[:_SHOWN_IN_MESSAGE]]
    if len(told) > _SHOWN_IN_MESSAGE:
        lines.append(f"  ... and {len(told) - _SHOWN_IN_MESSAGE} more (see .waiting)")
    return Deadlock("\n".join(lines), told)


def _described(process: Process) -> Waiting:
    locate = process._locate  # noqa: SLF001 (the kernel is one module in files)
    generator = process._generator  # noqa: SLF001
    return Waiting(
        who=str(process),
        what=str(process.waits_for),
        since=process._since,  # noqa: SLF001
        where=locate() if locate is not None else users_line_among(frames_of_generator(generator)),
    )
