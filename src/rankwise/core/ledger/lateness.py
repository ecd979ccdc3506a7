"""Lateness: how often each rank came last to a call, and what that has cost the others.

Theory of operation
===================

A call to which all members have come, and that has ended on all of them, is *judged*, once. Its
last rank kept the others waiting from the moment when the second last had come: before that, they
waited for more than one. So what is counted for a rank is the time that would have been saved had
it come with the next. A member waits at most until its own part of the call has ended: the root of
a broadcast may go on before any other has come. An issued call keeps no rank: it waits where it
waits for its handle, which is seen before or after the call is judged.

- One rank always comes last: of two ranks in a tight loop, the one that the last call has released
  last. So a rank is late only by the time that it took for itself, since its last call of the group
  ended, beyond what the second last took since then.
- Of a group with members elsewhere, those that are here are judged among themselves, since the
  clocks of nodes differ. The last one of all may be elsewhere; then the last one here waits for it,
  and so what that one waits in the call does not count as lost by it.
- The feeder reads memory that holds the latest calls only, and reads now and then. These calls
  stand for the rest: the waiting in a group is scaled by how many calls it has had, and `seen`
  tells the share.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.ledger.call_records import Group

NOTABLE_SHARE = 0.05
"""Of the run: less than that is in every healthy one."""
NOTABLE_TIME = Duration(1 * SECOND)
_OUTSTANDING = 3
"""A rank is notable only if it costs so many times what the others cost on average."""
_PENDING_MAX = 512
_SPANS_MAX = 256
"""For how many of the latest calls a wait for the handle counts."""


Doubt = Callable[[int, int], int]
"""How much earlier or later, compared with another, a rank may have come than its clock says."""


def no_doubt(one: int, other: int) -> int:  # noqa: ARG001  # a `Doubt`
    """The clock of ranks that share one."""
    return 0


class Arrival(NamedTuple):
    """A rank's call that has ended, or was issued; or a wait `of_handle`, for one that was."""

    group: str
    number: int
    begun_at: int
    ended_at: int
    of_handle: bool = False


