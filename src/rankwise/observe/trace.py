"""A run's timeline for Perfetto, as trace-event JSON.

One process per node, one track per rank. A rank's lives hold its sections, these its calls, and a
call the time that the rank waited in it for the last to come. Slices that overlap without lying in
another (calls of several threads) goes to further lanes of the rank. Arrows lead through the calls
of one operation on all its ranks, in the order in which they came. The file says how well clocks
agree. Calls that C++ has begun are marks on a track of their own, since they are a sample.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from rankwise.base.failure import failure_in_words
from rankwise.base.trace_events import (
    PICOSECONDS_PER_NANOSECOND,
    TraceEvent,
    microseconds,
    number_step,
    process_events,
    slice_event,
    track_events,
)
from rankwise.core.ledger import Stage
from rankwise.observe.records import BEGUN_BY_CPP
from rankwise.observe.timeline import CallKey, PlacedCall, RankTrack, RunTimeline, clocks_in_words

_WAIT_SHOWN = 20_000
"""Nanoseconds: shorter waits are not of interest."""
_PAIR = 2
_SAMPLED = "calls from C++ (sampled)"
_MARK = 1_000
"""Nanoseconds: how long a mark is."""
_NEVER = 1 << 62


class _Bar(NamedTuple):
    """A slice; `call` is the one that arrows lead to."""

    begin: int
    end: int
    order: int
    name: str
    category: str
    details: dict[str, Any]
    call: PlacedCall | None = None


def trace_text(timeline: RunTimeline) -> str:
    """The trace as JSON."""
    encode = msgspec.json.Encoder().encode
    error = timeline.clock_error
    about = {
        "began": timeline.wall_ns,
        "clocks": clocks_in_words(timeline) or "one node, one clock",
        "clock_error_us": None if error is None else error / 1000,
        "clock_bound_us": max(clock.bound for clock in timeline.clocks) / 1000,
        "calls_recorded": round(timeline.calls_recorded, 4),
    }
    # One by one: there may be a million, and as objects they take ten times as much memory.
    events = b",\n".join(encode(event) for event in _events(timeline))
    head = b'{"displayTimeUnit":"ns","otherData":' + encode(about)
    return b"".join([head, b',"traceEvents":[\n', events, b"\n]}\n"]).decode()


def _events(timeline: RunTimeline) -> Iterator[TraceEvent]:
    on_node = [
        [track for track in timeline.tracks.values() if _home(track) == node]
        for node in range(len(timeline.nodes))
    ]
    bars = {
        rank: [*_lanes(_bars(track)), *filter(None, [_sampled_bars(track)])]
        for rank, track in timeline.tracks.items()
    }
    step = number_step(1 + max(sum(len(bars[each.rank]) for each in own) for own in on_node))
    places: dict[CallKey, list[tuple[int, int, int]]] = {}
    for node, own in enumerate(on_node):
        process = (node + 1) * step
        host = timeline.nodes[node].host
        yield from process_events(process, f"node {timeline.nodes[node].node_rank}: {host}", node)
        yield from track_events(process, process, "agent")
        thread = process + 1
        for track in own:
            for lane, lane_bars in enumerate(bars[track.rank]):
                name = f"rank {track.rank}" + (f" ({lane + 1})" if lane else "")
                if lane_bars[0].category == _SAMPLED:
                    name = f"rank {track.rank}: {_SAMPLED}"
                yield from track_events(process, thread, name)
                for bar in lane_bars:
                    yield _slice(bar, process, thread)
                    if bar.call is not None and bar.call.key is not None:
                        places.setdefault(bar.call.key, []).append((bar.begin, process, thread))
                thread += 1
            yield from _counters(track, process)
        yield from _gpu_counters(timeline, node, process)
        yield from _failures(timeline, node, process)
    yield from _arrows(places.values())
    for at, text in timeline.moments:
        yield _instant(text, "run", step, step, at, "g")


def _home(track: RankTrack) -> int:
    """The node on which a rank lived last."""
    return track.lives[-1].node if track.lives else 0


def _bars(track: RankTrack) -> list[_Bar]:
    bars = [
        _Bar(
            life.begin, life.end, 0, f"attempt {life.attempt}", "attempt",
            {"ended": (life.exit or "well") if life.is_over else "not seen"},
        )
        for life in track.lives
    ]  # fmt: skip
    bars += [
        _Bar(
            each.begin, each.end, 1 + each.depth, each.name, "section",
            {} if each.is_over else {"ended": "not seen"},
        )
        for each in track.sections
    ]  # fmt: skip
    for call in track.calls:
        if call.stage == BEGUN_BY_CPP:
            continue
        details: dict[str, Any] = {"line": call.place} if call.place else {}
        if call.label:
            details["group"] = call.label
        if call.stage == Stage.ISSUED:
            details["issued"] = "without waiting"
        if not call.is_over:
            details["ended"] = "not seen"
        waited = call.waited_until - call.begin
        if waited > 0:
            details["waited_us"] = waited / 1000
        arrows = call if call.is_counted else None
        bars.append(_Bar(call.begin, call.end, 100, call.text, "collective", details, arrows))
        if waited >= _WAIT_SHOWN:
            name = f"waits for rank {call.awaited}"
            bars.append(_Bar(call.begin, call.waited_until, 101, name, "waiting", {}))
    return bars


def _sampled_bars(track: RankTrack) -> list[_Bar]:
    """What C++ has begun, as far as that is known: each a mark, since its end is unknown."""
    calls = sorted(
        (call for call in track.calls if call.stage == BEGUN_BY_CPP), key=lambda call: call.begin
    )
    begins = [*(call.begin for call in calls), _NEVER]
    return [
        _Bar(
            call.begin, min(call.begin + _MARK, then), 100, call.text, _SAMPLED,
            {"group": call.label, "ended": "not known"} if call.label else {"ended": "not known"},
            call,
        )
        for call, then in zip(calls, begins[1:], strict=True)
    ]  # fmt: skip


def _lanes(bars: list[_Bar]) -> list[list[_Bar]]:
    """The bars dealt to lanes in which each lies in another or beside it: the outer one first."""
    bars.sort(key=lambda bar: (bar.begin, -bar.end, bar.order))
    lanes: list[list[_Bar]] = []
    open_until: list[list[int]] = []
    for bar in bars:
        lane = next((lane for lane, ends in enumerate(open_until) if _fits(bar, ends)), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            open_until.append([])
        lanes[lane].append(bar)
        open_until[lane].append(bar.end)
    return lanes


def _fits(bar: _Bar, ends: list[int]) -> bool:
    """Whether it lies in the innermost bar of a lane that is open when it begins, or in none."""
    while ends and ends[-1] <= bar.begin:
        ends.pop()
    return not ends or bar.end <= ends[-1]


def _slice(bar: _Bar, process: int, thread: int) -> TraceEvent:
    begin, end = _picoseconds(bar.begin), _picoseconds(bar.end)
    return slice_event(bar.name, bar.category, process, thread, begin, end, bar.details)


def _arrows(calls: Iterable[Sequence[tuple[int, int, int]]]) -> Iterator[TraceEvent]:
    """An arrow through all ranks' calls of each operation."""
    for number, places in enumerate(calls):
        if len(places) < _PAIR:
            continue
        ordered = sorted(places)
        for index, (begin, process, thread) in enumerate(ordered):
            phase = "s" if not index else "f" if index == len(ordered) - 1 else "t"
            event: TraceEvent = {
                "name": "same call", "cat": "same call", "ph": phase, "id": number,
                "pid": process, "tid": thread, "ts": microseconds(_picoseconds(begin)),
            }  # fmt: skip
            yield event if phase == "s" else {**event, "bp": "e"}


