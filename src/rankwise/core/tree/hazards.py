"""Which tasks touch the same bytes, and so must keep their order.

A map of one memory is a list of segments that do not overlap. Each remembers the task that wrote
it last and the tasks that have read it since. An access that reads waits for the writer, for the
data (*read after write*); one that writes waits for the writer and the readers, for its place in
the order only (*write after write*, *write after read*).

Segments hold tasks, never slots: when an old writer ends, nothing has to be erased, so a newer
one's entry cannot be erased by mistake. A writer that did not complete stays, so that a
task that reads its bytes later is tainted too, until another one writes them anew.
"""

from bisect import bisect_right, insort
from collections.abc import Sequence

from rankwise.core.tree.state import GraphTask, TaskPhase, root_of
from rankwise.core.tree.vocabulary import HOST, Access

_READERS_BEFORE_PRUNING = 32


class ByteRange:
    """Bytes from `start` to before `end` that have the same writer and readers."""

    __slots__ = ("end", "readers", "start", "writer")

    def __init__(
        self, start: int, end: int, writer: GraphTask | None, readers: list[GraphTask]
    ) -> None:
        self.start = start
        self.end = end
        self.writer = writer
        self.readers = readers


class ByteMap:
    """The segments of one memory."""

    def __init__(self) -> None:
        self._by_start: dict[int, ByteRange] = {}
        self._starts: list[int] = []

    def cover(self, start: int, end: int) -> list[ByteRange]:
        """The segments that are exactly the bytes from `start` to `end`; made where missing."""
        segment = self._by_start.get(start)
        if segment is not None and segment.end == end:
            return [segment]
        if start >= end:
            return []
        if not self._starts or self._by_start[self._starts[-1]].end <= start:
            return [self._add(ByteRange(start, end, None, []))]  # there is nothing to split
        self._split_at(start)
        self._split_at(end)
        covered = []
        place = start
        while place < end:
            segment = self._by_start.get(place)
            if segment is None:
                segment = self._fill(place, end)
            covered.append(segment)
            place = segment.end
        return covered

    def replace(self, covered: list[ByteRange]) -> ByteRange:
        """Make one segment of several that follow each other."""
        first = covered[0]
        for segment in covered[1:]:
            self._forget(segment.start)
        first.end = covered[-1].end
        return first

    def _split_at(self, place: int) -> None:
        index = bisect_right(self._starts, place) - 1
        if index < 0:
            return
        segment = self._by_start[self._starts[index]]
        if segment.start < place < segment.end:
            self._add(ByteRange(place, segment.end, segment.writer, segment.readers.copy()))
            segment.end = place

    def _fill(self, place: int, end: int) -> ByteRange:
        index = bisect_right(self._starts, place)
        following = self._starts[index] if index < len(self._starts) else end
        return self._add(ByteRange(place, min(following, end), None, []))

    def _add(self, segment: ByteRange) -> ByteRange:
        self._by_start[segment.start] = segment
        insort(self._starts, segment.start)
        return segment

    def _forget(self, start: int) -> None:
        del self._by_start[start]
        del self._starts[bisect_right(self._starts, start) - 1]


class Hazards:
    """The maps of all memories."""

    def __init__(self) -> None:
        self._maps: dict[int, ByteMap] = {}

    def enter(self, task: GraphTask, accesses: Sequence[Access]) -> dict[GraphTask, bool]:
        """Record what a new task touches.

        Returns:
            The unfinished tasks it must wait for, each with whether it needs their data.
            `task.tainted_by` is set when it reads what a failed task should have written.
        """
        producers: dict[GraphTask, bool] = {}
        if len(accesses) == 1:
            access = accesses[0]
            segments = self._map(access.space).cover(access.start, access.end)
            if len(segments) == 1:
                # The result of all below for most tasks, in a third of the time.
                _look(task, segments[0], access, producers)
                _touch(task, segments[0], writes=access.writes)
                return producers
        covered = []
        # All looking comes before all writing, or a task that reads what it writes finds itself.
        for access in accesses:
            segments = self._map(access.space).cover(access.start, access.end)
            covered.append(segments)
            for segment in segments:
                _look(task, segment, access, producers)
        if _are_apart(accesses, covered):
            for access, (segment,) in zip(accesses, covered, strict=True):
                _touch(task, segment, writes=access.writes)
            return producers
        # Readers come before writers: a task that does both is the writer.
        for writes in (False, True):
            for access, segments in zip(accesses, covered, strict=True):
                if access.writes is writes and segments:
                    self._publish(task, access)
        return producers

    def forget(self, start: int, end: int) -> None:
        """Bytes of the host's memory begin anew."""
        if HOST not in self._maps:
            return
        segment = self._maps[HOST].replace(self._maps[HOST].cover(start, end))
        segment.writer = None
        segment.readers = []

    def forget_all(self) -> None:
        """Begin anew."""
        self._maps.clear()

    def _map(self, space: int) -> ByteMap:
        found = self._maps.get(space)
        if found is None:
            found = self._maps[space] = ByteMap()
        return found

    def _publish(self, task: GraphTask, access: Access) -> None:
        # Covered again, because an access before this one may have split or joined segments.
        space = self._map(access.space)
        segments = space.cover(access.start, access.end)
        if access.writes and len(segments) > 1:
            segments = [space.replace(segments)]
        for segment in segments:
            _touch(task, segment, writes=access.writes)


def _are_apart(accesses: Sequence[Access], covered: Sequence[Sequence[ByteRange]]) -> bool:
    """Whether each access has a segment of its own, of just its bytes."""
    for access, segments in zip(accesses, covered, strict=True):
        if len(segments) != 1 or segments[0].end != access.end:
            return False
    return len({(access.space, access.start) for access in accesses}) == len(accesses)


def _touch(task: GraphTask, segment: ByteRange, *, writes: bool) -> None:
    if writes:
        segment.writer = task
        segment.readers = []
        return
    if len(segment.readers) >= _READERS_BEFORE_PRUNING:
        segment.readers = [r for r in segment.readers if r.state < TaskPhase.COMPLETED]
    segment.readers.append(task)


def _look(
    task: GraphTask, segment: ByteRange, access: Access, producers: dict[GraphTask, bool]
) -> None:
    writer = segment.writer
    if writer is not None:
        if writer.state < TaskPhase.COMPLETED:
            producers[writer] = producers.get(writer, False) or access.reads
        else:
            task.clock = max(task.clock, writer.clock)
            if access.reads and writer.state > TaskPhase.COMPLETED and task.tainted_by is None:
                task.tainted_by = root_of(writer)
    if access.writes:
        for reader in segment.readers:
            if reader.state < TaskPhase.COMPLETED:
                producers.setdefault(reader, False)
            elif reader.clock > task.clock:
                task.clock = reader.clock
