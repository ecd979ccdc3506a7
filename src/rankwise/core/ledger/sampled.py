"""Lateness in calls of which only a sample is known, and only when they were begun.

Theory of operation
===================

Calls that C++ begins, as DDP's reducer does in each backward pass, are in no call record: torch's
recorder has the latest calls when it is read, and when a rank ends. No rank waits in such a call:
the ranks wait later, for several of them together. So calls are taken together that come in a
*volley*, up to a pause that is more than half of the long ones. A rank's delay is the gap between
the last and the second-last arrival at the final call of a volley. Both times are medians: a pause
of one rank is no straggler, and part of the calls may be unknown.

A machine that is busy makes now this rank late and now that one. So the last of most volleys is a
straggler only if it costs so much more than the others together as elsewhere (`lateness.py`).

Groups with members that are not known are not judged, since the last rank may be one of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import msgspec

from rankwise.core.ledger.call_records import Group
from rankwise.core.ledger.lateness import NOTABLE_SHARE, Doubt, is_outstanding, no_doubt
from rankwise.core.matching import CallSignature

_PENDING_MAX = 512
_VOLLEYS_MIN = 8
_KEPT_MAX = 1024


class Begun(NamedTuple):
    """A call that a rank has begun; `signature` is what, where that is of interest."""

    group: str
    number: int
    begun_at: int
    signature: CallSignature | None = None


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that comes last to such calls.

    Attributes:
        rank: which one.
        last: the share of the volleys to which it came last.
        cost: the share of the time that the others wait for it.
        seen: the share of the calls of the group that were seen.
    """

    rank: int
    last: float
    cost: float
    seen: float


class _Come(NamedTuple):
    """A call to which all have come, the last one at that instant."""

    number: int
    at: int
    rank: int
    gap: int


class SampledLateness:
    """Finds a straggler among ranks whose clocks agree but for a doubt."""

    def __init__(self, doubt: Doubt = no_doubt) -> None:
        self._doubt = doubt
        self._pending: dict[tuple[str, int], dict[int, Begun]] = {}
        self._judged: dict[str, dict[int, _Come]] = {}
        self._latest: dict[str, int] = {}
        self._sizes: dict[str, int] = {}

    def see(self, rank: int, groups: Mapping[str, Group], calls: Iterable[Begun]) -> None:
        """Take in calls of one rank; one that was seen before changes nothing."""
        for call in calls:
            group = groups[call.group]
            if not 1 < group.size == len(group.members) or rank not in group.members:
                continue
            judged = self._judged.setdefault(call.group, {})
            self._sizes[call.group] = group.size
            self._latest[call.group] = max(self._latest.get(call.group, 0), call.number)
            if call.number in judged:
                continue
            come = self._pending.setdefault((call.group, call.number), {})
            come[rank] = call
            if len(come) == group.size:
                del self._pending[call.group, call.number]
                judged[call.number] = self._judge(come)
                if len(judged) > _KEPT_MAX:
                    del judged[min(judged)]
            elif len(self._pending) > _PENDING_MAX:
                del self._pending[min(self._pending, key=lambda key: key[1])]

    def _judge(self, come: Mapping[int, Begun]) -> _Come:
        *_, before, last = sorted(come, key=lambda rank: (come[rank].begun_at, rank))
        at = come[last].begun_at
        gap = at - come[before].begun_at - self._doubt(before, last)
        return _Come(come[last].number, at, last, max(0, gap))

    def straggler(self) -> Straggler | None:
        """The rank for which the others wait in most volleys, if that costs them notably."""
        found = [
            straggler
            for group, judged in self._judged.items()
            if (straggler := self._straggler_of(group, judged)) is not None
        ]
        return max(found, key=lambda each: each.cost, default=None)

    def _straggler_of(self, group: str, judged: Mapping[int, _Come]) -> Straggler | None:
        volleys = _volleys([judged[number] for number in sorted(judged)])
        if len(volleys) < _VOLLEYS_MIN:
            return None
        ends = [volley[-1] for volley in volleys]
        ranks = [come.rank for come in ends]
        rank = max(sorted(set(ranks)), key=ranks.count)
        lost = median(come.gap if come.rank == rank else 0 for come in ends)
        others = sum(come.gap for come in ends if come.rank != rank)
        if not is_outstanding(sum(come.gap for come in ends) - others, others, self._sizes[group]):
            return None
        beat = median(later[0].at - earlier[0].at for earlier, later in pairwise(volleys))
        if lost <= NOTABLE_SHARE * beat:
            return None
        return Straggler(
            rank=rank,
            last=ranks.count(rank) / len(ranks),
            cost=min(1.0, lost / beat),
            seen=len(judged) / self._latest[group],
        )


def _volleys(calls: Sequence[_Come]) -> list[list[_Come]]:
    """Calls that follow each other without a pause, together."""
    if not calls:
        return []
    pauses = sorted(later.at - earlier.at for earlier, later in pairwise(calls))
    long = pauses[len(pauses) * 9 // 10] / 2 if pauses else 0
    volleys = [[calls[0]]]
    for earlier, later in pairwise(calls):
        if later.at - earlier.at > long:
            volleys.append([])
        volleys[-1].append(later)
    return volleys
