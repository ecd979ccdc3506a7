"""The door to time."""

from typing import Protocol

from rankwise.base.units import Instant


class Clock(Protocol):
    """A monotonic clock, and the calendar beside it for people."""

    def now(self) -> Instant:
        """The current instant; never goes back."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since 1970; may jump, so it is shown and never compared."""
        ...