class Delay(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has cost the others.

    Attributes:
        rank: which one.
        last: the share of the calls to which it came last.
        waited: how long each of the other ranks waited for it alone, on average.
    """

    rank: int
    last: float
    waited: Duration


def notable(delays: Collection[Delay], lasted: Duration) -> Delay | None:
    """The rank that has cost the others a notable part of that time; None if there is none."""
    if not delays:
        return None
    worst = max(delays, key=lambda delay: (delay.waited, -delay.rank))
    others = sum(delay.waited for delay in delays) - worst.waited
    is_notable = (
        # In absolute time as well: a large share of a short run is still worth no line.
        worst.waited >= NOTABLE_TIME
        and worst.waited > NOTABLE_SHARE * lasted
        and is_outstanding(worst.waited, others, len(delays))
    )
    return worst if is_notable else None


def is_outstanding(worst: int, others: int, ranks: int) -> bool:
    """Whether one of so many ranks costs far more than all others cost together, for one each."""
    return worst * (ranks - 1) > _OUTSTANDING * others


class Lateness:
    """Sums up who came last, among ranks whose clocks agree but for a doubt."""

    def __init__(self, ranks: Iterable[int], doubt: Doubt = no_doubt) -> None:
        self.ranks = tuple(ranks)
        self._doubt = doubt
        self._groups: dict[str, _Arrivals] = {}
        self._last = dict.fromkeys(self.ranks, 0)
        self._waited = dict.fromkeys(self.ranks, 0.0)
        self._judged = self._begun = 0
        self.is_of_a_part = False
        """Whether there was a group that has members elsewhere."""
        self._stops: list[tuple[Instant, Instant]] = []

    def on_suspended(self, since: Instant, until: Instant) -> None:
        """Note that all ranks were stopped (Ctrl-Z): waits of that time do not count."""
        self._stops.append((since, until))

    def see(self, rank: int, groups: Mapping[str, Group], arrivals: Iterable[Arrival]) -> None:
        """Take in calls of one rank, in their order; one that was seen before changes nothing."""
        for arrival in arrivals:
            known = self._groups.get(arrival.group)
            if known is None:
                group = groups[arrival.group]
                if len(group.members) < 2:
                    continue
                known = self._groups[arrival.group] = _Arrivals(group, self._stops, self._doubt)
                self.is_of_a_part |= group.size > len(group.members)
            known.see(rank, arrival)

    def forget_groups(self) -> None:
        """Let numbers begin anew, as in another attempt; the sums stay."""
        for group in self._groups.values():
            self._judged += group.judged
            self._begun += group.begun
            for rank in group.members:
                self._last[rank] += group.last[rank]
                self._waited[rank] += group.waited[rank] * group.scale
        self._groups = {}

    @property
    def seen(self) -> float:
        """The share of the calls that were judged."""
        judged = self._judged + sum(group.judged for group in self._groups.values())
        begun = self._begun + sum(group.begun for group in self._groups.values())
        return judged / begun if begun else 1.0

    def delays(self) -> tuple[Delay, ...]:
        """What each rank has cost the others; empty while nothing is known."""
        judged = self._judged + sum(group.judged for group in self._groups.values())
        return tuple(self._delay(rank, judged) for rank in self.ranks) if judged else ()

    def worst(self, lasted: Duration) -> Delay | None:
        """The rank that has cost the others a notable part of that time; None if there is none."""
        return notable(self.delays(), lasted)

    def _delay(self, rank: int, judged: int) -> Delay:
        groups = [group for group in self._groups.values() if rank in group.last]
        last = self._last[rank] + sum(group.last[rank] for group in groups)
        waited = self._waited[rank] + sum(group.waited[rank] * group.scale for group in groups)
        return Delay(
            rank=rank, last=last / judged, waited=Duration(round(waited / (len(self.ranks) - 1)))
        )


class _Arrivals:
    """The calls of one group."""

    def __init__(
        self, group: Group, stops: Sequence[tuple[Instant, Instant]], doubt: Doubt
    ) -> None:
        self.members = members = group.members
        self._doubt = doubt
        self._has_members_elsewhere = group.size > len(members)
        self._stops = stops
        self.last = dict.fromkeys(members, 0)
        self.waited = dict.fromkeys(members, 0)
        """What they have cost, in nanoseconds of all that waited."""
        self.judged = 0
        self.begun = 0
        """How many calls there were, without the first."""
        self._judged_to = 0
        self._left: dict[int, int] = {}
        """When its members left the call that was judged last."""
        self._pending: dict[int, dict[int, Arrival]] = {}
        self._spans: dict[int, tuple[int, int, int]] = {}
        """Of the calls judged last, who came last, and from when to when the others waited."""
        self._early_waits: dict[int, list[tuple[int, Arrival]]] = {}
        """Waits for handles of calls that are not judged yet."""

    @property
    def scale(self) -> float:
        """How many calls each that was judged stands for."""
        return self.begun / self.judged if self.judged else 0.0

    def see(self, rank: int, arrival: Arrival) -> None:
        if rank not in self.last:
            return
        if arrival.of_handle:
            self._see_wait(rank, arrival)
            return
        if arrival.number <= self._judged_to:
            return
        self.begun = max(self.begun, arrival.number - 1)
        come = self._pending.setdefault(arrival.number, {})
        come[rank] = arrival
        if len(come) == len(self.members):
            if arrival.number != self._judged_to + 1:
                self._left = {}  # they have been in other calls since
            # The first call of a group waits for imports and set-up, which says nothing of a
            # rank's pace.
            if arrival.number > 1:
                self._judge(come)
            self._left = {member: each.ended_at for member, each in come.items()}
            self._judged_to = arrival.number
            for waiter, wait in self._early_waits.pop(arrival.number, ()):
                self._see_wait(waiter, wait)
            # Reading goes on: a call that was missed in one rank will not be found later.
            self._pending = {
                number: others
                for number, others in self._pending.items()
                if number > arrival.number
            }
            self._early_waits = {
                number: waits
                for number, waits in self._early_waits.items()
                if number > arrival.number
            }
        elif len(self._pending) > _PENDING_MAX:
            # The oldest: a call that was missed in one rank's call record never becomes complete.
            del self._pending[min(self._pending)]

    def _see_wait(self, rank: int, wait: Arrival) -> None:
        if wait.number > self._judged_to:
            if len(self._early_waits) < _PENDING_MAX:
                self._early_waits.setdefault(wait.number, []).append((rank, wait))
            return
        if wait.number == self._judged_to:
            # An asynchronous call is left when its handle is waited for, not when it was begun.
            self._left[rank] = max(self._left.get(rank, 0), wait.ended_at)
        last, since, until = self._spans.get(wait.number, (rank, 0, 0))
        if rank != last:
            self.waited[last] += max(0, min(until, wait.ended_at) - max(since, wait.begun_at))

    def _judge(self, come: Mapping[int, Arrival]) -> None:
        *_, before, last = sorted(come, key=lambda rank: (come[rank].begun_at, rank))
        until = come[last].begun_at
        # Clocks of two nodes agree only so far: within that doubt no rank is late.
        since = min(until, come[before].begun_at + self._doubt(before, last))
        if self._left:
            # A rank that left the last call late began late, too: only what it took since is its
            # own.
            took = {rank: come[rank].begun_at - self._left[rank] for rank in (before, last)}
            since = max(since, until - max(0, took[last] - took[before]))
        if self._has_members_elsewhere:
            # For as long as the last one here waited, a member elsewhere was later still.
            since = min(until, since + come[last].ended_at - until)
        self.judged += 1
        self.last[last] += 1
        if any(since <= end and until >= begin for begin, end in self._stops):
            return  # all ranks were stopped meanwhile (Ctrl-Z): no rank made the others wait
        if not self._has_members_elsewhere:  # else the wait of the last one is unknown here
            self._spans[come[last].number] = last, since, until
            if len(self._spans) > _SPANS_MAX:
                del self._spans[next(iter(self._spans))]
        self.waited[last] += sum(
            max(0, min(until, arrival.ended_at) - since)
            for rank, arrival in come.items()
            if rank != last
        )
