"""Events of a timeline as trace-event JSON, written so that viewers read the right instants.

The format has microseconds; six decimals keep picoseconds. Chrome's viewer takes them as they are.
Perfetto counts whole nanoseconds: some of its versions cut the rest off, others round it, and all
drop a slice that begins on its track before the last one has ended. Simultaneous work needs lanes,
a track each; and figures are chosen such that

- a start is cut off and rounded as the exact one would be (a half is rounded up);
- however a start and a duration are read, their sum is not after the end, read in the same way.

For this a duration is written up to half a nanosecond shorter where it has to be.
"""

import math
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Any

PICOSECONDS_PER_NANOSECOND = 1_000
PICOSECONDS_PER_MICROSECOND = 1_000_000

TraceEvent = dict[str, Any]


def microseconds(picoseconds: int) -> float:
    """The figure to write for an instant or a duration that is not negative."""
    figure = picoseconds / PICOSECONDS_PER_MICROSECOND
    whole, rest = divmod(picoseconds, PICOSECONDS_PER_NANOSECOND)
    # A little more where a thousand times the figure is a little less than what it stands for; and
    # at a half, which some round to even.
    while int(figure * 1_000) < whole or (rest == 500 and figure * 1_000 <= whole + 0.5):
        figure = math.nextafter(figure, math.inf)
    return figure


def slice_event(  # noqa: PLR0917  # a row of a table
    name: str, category: str, process: int, track: int, start: int, end: int, details: TraceEvent
) -> TraceEvent:
    """Something that a track did from one instant to another, in picoseconds."""
    return {
        "name": name, "cat": category, "ph": "X", "pid": process, "tid": track,
        "ts": microseconds(start), "dur": microseconds(_duration(start, end)), "args": details,
    }  # fmt: skip


def number_step(track_count_max: int) -> int:
    """By how much the numbers of processes differ, if each is followed by those of its tracks.

    Perfetto shows numbers behind names. So that they are not taken for parts of the names, they are
    large: `SIP 0 1000` and `SIP 1 2000`, where there are not too many tracks.
    """
    step = 1_000
    while step <= track_count_max:
        step *= 10
    return step


def process_events(process: int, name: str, place: int) -> list[TraceEvent]:
    """The name of a process, and which place it has among all."""
    return [
        _about("process_name", process, 0, name=name),
        _about("process_sort_index", process, 0, sort_index=place),
    ]


def track_events(process: int, track: int, name: str) -> list[TraceEvent]:
    """The name of a track; tracks are shown in the order of their numbers."""
    return [
        _about("thread_name", process, track, name=name),
        _about("thread_sort_index", process, track, sort_index=track),
    ]


def lanes_of(intervals: Iterable[tuple[int, int]]) -> list[int]:
    """For every interval, in the order of their starts, the lowest lane that is free by then."""
    lanes: list[int] = []
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for start, end in intervals:
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(busy)
        lanes.append(lane)
        # Even what takes no time keeps its lane to itself, or two would start at one place.
        heappush(busy, (max(end, start + 1), lane))
    return lanes


def _about(what: str, process: int, track: int, **args: Any) -> TraceEvent:
    return {"name": what, "ph": "M", "pid": process, "tid": track, "ts": 0, "args": args}


def _duration(start: int, end: int) -> int:
    duration = end - start
    if _rounded(start) + _rounded(duration) > _rounded(end):
        return duration - duration % PICOSECONDS_PER_NANOSECOND + 499
    return duration


def _rounded(picoseconds: int) -> int:
    """To whole nanoseconds, a half up."""
    return (picoseconds + 500) // PICOSECONDS_PER_NANOSECOND
