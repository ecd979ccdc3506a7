"""What a rank does, written down so that two runs of a program can be compared bit for bit.

A record is an event: an operation of a group begins with some tensors, or ends with some; a loss;
the parameters after an optimizer's step; what the program's global names hold at its end. Tensors
are recorded as digests. One of them can be chosen to be kept whole (`CAPTURE_VARIABLE`): that is
how a second run finds the element that differs.

Simulated ranks and real processes write the same records, each rank to a file of its own.
"""

import itertools
import json
import os
from collections.abc import Callable, Container, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rankwise.simranks.world.places import place_here
from rankwise.simranks.world.world import running_rank

RECORD_VARIABLE = "RANKWISE_RECORD"
"""The folder for records."""
CAPTURE_VARIABLE = "RANKWISE_RECORD_CAPTURE"
"""`RANK/EVENT/INDEX`: which tensor of which event is kept whole."""
IMPORTED = "imported"
"""The file in the folder for records that names what simulated ranks have imported."""
LEFT_OUT = "not compared: "
"""Stands in the event of a value that cannot be compared, before the reason."""
_SLOW_TO_IMPORT = ("torch", "torch._dynamo")
_KEY = "recording"

Plain = tuple[bytes, str, tuple[int, ...]]
"""A tensor's bytes, dtype and shape."""

_moments = itertools.count()
"""Orders the events of all simulated ranks of this process."""


class EventRecorder:
    """Writes one rank's events.

    Args:
        folder: where its file is made, under its number.
        rank: its number.
        captured: the event and the index of the tensor to keep whole.

    Attributes:
        folder: the same.
        rank: the same.
        operations: how many of each kind, or group, have been counted.
    """

    def __init__(self, folder: Path, rank: int, captured: tuple[int, int] | None) -> None:
        self.folder = folder
        self.rank = rank
        self._file = (folder / f"{rank}.jsonl").open("w", buffering=1)  # it may die at any moment
        self._captured = captured
        self._path = folder / "captured.json"
        self._events = 0
        self.operations: dict[str, int] = {}

    def note(self, event: str, tensors: Sequence[Plain], shown: str = "") -> None:
        """Write an event down: in words, with what it holds, and what to show of it."""
        if self._captured is not None and self._captured[0] == self._events:
            self._keep(tensors[self._captured[1] : self._captured[1] + 1])
        place = place_here()
        record = {
            "event": event,
            "shown": shown,
            "place": str(place or ""),
            "moment": next(_moments),
            "tensors": [
                [blake2b(data, digest_size=12).hexdigest(), dtype, shape]
                for data, dtype, shape in tensors
            ],
        }
        self._file.write(json.dumps(record) + "\n")
        self._events += 1

    def numbered(self, group: str) -> int:
        """Count an operation of a group."""
        self.operations[group] = self.operations.get(group, 0) + 1
        return self.operations[group]

    def close(self) -> None:
        """Nothing more follows."""
        self._file.close()

    def _keep(self, tensors: Sequence[Plain]) -> None:
        for data, dtype, shape in tensors:
            kept = {"data": data.hex(), "dtype": dtype, "shape": shape}
            self._path.write_text(json.dumps(kept))


_own: EventRecorder | None = None


def present_recorder() -> EventRecorder | None:
    """The recorder of the rank, simulated or real, that calls this; None if nothing is recorded."""
    rank = running_rank()
    recorder: EventRecorder | None = _own if rank is None else rank.own_state.get(_KEY)
    return recorder


def begin_recording() -> EventRecorder:
    """Record what this rank does, as its environment says."""
    global _own  # noqa: PLW0603  # a process has one rank, or none of its own
    rank = int(os.environ["RANK"])
    captured_rank, _, rest = os.environ.get(CAPTURE_VARIABLE, "").partition("/")
    event, _, index = rest.partition("/")
    captured = (int(event), int(index)) if captured_rank == str(rank) else None
    recorder = EventRecorder(Path(os.environ[RECORD_VARIABLE]), rank, captured)
    simulated = running_rank()
    if simulated is None:
        _own = recorder
    else:
        simulated.own_state[_KEY] = recorder
    return recorder


def note_slow_imports(folder: Path, imported: Container[str]) -> None:
    """Write down what takes seconds to import, so that processes need not do it one by one."""
    (folder / IMPORTED).write_text(",".join(filter(imported.__contains__, _SLOW_TO_IMPORT)))


def note_globals(
    recorder: EventRecorder,
    names: dict[str, Any],
    readers: Sequence[Callable[[Any], Mapping[str, Plain | str] | None]],
) -> None:
    """Record what the names of a program hold at its end.

    Each of the `readers` gives what of a value can be compared, by the names of its parts; None if
    it does not know such values. A text in place of a part says why that cannot be compared.
    """
    for name, value in names.items():
        if name.startswith("_"):
            continue
        for read in readers:
            if (found := read(value)) is not None:
                for part, plain in found.items():
                    if isinstance(plain, str):
                        recorder.note(f"{name}{part} at the end is {LEFT_OUT}{plain}", [])
                    else:
                        recorder.note(f"{name}{part} at the end", [plain])
                break
