"""Bytes to give out: first fit in a list of free ranges, neighbours joined when they come back.

Not a ring: what lives long at the front of a ring keeps everything behind it from being used.
"""

from bisect import bisect_right

ALIGNMENT = 1024
"""Of every address given out, and the unit of sizes."""


class Heap:
    """The bytes from `start` on; addresses are numbers, nothing is touched."""

    def __init__(self, start: int, capacity_bytes: int) -> None:
        assert start % ALIGNMENT == 0, "a heap begins at an aligned address"
        self.start = start
        self.capacity_bytes = capacity_bytes // ALIGNMENT * ALIGNMENT
        self.free_bytes = self.capacity_bytes
        self._starts = [start]
        self._ends = [start + self.capacity_bytes]

    @staticmethod
    def rounded(size_bytes: int) -> int:
        """What a request for so many bytes takes."""
        return max(ALIGNMENT, -(-size_bytes // ALIGNMENT) * ALIGNMENT)

    def take(self, size_bytes: int) -> int | None:
        """The address of `size_bytes` (rounded) free bytes; None when there is no such range."""
        for index, start in enumerate(self._starts):
            if self._ends[index] - start >= size_bytes:
                break
        else:
            return None
        if self._ends[index] - start == size_bytes:
            del self._starts[index], self._ends[index]
        else:
            self._starts[index] = start + size_bytes
        self.free_bytes -= size_bytes
        return start

    def give_back(self, address: int, size_bytes: int) -> None:
        """Make a range that was taken free again."""
        end = address + size_bytes
        index = bisect_right(self._starts, address)
        assert index == 0 or self._ends[index - 1] <= address, "these bytes were free already"
        joins_before = index > 0 and self._ends[index - 1] == address
        joins_after = index < len(self._starts) and self._starts[index] == end
        if joins_before and joins_after:
            self._ends[index - 1] = self._ends[index]
            del self._starts[index], self._ends[index]
        elif joins_before:
            self._ends[index - 1] = end
        elif joins_after:
            self._starts[index] = address
        else:
            self._starts.insert(index, address)
            self._ends.insert(index, end)
        self.free_bytes += size_bytes
