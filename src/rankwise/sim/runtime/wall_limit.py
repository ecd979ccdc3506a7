"""A limit of real time for code that never gives the simulator a turn.

The simulation looks at the clock between events. A rank that loops for ever in plain Python never
lets it, so a signal has to interrupt it. Signals reach the main thread only: elsewhere there is no
limit but the simulation's own.

Nor may it come where Python drops exceptions, in a finalizer or a callback of the garbage
collector: there it is let pass, and comes again a moment later.

The signal may come in the middle of a process of the simulation. The limit ends the run; it is not
a failure of the process that happens to run, so the processes that wait for it are not told of one.
"""

import _weakrefset
import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from types import FrameType

from greenlet import getcurrent

from rankwise.base.errors import ConfigError, TimeLimit
from rankwise.sim.kernel import Fiber, RankGreenlet
from rankwise.sim.kernel.places import frames_of_stack, users_line_among
from rankwise.sim.triton.execution import ACTIVE

_INSIST_EVERY_S = 0.02
"""What is interrupted may go on all the same, in a `finally` block for instance."""


_ENDS: list[float] = []
"""When the limits that are in force end, on the monotonic clock; the innermost last."""
_WEAK_REFERENCES = frozenset((weakref.__file__, _weakrefset.__file__))
"""Modules with functions that are called when an object is gone, in the middle of anything."""


class RealTimeLimit(TimeLimit):
    """Code of the user ran for longer than it was allowed to, in real time."""


@contextmanager
def wall_limit(seconds: float | None, *, remedy: str = "a larger wall_limit_s") -> Iterator[None]:
    """Raise `RealTimeLimit` in the running code after so many seconds, and again if it goes on.

    Limits may be nested: the one that comes first holds. A timer of the program's own goes on
    afterwards.

    Args:
        seconds: of real time; None for no limit.
        remedy: what the message says to take if it needs longer.

    Raises:
        RealTimeLimit: names the rank or the kernel's program that ran, and its line.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        is_positive = seconds > 0
    except TypeError:
        is_positive = False
    if not is_positive:
        raise ConfigError(f"a wall limit of {seconds!r} s; expected more than 0")

    begun = time.monotonic()
    if _ENDS and _ENDS[-1] <= begun + seconds:
        yield
        return
    is_over = False
    # The caller of the function that has the `with`: no line from there on can be to blame.
    beyond = sys._getframe(2).f_back  # noqa: SLF001 (the only way to it that costs no stack)

    def interrupt(_signal: int, frame: FrameType | None) -> None:
        nonlocal is_over
        if is_over and not isinstance(getcurrent(), RankGreenlet | Fiber):
            return  # the scheduler is ending the ranks, and must not be disturbed
        if _would_be_lost(frame):
            return
        is_over = True
        inside = takewhile(lambda each: each is not beyond, frames_of_stack(frame))
        where = users_line_among(inside)
        raise RealTimeLimit(
            f"{_running()} still ran after {seconds:g} s of real time"
            + (f", at {where}" if where else ""),
            hint=f"it loops for ever, or needs {remedy}",
        )

    before = signal.signal(signal.SIGALRM, interrupt)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, _INSIST_EVERY_S)
    _ENDS.append(begun + seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _ENDS.pop()
        signal.signal(signal.SIGALRM, before)
        if left:
            rest = left - (time.monotonic() - begun)
            signal.setitimer(signal.ITIMER_REAL, max(rest, _INSIST_EVERY_S), interval)


def _would_be_lost(frame: FrameType | None) -> bool:
    """Whether an exception raised here may be printed and forgotten; if so, it is raised later."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        code = frame.f_code
        if code in callbacks or code.co_name == "__del__" or code.co_filename in _WEAK_REFERENCES:
            return True
        frame = frame.f_back
    return False


def _running() -> str:
    """The process that runs, in words."""
    current = getcurrent()
    if isinstance(current, RankGreenlet):
        return f"rank {current.rank}"
    if isinstance(current, Fiber):
        return current.name
    execution = ACTIVE.execution  # of a launch that is calculated before its time
    return "the simulation" if execution is None else execution.launch.name