def _counters(track: RankTrack, process: int) -> Iterator[TraceEvent]:
    """Memory, and how many cores' time was used since the sample before."""
    before: tuple[int, int] | None = None
    for at, sample in sorted(track.samples, key=lambda each: each[0]):
        yield _counter(f"rank {track.rank} memory", process, at, "MB", sample.memory / 1e6)
        if before is not None and at > before[0] and sample.cpu >= before[1]:
            cores = (sample.cpu - before[1]) / (at - before[0])
            yield _counter(f"rank {track.rank} CPU", process, before[0], "cores", cores)
        before = (at, sample.cpu)


def _gpu_counters(timeline: RunTimeline, node: int, process: int) -> Iterator[TraceEvent]:
    for (home, gpu), seen in timeline.gpus.items():
        for at, sample in seen if home == node else ():
            if sample.memory is not None:
                yield _counter(f"GPU {gpu} memory", process, at, "MB", sample.memory / 1e6)
            if sample.utilisation is not None:
                busy = 100 * sample.utilisation
                yield _counter(f"GPU {gpu} busy", process, at, "%", busy)
            if sample.celsius is not None:
                yield _counter(f"GPU {gpu} temperature", process, at, "°C", sample.celsius)


def _counter(name: str, process: int, at: int, unit: str, value: float) -> TraceEvent:
    ts = microseconds(max(0, _picoseconds(at)))
    return {"name": name, "ph": "C", "pid": process, "ts": ts, "args": {unit: round(value, 3)}}


def _failures(timeline: RunTimeline, node: int, process: int) -> Iterator[TraceEvent]:
    for failures in timeline.nodes[node].failures.values():
        for failure in failures:
            at = timeline.place(node, failure.at)
            name = failure_in_words(failure)
            yield _instant(name, "failure", process, process, at, "p")


def _instant(  # noqa: PLR0917  # a row of a table
    name: str, category: str, process: int, thread: int, at: int, scope: str
) -> TraceEvent:
    return {
        "name": name, "cat": category, "ph": "i", "s": scope, "pid": process, "tid": thread,
        "ts": microseconds(max(0, _picoseconds(at))), "args": {},
    }  # fmt: skip


def _picoseconds(nanoseconds: int) -> int:
    return max(0, nanoseconds) * PICOSECONDS_PER_NANOSECOND
