"""The op log, dealt to tracks: what each engine of each device was doing when.

A track holds slices that do not overlap. What an engine did at the same time (DMAs share links, and
streams overlap) goes to further lanes of it.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from rankwise.sim.hardware.op_log import Operation

_DMA = frozenset({"load", "store", "atomic"})
_HOST = frozenset({"MmuMap", "MmuUnmap", "MemoryWrite", "MemoryRead", "Copy"})
ENGINES = ("host", "commands", "kernels", "collectives", "dma", "gemm", "math")
"""In the order in which they are shown."""


class Place(NamedTuple):
    """An engine of a device, or of one of its PEs (an empty name for those of the whole device)."""

    sip: int
    pe: str
    engine: str


class Slice(NamedTuple):
    """Something that an engine did."""

    start: int
    end: int
    operation: Operation


def engine_of(operation: Operation) -> str:
    """What carried an operation out."""
    if "." in operation.place:
        return "dma" if operation.kind in _DMA else "gemm" if operation.kind == "dot" else "math"
    if operation.kind in _HOST:
        return "host"
    if operation.kind == "KernelLaunch":
        return "kernels"
    return "commands" if operation.kind == "Run" else "collectives"


def place_of(operation: Operation) -> Place:
    """Where an operation took place."""
    sip, _, pe = operation.place.partition(".")
    return Place(int(sip.removeprefix("sip")), pe, engine_of(operation))


def by_place(operations: Iterable[Operation]) -> dict[Place, list[Slice]]:
    """All slices of every place, in the order of their starts; the places in their own order."""
    found: dict[Place, list[Slice]] = {}
    for operation in operations:
        if operation.kind == "result":  # what a replay needs; it takes no time
            continue
        each = Slice(operation.start, operation.end, operation)
        found.setdefault(place_of(operation), []).append(each)
    for slices in found.values():
        slices.sort(key=lambda each: (each.start, each.end, each.operation.number))
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(place: Place) -> tuple[int, int, tuple[int, ...], int]:
    numbers = tuple(
        int("".join(sign for sign in part if sign.isdecimal()) or 0)
        for part in place.pe.split(".")
        if part
    )
    return place.sip, len(numbers), numbers, ENGINES.index(place.engine)


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


def busy_shares(slices: Iterable[tuple[int, int]], end: int, bins: int) -> list[float]:
    """In how much of each of `bins` equal parts of the time something was going on, 0 to 1."""
    shares = [0.0] * bins
    if not end:
        return shares
    covered = 0
    for start, stop in sorted(slices):
        begin = max(start, covered)
        if stop <= begin:
            continue
        covered = stop
        first, last = begin * bins // end, min(bins, -(-stop * bins // end)) - 1
        for index in range(first, last + 1):
            low, high = index * end / bins, (index + 1) * end / bins
            shares[index] += (min(stop, high) - max(begin, low)) * bins / end
    return [min(1.0, max(0.0, share)) for share in shares]
