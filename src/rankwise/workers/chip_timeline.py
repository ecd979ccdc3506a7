"""What a tree of chips predicts: which task took from when to when, in simulated time.

Every chip has a clock of its own, which moves while it runs something. A task cannot begin before
what it needs is there, and its chip is told when that is; so the clocks of all chips agree.
"""

import json
from pathlib import Path

import msgspec

from rankwise.base.sorting import by_numbers
from rankwise.base.trace_events import (
    TraceEvent,
    lanes_of,
    number_step,
    process_events,
    slice_event,
    track_events,
)
from rankwise.workers.platforms.port import TensorSummary


class TimelineEntry(msgspec.Struct, frozen=True):
    """One operation of a chip.

    Attributes:
        place: which chip: `chip 0`, `chip 1 of worker 0`.
        part: which part of its device, such as `sip1.cube0.pe2`; empty for the whole.
        name: what it did.
        start_ps, end_ps: from when to when, in picoseconds of simulated time.
        task: the number of the task in its run; -1 for a part of a task.
        tensors: what its arguments held afterwards, if `enable_dump_tensor` has asked for that.
    """

    place: str
    name: str
    start_ps: int
    end_ps: int
    task: int = -1
    tensors: tuple[TensorSummary, ...] = ()
    part: str = ""


class Timeline(msgspec.Struct):
    """All entries of a run."""

    entries: list[TimelineEntry] = []

    @property
    def end_ps(self) -> int:
        """When the last entry ended; 0 without any."""
        return max((entry.end_ps for entry in self.entries), default=0)

    def write_trace(self, path: Path | str) -> None:
        """Write it as trace-event JSON, which Perfetto and Chrome open.

        One process per chip; its tasks are the first track, parts of the device the others.
        """
        chips: dict[str, dict[str, list[TimelineEntry]]] = {}
        for entry in self.entries:
            chips.setdefault(entry.place, {}).setdefault(entry.part, []).append(entry)
        events: list[TraceEvent] = []
        step = number_step(len(self.entries))
        for number, chip in enumerate(sorted(chips, key=_in_the_tree)):
            process = (number + 1) * step
            events += process_events(process, chip, number)
            track = process + 1
            for part in sorted(chips[chip], key=by_numbers):
                own = _part_events(process, track, part, chips[chip][part])
                events += own
                track = 1 + max(event["tid"] for event in own)
        text = json.dumps({"displayTimeUnit": "ns", "traceEvents": events})
        Path(path).write_text(text, encoding="utf-8")


def _part_events(
    process: int, track: int, part: str, entries: list[TimelineEntry]
) -> list[TraceEvent]:
    """What a part did, on tracks from `track` on: as many as things it did at once."""
    entries = sorted(entries, key=lambda each: (each.start_ps, each.end_ps))
    lanes = lanes_of((each.start_ps, each.end_ps) for each in entries)
    name, category = (part, "part") if part else ("tasks", "task")
    events: list[TraceEvent] = []
    for lane in range(1 + max(lanes)):
        events += track_events(process, track + lane, f"{name} ({lane + 1})" if lane else name)
    events += [
        slice_event(
            entry.name, category, process, track + lane, entry.start_ps, entry.end_ps,
            {"task": entry.task} if entry.task >= 0 else {},
        )
        for entry, lane in zip(entries, lanes, strict=True)
    ]  # fmt: skip
    return events


def _in_the_tree(chip: str) -> list[list[tuple[int, str]]]:
    """What keeps chips of a worker together."""
    # The path in a tree is a chip's name, from itself to the root, and has no other form.
    return [by_numbers(part) for part in reversed(chip.split(" of "))]
