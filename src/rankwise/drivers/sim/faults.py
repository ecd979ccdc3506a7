"""What the simulated world does to a gang beyond what its programs do.

Values, so that a plan with its faults is written into the report of a failed seed as it is.
"""

import msgspec

from rankwise.base.units import MICROSECOND, MILLISECOND, Duration, Instant


class StopOrder(msgspec.Struct, frozen=True):
    """Somebody asks the gang to stop: with a signal, or (None) from the program itself."""

    at: Instant
    signal: int | None = None


class Accusation(msgspec.Struct, frozen=True):
    """Somebody has found out that a worker keeps the others waiting in a collective."""

    at: Instant
    local_rank: int


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How slow, unordered and mortal the world is.

    Attributes:
        latency_min: what an order or a notification takes at least.
        latency_max: what it takes at most. News of one worker stay in order, as its pipe and its
            parent keep them; news of different workers overtake each other.
        sweep_takes: how long the guardian takes to sweep.
        stacks_take: how long the workers take to print their stacks.
        guardian_lost_at: when the guardian is killed, and its workers with it; None never.
        stops: who asks for an end, and when.
        accusations: who is blamed in whatever attempt there is then.
    """

    latency_min: Duration = Duration(100 * MICROSECOND)
    latency_max: Duration = Duration(100 * MICROSECOND)
    sweep_takes: Duration = Duration(1 * MILLISECOND)
    stacks_take: Duration = Duration(10 * MILLISECOND)
    guardian_lost_at: Instant | None = None
    stops: tuple[StopOrder, ...] = ()
    accusations: tuple[Accusation, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.latency_min <= self.latency_max:
            raise ValueError(
                f"latency_min is {self.latency_min} ns and latency_max {self.latency_max} ns, "
                "expected 0 < latency_min <= latency_max"
            )
