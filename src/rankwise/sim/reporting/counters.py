"""Counter tracks of a trace: what each device uses over time.

========================= ====== ===============================================================
counter                   unit   from
========================= ====== ===============================================================
`sip0->sip1`, `host->…`   GB/s   samples of what the wire has carried
`HBM`                     GB/s   the same, of all channels of the device
`PEs in use`              PEs    operations in the op log: PEs on which one is in progress
`queue depth`             slots  messages that were sent to the device and have not yet arrived
========================= ====== ===============================================================
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from rankwise.sim.hardware.hardware_machine import SlotMessage
from rankwise.sim.hardware.op_log import LoggedOperation
from rankwise.sim.hardware.samples import LinkSamples

HBM, PES_IN_USE, QUEUE_DEPTH = "HBM", "PEs in use", "queue depth"
_PER_NANOSECOND = 1_000


class Count(NamedTuple):
    """A value that a counter of a device has from an instant on."""

    sip: int
    name: str
    unit: str
    at: int
    value: float


def bandwidths(samples: LinkSamples, now: int) -> Iterator[Count]:
    """GB/s of each wire at a device, and of its HBM, between one sample and the next."""
    places = {
        index: place
        for index, name in enumerate(samples.names())
        if (place := _place_of(name)) is not None
    }
    before: dict[tuple[int, str], float] = {}
    taken = samples.until(now)
    for one, other in pairwise(taken):
        rates: dict[tuple[int, str], float] = {}
        for index, place in places.items():
            carried = _at(other.carried, index) - _at(one.carried, index)
            rates[place] = rates.get(place, 0.0) + carried * _PER_NANOSECOND / (other.at - one.at)
        for place, rate in rates.items():
            if before.get(place) != rate:
                yield Count(*place, "GB/s", one.at, rate)
        before = rates
    for place in before:
        yield Count(*place, "GB/s", taken[-1].at, 0.0)


def _at(carried: Sequence[int], index: int) -> int:
    """A link that was first used later has carried nothing before."""
    return carried[index] if index < len(carried) else 0


def _place_of(name: str) -> tuple[int, str] | None:
    """The device of a wire or HBM channel, and the name of its counter."""
    if "->" in name and "cube" not in name:
        source, target = name.split("->")
        return _number(source if source.startswith("sip") else target), name
    device, _, rest = name.partition(".")
    return (_number(device), HBM) if ".hbm" in rest else None


def _number(device: str) -> int:
    return int(device.removeprefix("sip"))


def pes_in_use(operations: Iterable[LoggedOperation]) -> Iterator[Count]:
    """How many PEs of each device have an operation in progress."""
    of_pe: dict[str, list[tuple[int, int]]] = {}
    for each in operations:
        if "." in each.place and each.end > each.start:
            of_pe.setdefault(each.place, []).append((each.start, each.end))
    changes: dict[int, dict[int, int]] = {}
    for place, intervals in of_pe.items():
        of_sip = changes.setdefault(_number(place.partition(".")[0]), {})
        for start, end in _joined(sorted(intervals)):
            of_sip[start] = of_sip.get(start, 0) + 1
            of_sip[end] = of_sip.get(end, 0) - 1
    yield from _summed(changes, PES_IN_USE, "PEs")


def _joined(intervals: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Intervals in order as those in which at least one of them holds."""
    start, end = intervals[0]
    for other, last in intervals[1:]:
        if other > end:
            yield start, end
            start = other
        end = max(end, last)
    yield start, end


def queue_depths(messages: Iterable[SlotMessage]) -> Iterator[Count]:
    """How many slots are under way to each device."""
    changes: dict[int, dict[int, int]] = {}
    for each in messages:
        of_sip = changes.setdefault(_number(each.destination.partition(".")[0]), {})
        of_sip[each.sent_at] = of_sip.get(each.sent_at, 0) + 1
        of_sip[each.arrived_at] = of_sip.get(each.arrived_at, 0) - 1
    yield from _summed(changes, QUEUE_DEPTH, "slots")


def _summed(changes: dict[int, dict[int, int]], name: str, unit: str) -> Iterator[Count]:
    for sip, of_sip in sorted(changes.items()):
        value = 0
        for at, change in sorted(of_sip.items()):
            if change:
                value += change
                yield Count(sip, name, unit, at, value)
