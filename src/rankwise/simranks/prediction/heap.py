"""The heap of a process: which memory is new, and has to be mapped and zeroed page by page.

The rules are those of glibc's malloc. A block of 32 MiB or more is mapped when it is taken, and
unmapped when it is freed. Smaller ones lie one after the other, and freed ones are used again. If
more than a threshold is free at the end of the heap, the kernel gets it back. The threshold is
twice the largest block that was freed. The model takes free memory to lie at the end: a block that
lives longer than those before it can keep the heap from shrinking.
"""

_MAPPED_BYTES = 32 << 20
_THRESHOLD_LEAST = 128 << 10


class Heap:
    """What a process has of the kernel, in bytes."""

    def __init__(self) -> None:
        self._used = self._mapped = 0
        self._threshold = _THRESHOLD_LEAST

    def take(self, size: int) -> int:
        """Take a block; returns how much of it is new."""
        if size >= _MAPPED_BYTES:
            return size
        self._used += size
        new = max(0, self._used - self._mapped)
        self._mapped += new
        return new

    def give_back(self, size: int) -> None:
        """Free a block."""
        if size >= _MAPPED_BYTES:
            return
        self._used -= size
        self._threshold = max(self._threshold, 2 * size)
        if self._mapped - self._used > self._threshold:
            self._mapped = self._used
