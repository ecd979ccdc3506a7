"""The time of simulated ranks, and what functions of `time` do for a rank."""

import time
from collections.abc import Callable
from typing import Any

from rankwise.base.units import SECOND
from rankwise.simranks.world.ranks import Rank
from rankwise.simranks.world.scheduler import Scheduler

PICOSECONDS = 1_000
"""Per nanosecond."""
_CLOCKS = {
    time.CLOCK_REALTIME: "time", time.CLOCK_MONOTONIC: "monotonic",
    time.CLOCK_MONOTONIC_RAW: "monotonic", time.CLOCK_BOOTTIME: "monotonic",
}  # fmt: skip
"""What else tells the time of these clocks."""


class RankTime:
    """The time of the rank that runs.

    Args:
        scheduler: has the time of the world.
        prediction: has each rank's own time on a modelled machine, if there is one.
        is_virtual: whether clocks show virtual time alone, from 0; the calendar from its begin.
    """

    def __init__(self, scheduler: Scheduler, prediction: Any, *, is_virtual: bool) -> None:
        self.is_virtual = is_virtual
        self._scheduler = scheduler
        self._prediction = prediction

    def of(self, rank: Rank) -> int:
        """The rank's time, in picoseconds."""
        if self._prediction is None:
            return self._scheduler.now * PICOSECONDS
        time: int = self._prediction.clock_of(rank).time
        return time

    def sleep(self, rank: Rank, nanoseconds: int) -> None:
        """Let time pass for the rank that runs."""
        if self._prediction is None:
            self._scheduler.sleep(nanoseconds)
        else:
            self._prediction.clock_of(rank).sleep(self._scheduler, nanoseconds)

    def sleep_for(self, rank: Rank, _original: Callable[[float], None], seconds: float) -> None:
        """What `time.sleep` does."""
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        self.sleep(rank, round(seconds * SECOND))  # why: virtual time


def _read_clock(_rank: Rank, original: Callable[[int], Any], clock: int) -> Any:
    name, suffix = _CLOCKS.get(clock), original.__name__.removeprefix("clock_gettime")
    return original(clock) if name is None else getattr(time, name + suffix)()


def _tell_now(_rank: Rank, original: Callable[..., Any], seconds: float | None = None, /) -> Any:
    return original(time.time() if seconds is None else seconds)


def _tell_local_time(_rank: Rank, original: Callable[..., str], /, *words: Any) -> str:
    is_now = len(words) == (1 if original.__name__ == "strftime" else 0)
    return original(*words, time.localtime()) if is_now else original(*words)


FUNCTIONS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    *((time, name, _read_clock) for name in ("clock_gettime", "clock_gettime_ns")),
    *((time, name, _tell_now) for name in ("ctime", "gmtime", "localtime")),
    *((time, name, _tell_local_time) for name in ("asctime", "strftime")),
)
"""What tells the time by other functions, which are replaced as well: `time.time` above all."""
