"""How long to wait before trying again, as a value."""

import msgspec

from rankwise.base.units import SECOND, Duration


class Backoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long to wait before restart 1, 2, 3 …: nothing, `initial`, then `factor` times more."""

    initial: Duration = Duration(1 * SECOND)
    factor: int = 2
    longest: Duration = Duration(60 * SECOND)

    def __post_init__(self) -> None:
        if self.initial < 0 or self.longest < 0:
            raise ValueError("a back-off cannot be negative")
        if self.factor < 1:
            raise ValueError(f"the back-off factor is {self.factor}, expected 1 or more")

    def before_restart(self, restart: int) -> Duration:
        """The pause before restart number `restart`, counted from 1; the first is immediate."""
        if restart <= 1:
            return Duration(0)
        # Bounded before it is raised to a power, so that restart 10,000 costs nothing.
        exponent = min(restart - 2, 64)
        return Duration(min(self.longest, self.initial * self.factor**exponent))
