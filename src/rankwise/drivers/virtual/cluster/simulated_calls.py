"""What the workers of a simulated node would have entered about their calls, as its agent tells it.

There is one call in which ranks stand, and where one rank is late, another that all make in
intervals. Instants are those of the node's clock.
"""

from collections.abc import Sequence

from rankwise.base.units import MILLISECOND, ZERO, Duration, Instant, between
from rankwise.core.ledger import (
    CALLS_MAX,
    Arrival,
    Call,
    CallRecord,
    Fate,
    Group,
    RankTimes,
    Timetable,
    pack_times,
)
from rankwise.core.matching import CallSignature
from rankwise.drivers.virtual.cluster.simulated_worker import SimulatedWorker
from rankwise.drivers.virtual.cluster.skewed_clocks import SkewedClock

ALL = "all"
"""The group of all ranks."""
CALL_EVERY = Duration(100 * MILLISECOND)
"""How often all ranks make a call, where one is late to it."""


def call_record_of(worker: SimulatedWorker, group: Group, clock: SkewedClock) -> CallRecord:
    """What a worker has entered, and what has become of it."""
    since = worker.stands_since
    fate = Fate.LIVES if worker.is_alive else Fate.LEFT if worker.succeeded else Fate.DIED
    begun_at = Instant(0) if since is None else clock.shown_at(since)
    call = Call(group=ALL, number=1, signature=CallSignature("all_reduce"), begun_at=begun_at)
    return CallRecord(
        rank=worker.rank,
        groups={ALL: group},
        counts={ALL: int(since is not None)},
        calls=() if since is None else (call,),
        fate=fate,
    )


def packed_times(
    workers: Sequence[SimulatedWorker],
    group: Group,
    clock: SkewedClock,
    *,
    late: Duration,
    asked_at: Instant,
) -> bytes:
    """When workers came to the call that all make every `CALL_EVERY`; the last rank is `late`."""
    now = clock.now()
    ranks = tuple(
        RankTimes(rank=each.rank, groups={ALL: group}, arrivals=_arrivals(each, group, clock, late))
        for each in workers
    )
    lasted = between(min((each.started_at for each in workers), default=now), now)
    return pack_times(Timetable(ranks=ranks, lasted=lasted, asked_at=asked_at, reported_at=now))


def _arrivals(
    worker: SimulatedWorker, group: Group, clock: SkewedClock, late: Duration
) -> tuple[Arrival, ...]:
    own = late if worker.rank == group.size - 1 else ZERO
    first = clock.truth_of(worker.started_at) // CALL_EVERY + 1
    last = (worker.ended_at or clock.truth.now()) // CALL_EVERY
    return tuple(
        Arrival(
            ALL,
            number,
            clock.shown_at(Instant(number * CALL_EVERY + own)),
            clock.shown_at(Instant(number * CALL_EVERY + late)),
        )
        for number in range(max(first, last - CALLS_MAX), last)
    )
