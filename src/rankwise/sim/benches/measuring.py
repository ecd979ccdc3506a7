"""From the op log of a run to results."""

from collections.abc import Iterable
from typing import Any

from rankwise.base.errors import LocalProtocolError
from rankwise.sim.benches.bounds import Bound, Roofline
from rankwise.sim.hardware.commands import Handle
from rankwise.sim.hardware.op_log import Operation
from rankwise.sim.reporting.results import BenchResult


def span_of(operations: Iterable[Operation]) -> int:
    """Picoseconds from the first start to the last end."""
    found = list(operations)
    if not found:
        raise LocalProtocolError("nothing that was to be measured has run")
    return max(each.end for each in found) - min(each.start for each in found)


def duration_of(handle: Handle) -> int:
    """Picoseconds from the start of a command to its completion."""
    if handle.started_at is None or handle.completed_at is None:
        raise LocalProtocolError(f"{handle!r} is not complete, so it took no time yet")
    return handle.completed_at - handle.started_at


def kernel_result(
    torch: Any,
    bench: str,
    case: str,
    handle: Handle,
    limit: Roofline | Bound,
    *,
    flops: int,
    size: int,
) -> BenchResult:
    """The result of one launch, beside a bound, or beside that of a roofline."""
    bound = limit if isinstance(limit, Bound) else limit.bound(flops, size)
    return _result(torch, bench, case, duration_of(handle), bound, flops=flops, size=size)


def collective_result(
    torch: Any, bench: str, case: str, time: int, bound: Bound, *, flops: int, size: int
) -> BenchResult:
    """The result of one collective."""
    return _result(torch, bench, case, time, bound, flops=flops, size=size)


def _result(
    torch: Any, bench: str, case: str, time: int, bound: Bound, *, flops: int, size: int
) -> BenchResult:
    return BenchResult(
        bench=bench,
        case=case,
        time_ps=time,
        flops=flops,
        bytes=size,
        bound=bound.name,
        bound_ps=bound.picoseconds,
        is_checked=torch.engine.enable_data,
    )
