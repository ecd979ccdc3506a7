"""From the op log of a run to results."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from rankwise.base.errors import LocalProtocolError
from rankwise.sim.benches.bounds import Bound, Roofline
from rankwise.sim.benches.link_contention import ENOUGH, most_lost_to, most_waited_for, wire_times
from rankwise.sim.benches.spending import spending_of
from rankwise.sim.hardware.commands import CommandHandle
from rankwise.sim.hardware.engine import GraphEngine
from rankwise.sim.hardware.hardware_machine import MessageWaits
from rankwise.sim.hardware.op_log import LoggedOperation
from rankwise.sim.reporting.results import BenchResult

_CHANNEL = re.compile(r"\.hbm\d+$")


class MessagesBefore(NamedTuple):
    """What messages had waited for, and wires had carried, before a collective."""

    waits: MessageWaits
    busy: dict[str, int]


def messages_before(engine: GraphEngine) -> MessagesBefore:
    """Note it, for `collective_result`."""
    return MessagesBefore(engine.machine.waits.copy(), wire_times(engine.machine))


def span_of(operations: Iterable[LoggedOperation]) -> int:
    """Picoseconds from the first start to the last end."""
    found = list(operations)
    if not found:
        raise LocalProtocolError("nothing that was to be measured has run")
    return max(each.end for each in found) - min(each.start for each in found)


def duration_of(handle: CommandHandle) -> int:
    """Picoseconds from the start of a command to its completion."""
    if handle.started_at is None or handle.completed_at is None:
        raise LocalProtocolError(f"{handle!r} is not complete, so it took no time yet")
    return handle.completed_at - handle.started_at


def kernel_result(
    torch: Any,
    bench: str,
    case: str,
    handle: CommandHandle,
    limit: Roofline | Bound,
    *,
    flops: int,
    size: int,
) -> BenchResult:
    """The result of one launch, beside a bound, or beside that of a roofline."""
    bound = limit if isinstance(limit, Bound) else limit.bound(flops, size)
    time = duration_of(handle)
    assert handle.started_at is not None, "it is complete"
    span = handle.started_at, handle.started_at + time
    held_back_by = ""
    if bound.picoseconds < ENOUGH * time:
        pes = torch.engine.topology.pe_count
        held_back_by = most_lost_to(
            torch.engine.op_log, pes, span, bound.name, bound.picoseconds,
            busiest=_busiest_link(torch.engine),
        )  # fmt: skip
    return _result(
        torch, bench, case, time, bound, flops=flops, size=size, held_back_by=held_back_by
    )


def _busiest_link(engine: GraphEngine) -> tuple[str, float]:
    """Whether an HBM channel or another link was the busiest, and for which share of launches.

    Links count from the beginning of the run, so this is a mean over all launches so far.
    """
    parts = {"HBM": 0, "DMA": 0, "links": 0}
    for link in engine.machine.links:
        if not link.name.startswith("host->"):
            part = _part_of(link.name)
            parts[part] = max(parts[part], link.busy)
    launched = Counter[str]()
    for each in engine.op_log:
        if each.kind == "KernelLaunch":
            launched[each.place] += each.end - each.start
    name = max(parts, key=lambda each: parts[each])
    # Devices work at a time: a link is one device's.
    return name, parts[name] / max(1, *launched.values())


def _part_of(link: str) -> str:
    """What transfers share there: a channel, the DMA of a PE with its memory, or a link."""
    if _CHANNEL.search(link):
        return "HBM"
    return "DMA" if link.endswith((".dma", ".tcm")) else "links"


def collective_result(
    torch: Any,
    bench: str,
    case: str,
    time: int,
    bound: Bound,
    *,
    flops: int,
    size: int,
    algorithm: str,
    before: MessagesBefore | None = None,
) -> BenchResult:
    """The result of one collective, and what its messages waited for.

    `before` is what other ones had done before it; None if it was the first of the run.
    """
    held_back_by = ""
    if bound.picoseconds < ENOUGH * time:
        machine, (waited, carried) = (
            torch.engine.machine,
            before or MessagesBefore(MessageWaits(), {}),
        )
        busiest = max(
            (busy - carried.get(name, 0) for name, busy in wire_times(machine).items()), default=0
        )
        waits = machine.waits - waited
        held_back_by = most_waited_for(waits, time - bound.picoseconds, max(0, time - busiest))
    fidelity = torch.engine.machine.fidelities.get(algorithm, "")
    return _result(
        torch, bench, case, time, bound,
        flops=flops, size=size, held_back_by=held_back_by, fidelity=fidelity,
    )  # fmt: skip


def ranks_result(
    torch: Any,
    bench: str,
    case: str,
    time: int,
    bound: Bound,
    *,
    flops: int,
    size: int,
    begun: int,
    algorithm: str,
) -> BenchResult:
    """The result of ranks that compute and communicate, and what their devices lost time to.

    The operations of the log from the number `begun` on are theirs.
    """
    held_back_by = ""
    if bound.picoseconds < ENOUGH * time:
        held_back_by = spending_of(torch, begun=begun).dearest
    fidelity = torch.engine.machine.fidelities.get(algorithm, "")
    return _result(
        torch, bench, case, time, bound,
        flops=flops, size=size, held_back_by=held_back_by, fidelity=fidelity,
    )  # fmt: skip


def _result(
    torch: Any,
    bench: str,
    case: str,
    time: int,
    bound: Bound,
    *,
    flops: int,
    size: int,
    held_back_by: str,
    fidelity: str = "",
) -> BenchResult:
    return BenchResult(
        bench=bench,
        case=case,
        time_ps=time,
        flops=flops,
        bytes=size,
        bound=bound.name,
        bound_ps=bound.picoseconds,
        law_ps=bound.law,
        held_back_by=held_back_by,
        is_checked=torch.engine.enable_data,
        fidelity=fidelity,
    )
