"""Which rank made which wait, and for how long, in virtual time."""

from collections.abc import Callable
from typing import NamedTuple

from rankwise.base.units import MICROSECOND, Duration, format_duration
from rankwise.base.wording import counted

_CULPRITS_SHOWN = 5
SHORTEST_WAIT = MICROSECOND
"""What is shorter is no wait: each look at the virtual clock moves it by a nanosecond."""


class Longest(NamedTuple):
    """The longest wait for another rank."""

    took: Duration
    waiter: int
    what: Callable[[], str]


class Waits:
    """Adds up what ranks have waited for each other."""

    def __init__(self) -> None:
        self._totals: dict[int, dict[int, int]] = {}
        self._longest: dict[int, Longest] = {}

    def note(self, waiter: int, culprit: int, took: Duration, what: Callable[[], str]) -> None:
        """A rank has waited for another; `what` names the operation on request."""
        totals = self._totals.setdefault(culprit, {})
        totals[waiter] = totals.get(waiter, 0) + took
        if culprit not in self._longest or took > self._longest[culprit].took:
            self._longest[culprit] = Longest(took, waiter, what)

    def remarks(self) -> list[str]:
        """A line for each rank that others have waited for, the worst one first."""
        ordered = sorted(self._totals, key=lambda rank: (-sum(self._totals[rank].values()), rank))
        return [self._remark(culprit) for culprit in ordered[:_CULPRITS_SHOWN]]

    def _remark(self, culprit: int) -> str:
        totals, longest = self._totals[culprit], self._longest[culprit]
        total = format_duration(Duration(sum(totals.values())))
        others = counted(len(totals))
        return (
            f"rank {culprit} made {others} wait, {total} of virtual time in all; the longest was "
            f"rank {longest.waiter} for {format_duration(longest.took)}, at {longest.what()}"
        )
