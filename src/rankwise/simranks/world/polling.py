"""Pauses of a rank that looks for something in a loop, until it is there (`Scheduler.poll`)."""

from collections.abc import Hashable

from rankwise.base.units import SECOND, Instant
from rankwise.simranks.world.gates import Gate

_PAUSE = 1_000
"""How long a rank that polls pauses at first, so that what it waits for can come: 1 us."""
_PAUSE_MAX = SECOND
_LOOKS_PER_WAIT = 128
"""A rank that has polled for long pauses for this part of it: so much late it sees what comes."""
_GAP_MAX = SECOND // 1_000
"""A rank that lets more time than this pass between two looks does more than look."""
_SOUGHT_MAX = 1_000
"""For how many things a rank can look in turn, so that it is known since when."""


class Polling:
    """What a rank has looked for in vain, and since when it does."""

    __slots__ = ("_gone_on", "_since")

    def __init__(self) -> None:
        self._since: dict[Hashable, Instant] = {}
        self._gone_on = Instant(0)

    def pause_after(self, what: Hashable, now: Instant) -> int:
        """How long to pause after a look for `what`: the longer, the longer it is looked for."""
        if now - self._gone_on > _GAP_MAX:
            self._since = {}
        since = self._since.get(what)
        if since is None:
            sought = [each for each in self._since.items() if not _has_happened(each[0])]
            self._since = dict(sought[-_SOUGHT_MAX:])
            since = self._since[what] = now
        return min(max((now - since) // _LOOKS_PER_WAIT, _PAUSE), _PAUSE_MAX)

    def go_on(self, now: Instant) -> None:
        """The rank goes on after a pause."""
        self._gone_on = now


def _has_happened(what: object) -> bool:
    return isinstance(what, Gate) and what.is_open
