"""What a checker raises."""

from rankwise.base.errors import SimulationError


class InvariantBroken(SimulationError):
    """A machine did what no such machine may do."""
