"""A run as a timeline for Perfetto: trace-event JSON.

One process per SIP, one track per engine, counters (`counters`), and an arrow for every message
from PE to PE. Instants
are microseconds, as the format has it, with six decimals: picoseconds are kept. Equal runs give
equal bytes. How figures are written so that Perfetto, which counts whole nanoseconds, drops
nothing is told in `base.trace_events`; the ends of an arrow lie in slices that last a nanosecond at
least, since an arrow cannot be fastened to nothing.

An operation of a PE begins when its engine got to it; if it had waited, `waited_us` says how long.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from rankwise.base.trace_events import (
    PICOSECONDS_PER_MICROSECOND,
    PICOSECONDS_PER_NANOSECOND,
    TraceEvent,
    lanes_of,
    microseconds,
    number_step,
    process_events,
    slice_event,
    track_events,
)
from rankwise.sim.hardware.hardware_machine import SlotMessage
from rankwise.sim.reporting.counters import Count, bandwidths, pes_in_use, queue_depths
from rankwise.sim.reporting.files import write_text
from rankwise.sim.reporting.timeline import (
    MESSAGES_IN,
    MESSAGES_OUT,
    EngineName,
    ReportedRun,
    Slice,
    by_place,
    got_to,
    order_of,
)

_ENCODER = msgspec.json.Encoder()


class _Track(NamedTuple):
    place: EngineName
    lane: int

    @property
    def name(self) -> str:
        pe, engine = self.place.pe, self.place.engine
        shown = f"{pe} {engine}" if pe else engine
        return f"{shown} ({self.lane + 1})" if self.lane else shown


class _TrackSlice(NamedTuple):
    """A slice of a track, before the track has a number."""

    track: _Track
    name: str
    category: str
    start: int
    end: int
    details: dict[str, Any]


class _ArrowEnd(NamedTuple):
    """Where an arrow begins, or where it ends."""

    track: _Track
    phase: str
    number: int
    at: int


def write_trace(path: str, engine: ReportedRun) -> None:
    """Write the timeline of a run; packed if the name ends in .gz."""
    lines = (_ENCODER.encode(event).decode() for event in trace_events(engine))
    body = ",\n".join(lines)
    write_text(path, f'{{"displayTimeUnit":"ns","traceEvents":[\n{body}\n]}}\n')


def trace_events(engine: ReportedRun) -> list[TraceEvent]:
    """The events: names of processes and tracks first, then everything else by time."""
    shown = [*_operations(engine), *_messages(engine)]
    tracks = _Tracks(each.track for each in shown)
    events = [_event(each, tracks) for each in shown]
    events += [_counter_event(each, tracks) for each in _counts(engine)]
    events.sort(key=lambda event: (event["ts"], event["ph"] != "X"))
    return [*tracks.names(), *events]


class _Tracks:
    """The numbers of processes and tracks, in the order in which they are to be seen."""

    def __init__(self, tracks: Iterable[_Track]) -> None:
        ordered = sorted(set(tracks), key=lambda each: (order_of(each.place), each.lane))
        self._of_sip = {
            sip: list(each) for sip, each in groupby(ordered, lambda each: each.place.sip)
        }
        self._step = number_step(max(map(len, self._of_sip.values()), default=0))
        self._numbers = {
            track: self.process(sip) + row
            for sip, own in self._of_sip.items()
            for row, track in enumerate(own, 1)
        }

    def process(self, sip: int) -> int:
        return (sip + 1) * self._step

    def __getitem__(self, track: _Track) -> int:
        return self._numbers[track]

    def names(self) -> Iterator[TraceEvent]:
        # Perfetto sorts processes by their names, and has its own idea of where 10 goes.
        width = len(str(max(self._of_sip, default=0)))
        for sip, own in self._of_sip.items():
            yield from process_events(self.process(sip), f"SIP {sip:0{width}}", sip)
            for track in own:
                yield from track_events(self.process(sip), self[track], track.name)


def _event(shown: _TrackSlice | _ArrowEnd, tracks: _Tracks) -> TraceEvent:
    process, number = tracks.process(shown.track.place.sip), tracks[shown.track]
    if isinstance(shown, _TrackSlice):
        return slice_event(
            shown.name, shown.category, process, number, shown.start, shown.end, shown.details
        )
    event = {
        "name": "message", "cat": "message", "ph": shown.phase, "id": shown.number,
        "pid": process, "tid": number, "ts": microseconds(shown.at),
    }  # fmt: skip
    return {**event, "bp": "e"} if shown.phase == "f" else event


def _counts(engine: ReportedRun) -> Iterator[Count]:
    machine = engine.machine
    if machine.samples is not None:
        yield from bandwidths(machine.samples, engine.now)
    yield from pes_in_use(engine.op_log)
    yield from queue_depths(machine.messages or [])


def _counter_event(count: Count, tracks: _Tracks) -> TraceEvent:
    value = round(count.value, 3) if count.value % 1 else int(count.value)
    return {
        "name": count.name, "ph": "C", "pid": tracks.process(count.sip),
        "ts": microseconds(count.at), "args": {count.unit: value},
    }  # fmt: skip


def _operations(engine: ReportedRun) -> Iterator[_TrackSlice]:
    for place, slices in by_place(engine.op_log).items():
        bars = [_bar(place, each, start) for each, start in _begun(place, slices)]
        bars.sort(key=lambda bar: (bar.start, bar.end))
        lanes = lanes_of((bar.start, bar.end) for bar in bars)
        for bar, lane in zip(bars, lanes, strict=True):
            yield bar._replace(track=_Track(place, lane))


def _begun(place: EngineName, slices: Sequence[Slice]) -> Iterable[tuple[Slice, int]]:
    """When each is shown to begin: engines of PEs do one thing after the other."""
    if not place.pe:
        return [(each, each.start) for each in slices]
    starts = got_to([(each.start, each.end) for each in slices])
    return zip(slices, starts, strict=True)


def _bar(place: EngineName, each: Slice, start: int) -> _TrackSlice:
    operation = each.operation
    details: dict[str, Any] = {"kind": operation.kind, "number": operation.number}
    if operation.bytes:
        details["bytes"] = operation.bytes
    if operation.flops:
        details["flops"] = operation.flops
    if start > each.start:
        details["waited_us"] = (start - each.start) / PICOSECONDS_PER_MICROSECOND
    return _TrackSlice(_Track(place, 0), operation.name, place.engine, start, each.end, details)


def _messages(engine: ReportedRun) -> Iterator[_TrackSlice | _ArrowEnd]:
    """A slice where each message leaves, one where it arrives, and an arrow between them."""
    messages = engine.machine.messages or []
    leaving = _placed([_lasting(each.source, each.sent_at, each.pace) for each in messages])
    # The last bytes of a message come in as slowly as they had left.
    coming = _placed(
        [
            _lasting(each.destination, max(each.sent_at, each.arrived_at - _shown(each)), each.pace)
            for each in messages
        ]
    )
    for number, message in enumerate(messages):
        yield from _message(number, message, leaving[number], coming[number])


def _shown(message: SlotMessage) -> int:
    """How long a message is drawn at either end."""
    return max(message.pace, PICOSECONDS_PER_NANOSECOND)


def _lasting(pe: str, start: int, duration: int) -> tuple[str, int, int]:
    """An interval of a PE that something can be fastened to."""
    return pe, start, start + max(duration, PICOSECONDS_PER_NANOSECOND)


def _placed(intervals: Sequence[tuple[str, int, int]]) -> list[tuple[int, int, int]]:
    """For every interval of a PE its start, its end, and a lane in which it is alone."""
    lanes: list[tuple[int, int, int]] = [(0, 0, 0)] * len(intervals)
    by_pe: dict[str, list[int]] = {}
    for index, (pe, _, _) in enumerate(intervals):
        by_pe.setdefault(pe, []).append(index)
    for indexes in by_pe.values():
        indexes.sort(key=lambda index: intervals[index][1:])
        found = lanes_of(intervals[index][1:] for index in indexes)
        for index, lane in zip(indexes, found, strict=True):
            lanes[index] = (*intervals[index][1:], lane)
    return lanes


def _message(
    number: int, message: SlotMessage, leaving: tuple[int, int, int], coming: tuple[int, int, int]
) -> Iterator[_TrackSlice | _ArrowEnd]:
    details = {"bytes": message.size, "from": message.source, "to": message.destination}
    for pe, way, name, (start, end, lane), phase in (
        (message.source, MESSAGES_OUT, f"to {message.destination}", leaving, "s"),
        (message.destination, MESSAGES_IN, f"from {message.source}", coming, "f"),
    ):
        sip, _, rest = pe.partition(".")
        track = _Track(EngineName(int(sip.removeprefix("sip")), rest, way), lane)
        yield _TrackSlice(track, name, "message", start, end, details)
        yield _ArrowEnd(track, phase, number, start)
