"""Clocks that are wrong: each node's has an offset and a rate of its own.

The world's own clock is the truth, which no node sees. All in integers, so that equal seeds stay
equal.
"""

from rankwise.base.units import Duration, Instant
from rankwise.drivers.virtual.agenda import VIRTUAL_EPOCH_NS, VirtualClock

MILLION = 1_000_000


class SkewedClock:
    """A node's clock.

    Args:
        truth: the world's clock.
        offset: what it shows when the truth is 0.
        drift_ppm: how many millionths it is too fast; negative if too slow.
    """

    def __init__(self, truth: VirtualClock, offset: Duration, drift_ppm: int) -> None:
        self.truth = truth
        self._offset = offset
        self._drift_ppm = drift_ppm

    def now(self) -> Instant:
        """What the clock shows."""
        true = self.truth.now()  # as `shown_at`, for a clock that is looked at all the time
        return Instant(self._offset + true + true * self._drift_ppm // MILLION)

    def wall_ns(self) -> int:
        """The calendar as the node believes it to be."""
        return VIRTUAL_EPOCH_NS + self.now()

    def shown_at(self, true: Instant) -> Instant:
        """What the clock shows at a true instant."""
        return Instant(self._offset + true + true * self._drift_ppm // MILLION)

    def truth_of(self, shown: Instant) -> Instant:
        """The first true instant at which the clock shows at least this."""
        elapsed = shown - self._offset
        true = elapsed * MILLION // (MILLION + self._drift_ppm)
        while self.shown_at(Instant(true)) < shown:
            true += 1
        return Instant(max(0, true))
