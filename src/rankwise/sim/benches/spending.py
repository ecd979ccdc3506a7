"""What holds a whole run back: what its devices spend their time with besides the work itself.

The time of a device goes from the first kernel or collective of the run to the last one's end. At
each instant it is, in this order:

1. in a kernel: the launch until the first operation; after that, what the PEs do that have
   programs of it. A PE is in its GEMM engine, which is the *work*; else in the math engine; else in
   DMA, which is HBM if a channel of the device is busy for half of the time in which a PE is in
   DMA; else it has no program left (`wave tail`), or none yet (`start-up latency`).
2. in a collective or message: while a wire of the device is busy, and else where nothing tells,
   `links`; the rest is what its queues waited for: credits, DMA, the math engine, ways inside of
   devices (`HardwareMachine.waits`).
3. in a copy of the host or another device: `copies`.
4. waiting for others: an idle device whose next command is a collective waits for ranks that come
   later (`imbalance of ranks`); if it is a message, for the rank at its other end (`pipeline
   bubble`). The time after its last command is divided as all devices waited before; if none
   has waited, it is imbalance.
5. idle before a command of its own: `launch`, the time of the host.

A collective begins when the last of its ranks begins it. Predictions divide time in the same way
(`prediction.summary`).
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rankwise.base.sorting import by_numbers
from rankwise.sim.benches.link_contention import (
    ENGINES,
    ENOUGH,
    FULL,
    LAUNCH,
    START,
    TAIL,
    claimed,
    wire_times,
)
from rankwise.sim.hardware.engine import GraphEngine
from rankwise.sim.hardware.hardware_machine import HardwareMachine
from rankwise.sim.hardware.op_log import LoggedCall, LoggedOperation
from rankwise.sim.hardware.quantities import picoseconds
from rankwise.sim.reporting.breakdown import (
    BUBBLE,
    COMPUTE,
    EXPOSED,
    HOST,
    IMBALANCE,
    WAITING,
    Breakdown,
    RankParts,
    parts_of,
)

_MAPPINGS = frozenset({"MmuMap", "MmuUnmap"})
_COPIES = frozenset({"MemoryWrite", "MemoryRead", "Copy"})
_KERNEL, _LINKS, _COPYING, _WAITING = range(4)
"""Of what goes on at one time, the first counts."""
_WORK, _MOVING = "work", "moving"
_WORK_IN_WORDS = "GEMM engines"
"""The second one is no cause: in DMA, whatever else goes on."""


class Spending(NamedTuple):
    """The shares of the time of all devices.

    Attributes:
        work: that in which GEMM engines work.
        lost: the other ones, by cause.
    """

    work: float
    lost: dict[str, float]

    @property
    def dearest(self) -> str:
        """What costs most besides the work; empty if nothing has run."""
        return max(self.lost, key=lambda each: self.lost[each], default="")

    @property
    def held_back_by(self) -> tuple[str, float]:
        """What costs most, and its share; no name if little is lost."""
        if not self.lost or self.work >= ENOUGH:
            return "", 0.0
        return self.dearest, self.lost[self.dearest]


class _Span(NamedTuple):
    start: int
    end: int
    what: int
    cause: str
    """Of waiting: for whom."""


class _Devices(NamedTuple):
    """What each device has spent its time with, in picoseconds, and what is left at its end.

    The keys of `lost` are devices; of what they are divided into, where it was lost and the cause.
    """

    first: int
    last: int
    lost: dict[str, Counter[tuple[str, str]]]
    late: dict[str, int]


def spending_of(run: Any, *, begun: int = 0) -> Spending:
    """What the devices of a run have spent their time with so far.

    Args:
        run: a `RuntimeContext`, or its engine.
        begun: the operations of the log before this number do not count.
    """
    devices = _devices(getattr(run, "engine", run), begun)
    if devices is None:
        return Spending(0.0, {})
    lost: Counter[str] = Counter()
    for of_one in devices.lost.values():
        for (_, cause), amount in of_one.items():
            lost[cause] += amount
    late, waited = sum(devices.late.values()), lost[IMBALANCE] + lost[BUBBLE]
    for_peers = round(late * lost[BUBBLE] / waited) if waited else 0
    lost[BUBBLE] += for_peers
    lost[IMBALANCE] += late - for_peers
    whole = max(1, (devices.last - devices.first) * len(devices.lost))
    shares = {cause: amount / whole for cause, amount in lost.items() if amount > 0}
    return Spending(shares.pop(_WORK, 0.0), shares)


def breakdown_of(engine: GraphEngine, program: str) -> Breakdown | None:
    """Where the time of each device went, to its end; None if nothing has run."""
    devices = _devices(engine, 0)
    if devices is None:
        return None
    start = devices.first
    return Breakdown(
        program=program,
        machine=engine.topology.name,
        size=len(devices.lost),
        whole_ps=engine.now,
        steps=0,
        ranks=tuple(
            RankParts(
                int(place.removeprefix("sip")),
                parts_of(
                    {
                        **{
                            (where, _WORK_IN_WORDS if cause == _WORK else cause, ""): time
                            for (where, cause), time in of_one.items()
                        },
                        (HOST, "until the first kernel or collective", ""): start,
                    },
                    engine.now,
                ),
            )
            for place, of_one in sorted(devices.lost.items(), key=lambda item: by_numbers(item[0]))
        ),
    )


def _devices(engine: GraphEngine, begun: int) -> _Devices | None:
    log = list(engine.op_log)[begun:]
    commands = [each for each in log if "." not in each.place and each.place.startswith("sip")]
    spans = _spans(
        commands, engine.op_log.calls, picoseconds(engine.topology.machine.system.host.command_ns)
    )
    used = [each for of_one in spans.values() for each in of_one if each.what in {_KERNEL, _LINKS}]
    if not used:
        return None
    first, last = min(each.start for each in used), max(each.end for each in used)
    kernels = _in_kernels(engine, log, spans)
    collectives = _Collectives(engine.machine, commands)
    devices = _Devices(first, last, {}, {})
    for place, of_one in spans.items():
        lost = devices.lost[place] = Counter()
        found, devices.late[place] = _by_cause(of_one, first, last)
        for cause, amount in kernels.get(place, {}).items():
            lost[COMPUTE, cause] += round(amount * found.get(str(_KERNEL), 0))
        for cause, amount in collectives.divided(place, found.get(str(_LINKS), 0)).items():
            lost[EXPOSED, cause] += amount
        lost[HOST, "copies"] += found.get(str(_COPYING), 0)
        for where, cause in ((WAITING, IMBALANCE), (WAITING, BUBBLE), (HOST, LAUNCH)):
            lost[where, cause] += found.get(cause, 0)
    return devices


def held_back_by(run: Any) -> tuple[str, float]:
    """What costs a run most time so far, and its share: of a `RuntimeContext` or an engine."""
    return spending_of(run).held_back_by


def _spans(
    commands: Sequence[LoggedOperation], calls: Mapping[int, LoggedCall], command: int
) -> dict[str, list[_Span]]:
    """By device, what went on and when; a device that only has memory has an empty list."""
    began: dict[tuple[str, str | int], int] = {}
    for each in commands:
        if _is_collective(each):
            key = _collective_key(each, calls)
            began[key] = max(began.get(key, 0), each.start)
    spans: dict[str, list[_Span]] = {}
    carried_out = {(each.place, each.end) for each in commands if _is_collective(each)}
    for each in commands:
        own = spans.setdefault(each.place, [])
        if each.kind == "KernelLaunch":
            own.append(_Span(each.start, each.end, _KERNEL, ""))
        elif each.kind in _COPIES:
            own.append(_Span(each.start, each.end, _COPYING, ""))
        elif _is_collective(each):
            begin = min(each.end, began[_collective_key(each, calls)])
            cause = BUBBLE if _is_message(each, calls) else IMBALANCE
            # The host needs its time for the command after all have come.
            own.append(_Span(each.start - command, begin - command, _WAITING, cause))
            own.append(_Span(begin, each.end, _LINKS, cause))
        elif each.kind == "Run" and (each.place, each.end) not in carried_out:
            own.append(_Span(each.start, each.end, _KERNEL, ""))
    return spans


def _is_collective(each: LoggedOperation) -> bool:
    return each.kind not in {"KernelLaunch", "Run", *_MAPPINGS, *_COPIES}


def _is_message(each: LoggedOperation, calls: Mapping[int, LoggedCall]) -> bool:
    call = calls.get(each.number)
    return call is not None and call.way is not None


def _collective_key(
    each: LoggedOperation, calls: Mapping[int, LoggedCall]
) -> tuple[str, str | int]:
    """Equal for the parts of all ranks in one collective or message."""
    if _is_message(each, calls):
        return each.kind, calls[each.number].number  # its ends have different names
    return each.kind, each.name


def _by_cause(spans: Sequence[_Span], first: int, last: int) -> tuple[Counter[str], int]:
    """The time of one device, by cause, and what is left after its last command."""
    found: Counter[str] = Counter()
    borders = sorted({first, last, *(at for each in spans for at in each[:2] if first < at < last)})
    order = sorted(spans)
    pending = iter(order)
    following = next(pending, None)
    active: list[_Span] = []
    end = max((each.end for each in order), default=first)
    starts = [each.start for each in order]
    for since, until in pairwise(borders):
        while following is not None and following.start <= since:
            active.append(following)
            following = next(pending, None)
        active = [each for each in active if each.end > since]
        if active:
            top = min(active, key=lambda each: each.what)
            found[top.cause if top.what == _WAITING else str(top.what)] += until - since
        elif since < end:
            after = order[bisect_right(starts, since)]
            found[after.cause or LAUNCH] += until - since
    return found, max(0, last - max(first, end))


def _in_kernels(
    engine: GraphEngine, log: Iterable[LoggedOperation], spans: dict[str, list[_Span]]
) -> dict[str, dict[str, float]]:
    """By device, the shares of its time in kernels."""
    launches = [each for each in log if each.kind == "KernelLaunch"]
    # Launches of a kernel that last as long do the same on each device: one stands for all, since
    # a run on many devices has a million operations.
    samples = {(each.name, each.end - each.start): each for each in reversed(launches)}
    of_launch = _operations_of(samples.values(), log)
    in_samples = {
        key: _in_launch(each, of_launch.get(each.number, {})) for key, each in samples.items()
    }
    found: dict[str, dict[str, float]] = {}
    for each in launches:
        of_place = found.setdefault(each.place, {})
        for cause, amount in in_samples[each.name, each.end - each.start].items():
            of_place[cause] = of_place.get(cause, 0.0) + amount
    for place, of_one in spans.items():
        if place not in found and any(each.what == _KERNEL for each in of_one):
            found[place] = {_WORK: 1.0}  # processes of the user's own, of which nothing is known
    crowded = _crowded(engine, {place: spent.pop(_MOVING, 0.0) for place, spent in found.items()})
    shares = {}
    for place, spent in found.items():
        if place in crowded and "DMA" in spent:
            spent["HBM"] = spent.pop("DMA")
        whole = sum(spent.values()) or 1.0
        shares[place] = {cause: amount / whole for cause, amount in spent.items()}
    return shares


def _operations_of(
    launches: Iterable[LoggedOperation], log: Iterable[LoggedOperation]
) -> dict[int, dict[str, list[LoggedOperation]]]:
    """By launch and PE, its operations: those of its kernel on its device, while it lasts."""
    of_kernel: dict[tuple[str, str], list[LoggedOperation]] = {}
    for each in launches:
        of_kernel.setdefault((each.place, each.name), []).append(each)
    devices = {device for device, _ in of_kernel}
    device_of: dict[str, str] = {}
    found: dict[int, dict[str, list[LoggedOperation]]] = {}
    for each in log:
        place = each.place
        device = device_of.get(place)
        if device is None:
            device = device_of[place] = place.partition(".")[0]
        if device in devices and device != place and each.kind in ENGINES:
            for launch in of_kernel.get((device, each.name.rpartition(".")[0]), ()):
                if launch.start <= each.start and each.end <= launch.end:
                    found.setdefault(launch.number, {}).setdefault(place, []).append(each)
    return found


def _in_launch(
    launch: LoggedOperation, of_pe: dict[str, list[LoggedOperation]]
) -> dict[str, float]:
    """The time of one launch, by cause: the mean of the PEs that have programs of it."""
    if not of_pe:
        return {LAUNCH: float(launch.end - launch.start)}
    begun = min(each.start for of_one in of_pe.values() for each in of_one)
    spent: Counter[str] = Counter({LAUNCH: (begun - launch.start) * len(of_pe)})
    for of_one in of_pe.values():
        for cause, amount in _on_pe(of_one, begun, launch.end):
            spent[cause] += amount
    return {cause: amount / len(of_pe) for cause, amount in spent.items()}


def _on_pe(
    operations: Sequence[LoggedOperation], begun: int, end: int
) -> Iterator[tuple[str, int]]:
    borders = sorted(
        [(each.start, 1, ENGINES[each.kind]) for each in operations]
        + [(each.end, -1, ENGINES[each.kind]) for each in operations]
    )
    active = {"GEMM": 0, "math": 0, "DMA": 0}
    before = begun
    for instant, change, of in borders:
        cause = next((each for each, count in active.items() if count), START)
        if active["DMA"]:
            yield _MOVING, instant - before
        yield _WORK if cause == "GEMM" else cause, instant - before
        active[of] += change
        before = instant
    yield TAIL, end - before


def _crowded(engine: GraphEngine, in_dma: dict[str, float]) -> set[str]:
    """The devices with an HBM channel that is busy for half of the time that a PE is in DMA."""
    return {
        place
        for link in engine.machine.links
        if ".hbm" in link.name
        and (place := link.name.partition(".")[0]) in in_dma
        and link.busy >= FULL * in_dma[place] > 0
    }


class _Collectives:
    """What collectives and messages spend their time with, as far as it is known."""

    def __init__(self, machine: HardwareMachine, commands: Iterable[LoggedOperation]) -> None:
        lasted = [(each.place, each.end - each.start) for each in commands if _is_collective(each)]
        self._mean = max(1, sum(time for _, time in lasted) // max(1, len(lasted)))
        self._of_place = Counter[str]()
        self._busy = Counter[str]()
        for place, time in lasted:
            self._of_place[place] += time
        for wire, time in wire_times(machine).items():
            for end in wire.split("->"):
                self._busy[end] = max(self._busy[end], time)
        self._waits = machine.waits

    def divided(self, place: str, amount: int) -> dict[str, int]:
        """By cause, so much time of one device."""
        if not amount:
            return {}
        mean = self._mean
        idle = mean - min(mean, mean * self._busy[place] // max(1, self._of_place[place]))
        found = {cause: amount * each // mean for cause, each in claimed(self._waits, idle).items()}
        found["links"] = amount - sum(found.values())
        return found
