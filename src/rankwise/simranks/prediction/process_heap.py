"""The heap of a process: which memory is new, and has to be mapped and zeroed page by page.

The rules are those of glibc's malloc. Blocks from a limit on are mapped on their own, smaller ones
lie in the heap. A block that lives longer keeps what lies before it from being given back.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable

_LIMIT_LEAST, _LIMIT_MOST = 128 << 10, 32 << 20
_PAD = 128 << 10
"""So much is kept of a free end that is given back."""
_HEADER = 64
"""What a block has beside its bytes: torch's are aligned."""


class ProcessHeap:
    """What a process has of the kernel, in bytes."""

    def __init__(self) -> None:
        self._limit = _LIMIT_LEAST
        self._trimmed_beyond = _LIMIT_LEAST
        self._end = 0
        """Where the free end begins."""
        self._touched = 0
        """Up to where pages are mapped."""
        self._free: list[tuple[int, int]] = []
        """Free parts by size and place."""
        self._begins: dict[int, int] = {}
        """Their sizes by where they begin."""
        self._ends: dict[int, int] = {}
        """Their sizes by where they end."""
        self._places: dict[Hashable, tuple[int, int]] = {}

    def take(self, block: Hashable, size: int) -> int:
        """Take a block; returns how much of it is new."""
        if size >= self._limit:
            return size  # mapped on its own, and unmapped when it is freed: each page is new
        size += _HEADER
        # The smallest free part that is large enough, else the end of the heap.
        at = bisect_left(self._free, (size, 0))
        if at < len(self._free):
            whole, place = self._free[at]
            self._leave(whole, place)
            if whole > size:
                self._keep(whole - size, place + size)
        else:
            place, self._end = self._end, self._end + size
        self._places[block] = size, place
        new = max(0, place + size - self._touched)
        self._touched += new
        return new

    def give_back(self, block: Hashable, size: int) -> None:
        """Free a block."""
        known = self._places.pop(block, None)
        if known is None:
            # It was mapped on its own. glibc takes that as a sign that such blocks come again, and
            # has them in the heap from now on.
            if self._limit < size <= _LIMIT_MOST:
                self._limit, self._trimmed_beyond = size + 1, 2 * size
            return
        size, place = known
        # Free parts that touch become one.
        before, after = self._ends.get(place), self._begins.get(place + size)
        if before is not None:
            self._leave(before, place - before)
            place, size = place - before, size + before
        if after is not None:
            self._leave(after, known[1] + known[0])
            size += after
        if place + size < self._end:
            self._keep(size, place)
            return
        self._end = place
        # The kernel gets a long free end back, but for a pad.
        if self._touched - self._end > self._trimmed_beyond:
            self._touched = self._end + _PAD

    def _keep(self, size: int, place: int) -> None:
        insort(self._free, (size, place))
        self._begins[place] = self._ends[place + size] = size

    def _leave(self, size: int, place: int) -> None:
        del self._free[bisect_right(self._free, (size, place)) - 1]
        del self._begins[place], self._ends[place + size]
