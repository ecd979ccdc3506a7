"""Where the bytes of a mapping lie: in one memory after the other, or interleaved.

Interleaved memories take turns, a granule of bytes each. Every round begins one memory later than
the one before, so that the rows of a matrix whose length is a multiple of a round do not all begin
in the same memory, as real address hashes see to it.

An access is a number of ranges; `pieces` says how much of it lies in which memory. Memories that
have parts in turn may be there more than once.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from rankwise.sim.hardware.hardware_machine import Memory

SMALLEST_GRANULE = 256
"""Bytes that a memory has at least, before the next one has its turn."""

Offsets: TypeAlias = npt.NDArray[np.int64]
"""Bytes from the beginning of a mapping."""


class Consecutive:
    """Stretches that lie in one memory each.

    Args:
        sizes: the bytes of each stretch.
        memories: where it lies.
    """

    def __init__(self, sizes: Sequence[int], memories: "Sequence[Memory]") -> None:
        self.memories = tuple(memories)
        self._sizes = tuple(sizes)
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._borders: list[int] = self._ends.tolist()

    def stretches(self, offset: int, count: int) -> "Iterator[tuple[Memory, int]]":
        """Cut a range where the memory changes: a memory, and how many bytes there."""
        end, place = offset + count, bisect_right(self._borders, offset)
        while offset < end:
            border = min(self._borders[place], end)
            yield self.memories[place], border - offset
            offset, place = border, place + 1

    def pieces(self, begins: Offsets, ends: Offsets) -> tuple[Offsets, Offsets]:
        """Of ranges: the memories that they lie in, by number, and how many bytes there."""
        first = np.searchsorted(self._ends, begins, "right")
        last = np.searchsorted(self._ends, ends, "left")
        numbers, lows, highs = _cut(begins, ends, first, last)
        sizes = np.minimum(highs, self._ends[numbers])
        sizes -= np.maximum(lows, self._ends[numbers - 1] * (numbers > 0))
        return numbers, sizes

    def on(self, memory_of: "Callable[[Memory], Memory]") -> "Consecutive":
        """The same rule over the memories that stand for these."""
        return Consecutive(self._sizes, [memory_of(memory) for memory in self.memories])

    @property
    def layout(self) -> Hashable:
        """The rule, apart from its memories."""
        return self._sizes


class Interleaved:
    """Granules of bytes that lie in memories in turn.

    Args:
        granule: bytes of a granule.
        memories: who takes turns.
    """

    def __init__(self, granule: int, memories: "Sequence[Memory]") -> None:
        self.memories = tuple(memories)
        self.granule = granule

    def stretches(self, offset: int, count: int) -> "Iterator[tuple[Memory, int]]":
        """Cut a range where the memory changes: a memory, and how many bytes there."""
        end = offset + count
        while offset < end:
            number = offset // self.granule
            border = min((number + 1) * self.granule, end)
            yield self.memories[self._memory_of(number)], border - offset
            offset = border

    def pieces(self, begins: Offsets, ends: Offsets) -> tuple[Offsets, Offsets]:
        """Of ranges: the memories that they lie in, by number, and how many bytes there."""
        granule, count = self.granule, len(self.memories)
        if len(begins) == 1 and int(ends[0] - begins[0]) > 2 * granule * count:
            before, upto = (
                np.array(interleaved_sizes(int(edge[0]), granule, count)) for edge in (begins, ends)
            )
            return np.arange(count), upto - before
        numbers, lows, highs = _cut(begins, ends, begins // granule, (ends - 1) // granule)
        sizes = np.minimum(highs, (numbers + 1) * granule) - np.maximum(lows, numbers * granule)
        return self._memory_of(numbers), sizes

    def on(self, memory_of: "Callable[[Memory], Memory]") -> "Interleaved":
        """The same rule over the memories that stand for these."""
        return Interleaved(self.granule, [memory_of(memory) for memory in self.memories])

    @property
    def layout(self) -> Hashable:
        """The rule, apart from its memories."""
        return self.granule

    def _memory_of(self, number: Any) -> Any:
        count = len(self.memories)
        return (number + number // count) % count


Places: TypeAlias = Consecutive | Interleaved
"""A rule that says in which memory each byte of a mapping lies."""


def _cut(
    begins: Offsets, ends: Offsets, first: Offsets, last: Offsets
) -> tuple[Offsets, Offsets, Offsets]:
    """Repeat ranges for every part that they have a piece in: the part, and the range."""
    counts = last - first + 1
    if (counts == 1).all():
        return first, begins, ends
    before = np.cumsum(counts) - counts
    parts = np.arange(counts.sum()) + np.repeat(first - before, counts)
    return parts, np.repeat(begins, counts), np.repeat(ends, counts)


def dealt_in_turn(size: int, granule: int, count: int) -> tuple[int, list[int]]:
    """How a mapping is dealt to so many memories: the granule, and the bytes of each.

    The granule is smaller than the given one if that is not enough for all, and the memories are
    fewer if the smallest is not.
    """
    share = -(-size // count // SMALLEST_GRANULE) * SMALLEST_GRANULE
    granule = min(granule, max(share, SMALLEST_GRANULE))
    return granule, interleaved_sizes(size, granule, min(count, -(-size // granule)))


def interleaved_sizes(size: int, granule: int, count: int) -> list[int]:
    """How many bytes of a mapping each of so many memories has."""
    granules = -(-size // granule)
    rounds, rest = divmod(granules, count)
    sizes = [rounds * granule] * count
    for number in range(rounds * count, rounds * count + rest):
        sizes[(number + number // count) % count] += granule
    last = granules - 1
    sizes[(last + last // count) % count] -= granules * granule - size
    return sizes
