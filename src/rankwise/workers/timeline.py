"""What chips have told of their tasks, as a timeline for Perfetto.

One process per chip, one track for its tasks and one per place below them. All chips' clocks count
from the moment in which they were opened; they agree as far as tasks were told when what they need
is there (`not_before_ps`). Instants are microseconds with six decimals, so picoseconds are kept;
equal reports give equal bytes.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rankwise.workers.platforms.port import Span, TaskReport

_TASKS = "tasks"
_PICOSECONDS_PER_MICROSECOND = 1_000_000
_Event = dict[str, Any]
_ENCODER = msgspec.json.Encoder()


def write_timeline(path: str | Path, reports: Iterable[TaskReport]) -> None:
    """Write the timeline of tasks as trace-event JSON, which Perfetto and Chrome open."""
    events = ",\n".join(_ENCODER.encode(event).decode() for event in timeline_events(reports))
    Path(path).write_text(f'{{"displayTimeUnit":"ns","traceEvents":[\n{events}\n]}}\n', "utf-8")


def timeline_events(reports: Iterable[TaskReport]) -> list[_Event]:
    """The events: names of chips and tracks first, then tasks and what they were made of."""
    ordered = sorted(reports, key=lambda report: (report.start_ps, report.chip))
    tracks: dict[tuple[int, str], int] = {}
    slices = [each for report in ordered for each in _slices(report, tracks)]
    return [*_names(tracks), *slices]


def end_ps(reports: Iterable[TaskReport]) -> int:
    """When the last of all tasks has ended: how long the tree would take; 0 without tasks."""
    return max((report.end_ps for report in reports), default=0)


def _slices(report: TaskReport, tracks: dict[tuple[int, str], int]) -> Iterator[_Event]:
    whole = Span(report.task, "task", _TASKS, report.start_ps, report.end_ps)
    for span in (whole, *report.spans):
        yield {
            "name": span.name,
            "cat": span.kind,
            "ph": "X",
            "pid": report.chip,
            "tid": tracks.setdefault((report.chip, span.place), len(tracks) + 1),
            "ts": span.start_ps / _PICOSECONDS_PER_MICROSECOND,
            "dur": (span.end_ps - span.start_ps) / _PICOSECONDS_PER_MICROSECOND,
        }


def _names(tracks: dict[tuple[int, str], int]) -> Iterator[_Event]:
    for chip in sorted({chip for chip, _ in tracks}):
        yield _named("process_name", chip, 0, f"chip {chip}")
    for (chip, place), number in tracks.items():
        yield _named("thread_name", chip, number, place)


def _named(what: str, chip: int, track: int, name: str) -> _Event:
    return {"name": what, "ph": "M", "pid": chip, "tid": track, "args": {"name": name}}
