"""This machine's clocks."""

from time import monotonic_ns, time_ns

from rankwise.base.units import Instant


class SystemClock:
    """CLOCK_MONOTONIC, which all processes of one machine share, and the calendar."""

    def now(self) -> Instant:
        """Nanoseconds of CLOCK_MONOTONIC."""
        return Instant(monotonic_ns())

    def wall_ns(self) -> int:
        """Nanoseconds since 1970."""
        return time_ns()
