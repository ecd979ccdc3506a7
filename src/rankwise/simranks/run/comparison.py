"""Where two runs of a program part: simulated ranks and processes, event by event.

The records are those of `rankwise.simranks.world.rank_events`. Each rank has its events in an order
of its own; of the ranks' first differences the first is that which came first in the simulated
run, where all events have one order.
"""

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rankwise.base.errors import RankwiseError
from rankwise.simranks.world.rank_events import LEFT_OUT

_FORMATS = {
    "float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h",
    "int8": "b", "uint8": "B", "uint64": "Q", "uint32": "I", "uint16": "H", "bool": "?",
}  # fmt: skip


class RecordedEvent(msgspec.Struct, frozen=True):
    """What a rank has recorded; see there."""

    event: str
    shown: str
    place: str
    moment: int
    tensors: list[tuple[str, str, list[int]]]


class Captured(msgspec.Struct, frozen=True):
    """A tensor that was kept whole; its bytes as hexadecimal digits."""

    data: str
    dtype: str
    shape: list[int]


class Difference(NamedTuple):
    """The first event of a rank that is not the same in both runs; None where a run has none."""

    rank: int
    number: int
    simulated: RecordedEvent | None
    real: RecordedEvent | None

    @property
    def tensor(self) -> int | None:
        """Which tensor of the event differs; None if the events are not of the same kind."""
        if self.simulated is None or self.real is None or self.simulated.event != self.real.event:
            return None
        pairs = zip(self.simulated.tensors, self.real.tensors, strict=False)
        return next((index for index, (one, other) in enumerate(pairs) if one != other), None)


Events = Sequence[Sequence[RecordedEvent]]
"""Of each rank, in its order."""


def read_events(folder: Path, size: int) -> Events:
    """Read what the ranks of a run have recorded; a rank that never began has recorded nothing."""
    decoder = msgspec.json.Decoder(RecordedEvent)
    files = [folder / f"{rank}.jsonl" for rank in range(size)]
    return [decoder.decode_lines(file.read_bytes()) if file.exists() else [] for file in files]


def left_out(events: Events) -> list[str]:
    """What of the program could not be compared, and why; once for all ranks."""
    found = [each.event for rank in events for each in rank if LEFT_OUT in each.event]
    return list(dict.fromkeys(found))


def events_in_both(simulated: Events, real: Events) -> tuple[Events, Events]:
    """What each rank did in both of two runs that failed; how soon others end then differs."""
    counts = [min(map(len, both)) for both in zip(simulated, real, strict=True)]
    one, other = (
        [events[:count] for events, count in zip(run, counts, strict=True)]
        for run in (simulated, real)
    )
    return one, other


def first_difference(simulated: Events, real: Events) -> Difference | None:
    """The difference that came first in the simulated run."""
    found = [
        difference
        for rank in range(len(simulated))
        if (difference := _first_of_rank(rank, simulated[rank], real[rank])) is not None
    ]
    return min(found, key=_moment, default=None)


def _first_of_rank(
    rank: int, simulated: Sequence[RecordedEvent], real: Sequence[RecordedEvent]
) -> Difference | None:
    for index in range(max(len(simulated), len(real))):
        one = simulated[index] if index < len(simulated) else None
        other = real[index] if index < len(real) else None
        if one is None or other is None:
            return Difference(rank, index, one, other)
        if (one.event, one.tensors) != (other.event, other.tensors):
            return Difference(rank, index, one, other)
    return None


def _moment(difference: Difference) -> float:
    return math.inf if difference.simulated is None else difference.simulated.moment


def describe(difference: Difference, captured: tuple[Captured | None, Captured | None]) -> str:
    """Tell a difference: the rank, the operation, the line, and the first element that differs."""
    simulated, real = difference.simulated, difference.real
    if simulated is None or real is None:
        event, which = (real, "as a process") if simulated is None else (simulated, "simulated")
        assert event is not None, "one of both has it"
        return f"rank {difference.rank} reached this only {which}: {_describe(event)}"
    if simulated.event != real.event:
        return (
            f"rank {difference.rank} did different things:\n"
            f"  simulated:    {_describe(simulated)}\n  as a process: {_describe(real)}"
        )
    where = f"rank {difference.rank} differs at {_describe(simulated)}"
    if difference.tensor is None:
        return f"{where}: {len(simulated.tensors)} tensors simulated, {len(real.tensors)} real"
    if len(simulated.tensors) > 1:
        where += f", tensor {difference.tensor}"
    mine, other = captured
    if mine is None or other is None:
        return where
    if (mine.dtype, mine.shape) != (other.dtype, other.shape):
        shapes = (f"{tuple(each.shape)} {each.dtype}" for each in (mine, other))
        return f"{where}: {' simulated, '.join(shapes)} as a process"
    return f"{where}: {_first_element(mine, other)}"


def read_captured(folder: Path) -> Captured | None:
    """The tensor that a run has kept whole, if it came to it."""
    try:
        return msgspec.json.decode((folder / "captured.json").read_bytes(), type=Captured)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise RankwiseError(f"a rank has left no whole tensor in {folder}: {error}") from error


def _describe(event: RecordedEvent) -> str:
    return f"{event.event}, {event.place}" if event.place else event.event


def _first_element(mine: Captured, other: Captured) -> str:
    one, two = bytes.fromhex(mine.data), bytes.fromhex(other.data)
    count = math.prod(mine.shape)
    size = len(one) // max(count, 1)
    cells = [(one[at : at + size], two[at : at + size]) for at in range(0, len(one), size or 1)]
    differing = [index for index, (first, second) in enumerate(cells) if first != second]
    if not differing:
        return "both were equal when run again: the program is not deterministic"
    at = differing[0]
    values = " simulated, ".join(_value(cell, mine.dtype) for cell in cells[at])
    return (
        f"{len(differing)} of {count} elements, the first is {_position(at, mine.shape)}: "
        f"{values} as a process"
    )


def _value(cell: bytes, dtype: str) -> str:
    if dtype == "bfloat16":
        return f"{struct.unpack('<f', bytes(2) + cell)[0]:.9g}"
    kind = _FORMATS.get(dtype)
    if kind is None:
        return f"0x{cell[::-1].hex()}"
    (value,) = struct.unpack(f"<{kind}", cell)
    return f"{value:.17g}" if kind == "d" else f"{value:.9g}" if kind in "fe" else str(value)


def _position(flat: int, shape: Sequence[int]) -> str:
    """`[1, 0]`, of an element that is the `flat`-th."""
    places = []
    for extent in reversed(shape):
        flat, place = divmod(flat, extent)
        places.append(place)
    return str(places[::-1])
