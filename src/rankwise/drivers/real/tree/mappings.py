"""Which memory of this process its future children will share with it, and not copy."""

from bisect import bisect_right


class SharedRanges:
    """The shared mappings that there were when this was made: before a fork, what it will share."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        with open("/proc/self/maps", encoding="utf-8") as maps:
            for line in maps:
                span, permissions = line.split(None, 2)[:2]
                if permissions.endswith("s"):
                    start, end = (int(part, 16) for part in span.split("-"))
                    self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        if self._ends and self._ends[-1] == start:
            self._ends[-1] = end
        else:
            self._starts.append(start)
            self._ends.append(end)

    def cover(self, start: int, size_bytes: int) -> bool:
        """Whether all these bytes are shared."""
        place = bisect_right(self._starts, start) - 1
        return place >= 0 and start + size_bytes <= self._ends[place]
