"""The op log, dealt to tracks: what each engine of each device was doing when.

A track holds slices that do not overlap. Simultaneous work of a device (streams overlap) goes to
further lanes of its track. The op log counts an operation of a PE from the moment at which it was
given to its engine; there it waits for others. On a track it begins when those are done that were
there before it and end before it: when an engine has *got to it*.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from rankwise.sim.hardware.op_log import LoggedOperation, OpLog
from rankwise.sim.hardware.topology import Topology

_DMA = frozenset({"load", "store", "atomic", "copy"})
_HOST = frozenset({"MmuMap", "MmuUnmap", "MemoryWrite", "MemoryRead", "Copy"})
ENGINES = ("host", "commands", "kernels", "waiting", "collectives", "dma", "gemm", "math")
"""In the order in which they are shown."""
MESSAGES_OUT, MESSAGES_IN = "messages out", "messages in"
_ENGINE_OF_KIND = {"KernelLaunch": "kernels", "Run": "commands", "Wait": "waiting"}
_TRACKS = (*ENGINES, MESSAGES_OUT, MESSAGES_IN)


class ReportedMachine(Protocol):
    """What reports ask of a machine."""

    @property
    def messages(self) -> Any:
        """Messages from PE to PE, if they were kept."""
        ...

    @property
    def samples(self) -> Any:
        """Samples of what links have carried, if they were taken."""
        ...

    def utilisation(self) -> dict[str, float]:
        """How busy each part was, as a share of the whole time."""
        ...


class ReportedRun(Protocol):
    """What reports ask of a run; a `GraphEngine` is one."""

    @property
    def topology(self) -> Topology:
        """The machine's description."""
        ...

    @property
    def op_log(self) -> OpLog:
        """What was done when."""
        ...

    @property
    def now(self) -> int:
        """The end, in picoseconds."""
        ...

    @property
    def machine(self) -> ReportedMachine:
        """The machine."""
        ...


class EngineName(NamedTuple):
    """An engine of a device, or of one of its PEs (an empty name for those of the whole device)."""

    sip: int
    pe: str
    engine: str


class Slice(NamedTuple):
    """Something that an engine did."""

    start: int
    end: int
    operation: LoggedOperation


def engine_of(operation: LoggedOperation) -> str:
    """What carried an operation out."""
    if "." in operation.place:
        return "dma" if operation.kind in _DMA else "gemm" if operation.kind == "dot" else "math"
    if operation.kind in _HOST:
        return "host"
    return _ENGINE_OF_KIND.get(operation.kind, "collectives")


def place_of(operation: LoggedOperation) -> EngineName:
    """Where an operation took place."""
    sip, _, pe = operation.place.partition(".")
    return EngineName(int(sip.removeprefix("sip")), pe, engine_of(operation))


def by_place(operations: Iterable[LoggedOperation]) -> dict[EngineName, list[Slice]]:
    """All slices of every place, in the order of their starts; the places in their own order."""
    found: dict[EngineName, list[Slice]] = {}
    for operation in operations:
        if operation.kind == "result":  # what a replay needs; it takes no time
            continue
        each = Slice(operation.start, operation.end, operation)
        found.setdefault(place_of(operation), []).append(each)
    for slices in found.values():
        slices.sort(key=lambda each: (each.start, each.end, each.operation.number))
    return dict(sorted(found.items(), key=lambda item: order_of(item[0])))


def order_of(place: EngineName) -> tuple[int, int, tuple[int, ...], int]:
    """What places are sorted by: devices first, then their PEs, by numbers."""
    numbers = tuple(
        int("".join(sign for sign in part if sign.isdecimal()) or 0)
        for part in place.pe.split(".")
        if part
    )
    return place.sip, len(numbers), numbers, _TRACKS.index(place.engine)


def got_to(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """For every interval when an engine got to it: when nothing that was there before still was.

    That is its start, or the last end before its own of an interval that started no later.
    """
    starts = [start for start, _ in intervals]
    # Of those that end earlier: none starts later than another and ends before that.
    earlier: list[tuple[int, int]] = []
    by_end: dict[int, list[int]] = {}
    for index, (_, end) in enumerate(intervals):
        by_end.setdefault(end, []).append(index)
    for end, indexes in sorted(by_end.items()):
        for index in indexes:
            place = bisect_right(earlier, intervals[index][0], key=lambda each: each[0])
            if place:
                starts[index] = max(starts[index], earlier[place - 1][1])
        for start in sorted((intervals[index][0] for index in indexes), reverse=True):
            while earlier and earlier[-1][0] >= start:
                earlier.pop()
            earlier.append((start, end))
    return starts
