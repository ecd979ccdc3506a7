"""What holds a result back that stays below its bound: the resource that costs most of the rest.

**Collectives.** Every message counts what it takes besides the links between the devices
(`HardwareMachine.waits`): credits, the latency inside the devices, DMA, the math engine. What of
these there is per queue is set against the time above the bound, as far as the busiest wire was
idle: while it was busy, senders without credits waited for the wire. The remainder is lost on the
links: their latency and their transfers overlap less than they could, or messages meet on them.

**Kernels.** Until the first operation of any program, all PEs lose their time to the launch. After
that, the time of a PE in which the engine of the bound does nothing is lost. What goes on meanwhile
is the reason: DMA, another engine, nothing because the PE has no programs left (the wave tail), or
nothing yet. The remainder is lost although the engine is busy: transfers that wait for each other
on links and memory channels, tiles that do not fill the engine. Transfers are held up by the
busiest part of their ways, an HBM channel or another link, and by DMA if none is busy for long.
"""

from collections.abc import Iterable

from rankwise.sim.hardware.hardware_machine import HardwareMachine, MessageWaits
from rankwise.sim.hardware.op_log import LoggedOperation

ENOUGH = 0.9
"""From this share of the bound on, nothing is named."""

ENGINES = {
    "dot": "GEMM",
    "math": "math",
    "load": "DMA",
    "store": "DMA",
    "atomic": "DMA",
    "copy": "DMA",
}
TAIL, START, LAUNCH = "wave tail", "start-up latency", "launch"
FULL = 0.5
"""From this share of a launch on, a link that is busy holds transfers up. Below, they take more
time for their latencies than for their bytes."""


def most_waited_for(waits: MessageWaits, above_bound: int, idle: int | None = None) -> str:
    """What messages waited for longest, of the time that a collective took above its bound.

    Args:
        waits: what its queues waited for.
        above_bound: picoseconds.
        idle: the picoseconds in which not even the busiest wire was busy; unknown if None. Senders
            that wait for credits because the wire is full wait for the wire.
    """
    lost = claimed(waits, idle)
    lost["links"] = above_bound - sum(lost.values())
    return max(lost, key=lambda cause: lost[cause])


def claimed(waits: MessageWaits, most: int | None) -> dict[str, int]:
    """What each queue waited for besides the wires between the devices; `most` of it in all."""
    lost = {
        "credits": waits.credits,
        "ways inside devices": waits.ways,
        "DMA": waits.dma,
        "math": waits.math,
    }
    lost = {cause: amount // max(1, waits.queues) for cause, amount in lost.items()}
    whole = sum(lost.values())
    if most is not None and whole > most:
        lost = {cause: amount * most // whole for cause, amount in lost.items()}
    return lost


def wire_times(machine: HardwareMachine) -> dict[str, int]:
    """How long each wire between devices has been busy, by name."""
    return {
        link.name: link.busy
        for link in machine.links
        if "->" in link.name and "cube" not in link.name and not link.name.startswith("host")
    }


def most_lost_to(
    operations: Iterable[LoggedOperation],
    pe_count: int,
    span: tuple[int, int],
    bound: str,
    at_best: int,
    *,
    busiest: tuple[str, float] = ("links", 1.0),
) -> str:
    """What the PEs lost most time to.

    Args:
        operations: of kernels.
        pe_count: how many PEs could have worked.
        span: the first and the last instant.
        bound: the name of the bound.
        at_best: the picoseconds that it says.
        busiest: what transfers share most, `HBM` or `links`, and how much of the time it is busy.
    """
    of_pe: dict[str, list[LoggedOperation]] = {}
    for each in operations:
        if each.kind in ENGINES and span[0] <= each.start and each.end <= span[1]:
            of_pe.setdefault(each.place, []).append(each)
    if not of_pe:
        return ""
    engine = {"compute": "GEMM", "waves": "GEMM", "math": "math"}.get(bound, "DMA")
    length = span[1] - span[0]
    begun = min(each.start for of_one in of_pe.values() for each in of_one)
    lost = {
        LAUNCH: (begun - span[0]) * pe_count,
        TAIL: (span[1] - begun) * (pe_count - len(of_pe)),
    }
    for of_one in of_pe.values():
        for cause, amount in _lost(of_one, (begun, span[1]), engine).items():
            lost[cause] = lost.get(cause, 0) + amount
    crowded = (length - at_best) * pe_count - sum(lost.values())
    held_up = busiest[0] if busiest[1] >= FULL else "DMA"
    if engine != "DMA":
        lost[f"{engine} below its peak"] = crowded
        if held_up == "HBM" and "DMA" in lost:
            lost["HBM"] = lost.pop("DMA")
    else:
        lost[held_up] = crowded
    return max(lost, key=lambda cause: lost[cause])


def _lost(operations: list[LoggedOperation], span: tuple[int, int], engine: str) -> dict[str, int]:
    """The time of one PE in which an engine did nothing, by what went on meanwhile."""
    borders = sorted(
        [(each.start, 1, ENGINES[each.kind]) for each in operations]
        + [(each.end, -1, ENGINES[each.kind]) for each in operations]
    )
    active = dict.fromkeys(("DMA", "math", "GEMM"), 0)
    lost: dict[str, int] = {TAIL: span[1] - borders[-1][0]}
    before = span[0]
    for instant, change, of in borders:
        if not active[engine]:
            cause = next((each for each, count in active.items() if count), START)
            lost[cause] = lost.get(cause, 0) + instant - before
        active[of] += change
        before = instant
    return lost
