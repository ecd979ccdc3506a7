"""What a tree of chips predicts: which task took from when to when, in simulated time.

Every chip has a clock of its own, which moves while it runs something. A task cannot begin before
what it needs is there, and its chip is told when that is; so the clocks of all chips agree.
"""

import json
from pathlib import Path

import msgspec

from rankwise.workers.platforms.port import TensorSummary


class TimelineEntry(msgspec.Struct, frozen=True):
    """Something that a chip did.

    Attributes:
        place: which chip: `chip 0`, `chip 1 of worker 0`.
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


class Timeline(msgspec.Struct):
    """All entries of a run."""

    entries: list[TimelineEntry] = []

    @property
    def end_ps(self) -> int:
        """When the last entry ended; 0 without any."""
        return max((entry.end_ps for entry in self.entries), default=0)

    def write_trace(self, path: Path | str) -> None:
        """Write it as trace-event JSON, which Perfetto and Chrome open."""
        places = {
            place: number
            for number, place in enumerate(sorted({entry.place for entry in self.entries}))
        }
        names = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": place}}
            for place, pid in places.items()
        ]
        events = [
            {
                "ph": "X",
                "name": entry.name,
                "pid": places[entry.place],
                "tid": 0 if entry.task >= 0 else 1,
                "ts": entry.start_ps / 1e6,
                "dur": (entry.end_ps - entry.start_ps) / 1e6,
                "args": {"task": entry.task},
            }
            for entry in self.entries
        ]
        Path(path).write_text(json.dumps({"traceEvents": names + events}), encoding="utf-8")
