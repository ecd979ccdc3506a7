"""A run as a timeline for Perfetto: trace-event JSON.

One process per SIP, one track per engine, and an arrow for every message from PE to PE. Instants
are microseconds, as the format has it, with six decimals: picoseconds are kept. Equal runs give
equal bytes.

Perfetto itself counts whole nanoseconds and cuts the rest off. What is written is chosen so that
this does no harm: slices of a track still do not overlap, and the ends of an arrow lie in slices
that last a nanosecond at least, since an arrow cannot be fastened to nothing.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from rankwise.sim.hardware.engine import GraphEngine
from rankwise.sim.hardware.machine import Message
from rankwise.sim.hardware.quantities import PICOSECONDS_PER_NANOSECOND
from rankwise.sim.reporting.files import write_text
from rankwise.sim.reporting.timeline import Place, by_place, lanes_of

PICOSECONDS_PER_MICROSECOND = 1_000_000
_Event = dict[str, Any]
_ENCODER = msgspec.json.Encoder()


def write_trace(path: str, engine: GraphEngine) -> None:
    """Write the timeline of a run; packed if the name ends in .gz."""
    lines = (_ENCODER.encode(event).decode() for event in trace_events(engine))
    body = ",\n".join(lines)
    write_text(path, f'{{"displayTimeUnit":"ns","traceEvents":[\n{body}\n]}}\n')


def trace_events(engine: GraphEngine) -> list[_Event]:
    """The events: names of processes and tracks first, then everything else by time."""
    tracks = _Tracks()
    events = [*_operation_events(engine, tracks), *_message_events(engine, tracks)]
    events.sort(key=lambda event: (event["ts"], event["ph"] != "X"))
    return [*tracks.names(), *events]


class _Tracks:
    """Gives numbers to tracks: lanes of engines, per process."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str, int], int] = {}

    def number(self, sip: int, name: str, lane: int) -> int:
        key = (sip, name, lane)
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def names(self) -> Iterator[_Event]:
        for sip in sorted({sip for sip, _, _ in self._numbers}):
            yield _named("process_name", _process(sip), 0, name=f"SIP {sip}")
            yield _named("process_sort_index", _process(sip), 0, sort_index=sip)
        for (sip, name, lane), number in self._numbers.items():
            shown = f"{name} ({lane + 1})" if lane else name
            yield _named("thread_name", _process(sip), number, name=shown)
            yield _named("thread_sort_index", _process(sip), number, sort_index=number)


def _operation_events(engine: GraphEngine, tracks: _Tracks) -> Iterator[_Event]:
    for place, slices in by_place(engine.op_log).items():
        lanes = lanes_of((each.start, each.end) for each in slices)
        for (start, end, operation), lane in zip(slices, lanes, strict=True):
            details: dict[str, Any] = {"kind": operation.kind, "number": operation.number}
            if operation.bytes:
                details["bytes"] = operation.bytes
            if operation.flops:
                details["flops"] = operation.flops
            yield _slice(
                operation.name, place.engine, _process(place.sip),
                tracks.number(place.sip, _track_name(place), lane), start, end, details,
            )  # fmt: skip


def _message_events(engine: GraphEngine, tracks: _Tracks) -> Iterator[_Event]:
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
        yield from _message(number, message, leaving[number], coming[number], tracks)


def _shown(message: Message) -> int:
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
    number: int,
    message: Message,
    leaving: tuple[int, int, int],
    coming: tuple[int, int, int],
    tracks: _Tracks,
) -> Iterable[_Event]:
    details = {"bytes": message.size, "from": message.source, "to": message.destination}
    ends = ((message.source, "out", leaving), (message.destination, "in", coming))
    for (pe_name, way, (start, end, lane)), phase in zip(ends, ("s", "f"), strict=True):
        sip, _, pe = pe_name.partition(".")
        index = int(sip.removeprefix("sip"))
        track = tracks.number(index, f"{pe} messages {way}", lane)
        other = message.destination if way == "out" else message.source
        yield _slice(
            f"{'to' if way == 'out' else 'from'} {other}", "message", _process(index), track,
            start, end, details,
        )  # fmt: skip
        arrow: _Event = {
            "name": "message", "cat": "message", "ph": phase, "id": number,
            "pid": _process(index), "tid": track, "ts": _microseconds(start),
        }  # fmt: skip
        if phase == "f":
            arrow["bp"] = "e"
        yield arrow


def _track_name(place: Place) -> str:
    return f"{place.pe} {place.engine}" if place.pe else place.engine


def _process(sip: int) -> int:
    return sip + 1  # Perfetto takes process 0 for the idle task


def _microseconds(picoseconds: int) -> float:
    """The figure to write; times a thousand and cut off, it is the right nanosecond."""
    figure = picoseconds / PICOSECONDS_PER_MICROSECOND
    if int(figure * 1_000) < picoseconds // PICOSECONDS_PER_NANOSECOND:
        return math.nextafter(figure, math.inf)
    return figure


def _slice(  # noqa: PLR0917  # a row of a table
    name: str, category: str, process: int, track: int, start: int, end: int, details: _Event
) -> _Event:
    return {
        "name": name, "cat": category, "ph": "X", "pid": process, "tid": track,
        "ts": _microseconds(start), "dur": _microseconds(end - start), "args": details,
    }  # fmt: skip


def _named(what: str, process: int, track: int, **args: Any) -> _Event:
    return {"name": what, "ph": "M", "pid": process, "tid": track, "ts": 0, "args": args}
