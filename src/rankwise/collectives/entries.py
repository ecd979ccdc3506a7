"""How a communicator's operations are entered in the rank's book, which its agent can read."""

import zlib
from collections.abc import Iterable

from rankwise.collectives.calls import Call
from rankwise.drivers.real.worker.call_ring import CallRing, RingGroup, line_outside, words_of

KEY = "rankwise.collectives"
_HERE = (__file__.removesuffix("entries.py"),)
_KNOWN_MAX = 1024


class Entries:
    """Enters the operations of one communicator, which all ranks share."""

    def __init__(self, ring: CallRing, ranks: Iterable[int]) -> None:
        members = tuple(ranks)
        self._ring = ring
        self._group: RingGroup | None = ring.add_group(KEY, "", len(members), members)
        self._known: dict[tuple[Call, str, int], tuple[int, bytes]] = {}

    def begin(self, call: Call) -> int:
        """Enter an operation; return where, for `end`."""
        line = line_outside(2, _HERE)
        key = (call, *line)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            known = self._known[key] = zlib.crc32(call.header), words_of(call.text, line)
        return self._ring.begin(self._group, *known)

    def end(self, entry: int, stage: int) -> None:
        """Enter how an operation has ended."""
        self._ring.end(entry, stage)
