"""What happens next in a simulated world, and what time it is there.

Virtual time jumps from one entry to the next, so an hour costs as much as what happens in it.
Entries of one instant happen in the order in which they were made; a deadline of that instant
passes when all else has happened.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

from rankwise.base.units import SECOND, Duration, Instant, after

VIRTUAL_EPOCH_NS = 946_684_800 * SECOND
"""The calendar at instant 0: the year 2000, which is not mistaken for a real date."""


class MovableClock(Protocol):
    """The clock of a simulated world."""

    def now(self) -> Instant:
        """The present virtual instant."""
        ...

    def wall_ns(self) -> int:
        """The virtual calendar: nanoseconds since 1970."""
        ...

    def advance_to(self, instant: Instant) -> None:
        """Let time pass; it never goes back."""
        ...


class VirtualClock:
    """A clock that changes only when it is set."""

    def __init__(self) -> None:
        self._now = Instant(0)

    def now(self) -> Instant:
        """The present virtual instant."""
        return self._now

    def wall_ns(self) -> int:
        """The virtual calendar: nanoseconds since 1970."""
        return VIRTUAL_EPOCH_NS + self._now

    def advance_to(self, instant: Instant) -> None:
        """Let time pass; it never goes back."""
        assert instant >= self._now, f"time cannot go back from {self._now} to {instant}"
        self._now = instant


class Agenda:
    """Actions with the instants at which they happen."""

    def __init__(self, clock: MovableClock) -> None:
        self._clock = clock
        self._entries: list[tuple[Instant, bool, int, Callable[[], None]]] = []
        self._sequence = 0

    def now(self) -> Instant:
        """The present virtual instant."""
        return self._clock.now()

    @property
    def next_instant(self) -> Instant | None:
        """When the next action happens; None when nothing is left to happen."""
        return self._entries[0][0] if self._entries else None

    def at(self, instant: Instant, action: Callable[[], None]) -> None:
        """Let `action` happen at `instant`, which must not have passed."""
        self._enter(instant, action, is_deadline=False)

    def at_deadline(self, instant: Instant, action: Callable[[], None]) -> None:
        """The same, when all else of that instant has happened."""
        self._enter(instant, action, is_deadline=True)

    def after(self, delay: Duration, action: Callable[[], None]) -> None:
        """Let `action` happen `delay` from now."""
        self.at(after(self._clock.now(), delay), action)

    def run_next(self) -> None:
        """Move the clock to the next action and let it happen."""
        instant, _, _, action = heappop(self._entries)
        self._clock.advance_to(instant)
        action()

    def _enter(self, instant: Instant, action: Callable[[], None], *, is_deadline: bool) -> None:
        assert instant >= self._clock.now(), "nothing can be made to happen in the past"
        heappush(self._entries, (instant, is_deadline, self._sequence, action))
        self._sequence += 1
