"""What a kernel has lost its time to, as its operations tell."""

from rankwise.sim.benches.link_contention import most_lost_to, most_waited_for
from rankwise.sim.hardware.hardware_machine import MessageWaits
from rankwise.sim.hardware.op_log import LoggedOperation


def operation(kind: str, pe: int, start: int, end: int) -> LoggedOperation:
    return LoggedOperation(
        number=0, kind=kind, name=kind, place=f"pe{pe}", start=start, end=end, bytes=0, flops=0,
        reads=(), writes=(),
    )  # fmt: skip


def told(
    *operations: LoggedOperation, pes: int = 1, bound: str = "compute", at_best: int = 50
) -> str:
    return most_lost_to(operations, pes, (0, 100), bound, at_best)


def test_pes_that_are_done_early_or_have_nothing_to_do_are_a_tail() -> None:
    assert told(operation("dot", 0, 0, 40)) == "wave tail"
    assert told(operation("dot", 0, 0, 100), pes=4) == "wave tail"


def test_an_engine_that_waits_for_another_loses_time_to_it() -> None:
    loads = operation("load", 0, 0, 60), operation("dot", 0, 60, 100)
    sums = operation("dot", 0, 0, 30), operation("math", 0, 30, 100)

    assert told(*loads) == "DMA"
    assert told(*sums) == "math"
    assert told(*sums, bound="math", at_best=60) == "GEMM"


def test_what_overlaps_with_the_engine_of_the_bound_costs_nothing() -> None:
    busy = operation("dot", 0, 0, 70), operation("load", 0, 0, 70), operation("math", 0, 70, 100)

    assert told(*busy, at_best=69) == "math"


def test_an_engine_that_is_busy_all_the_time_is_below_its_peak_or_shares_links() -> None:
    assert told(operation("dot", 0, 0, 100)) == "GEMM below its peak"
    assert told(operation("load", 0, 0, 100), bound="memory") == "links"
    assert told(operation("store", 0, 0, 100), bound="tile loads") == "links"


def test_operations_of_others_do_not_count() -> None:
    before = operation("dot", 0, -50, -10)

    assert told(before) == ""
    assert told(before, operation("load", 0, 0, 90), operation("dot", 0, 90, 100)) == "DMA"


def waits(queues: int, **times: int) -> MessageWaits:
    found = MessageWaits()
    found.queues = queues
    for name, amount in times.items():
        setattr(found, name, amount)
    return found


def test_what_messages_waited_for_longest_is_named() -> None:
    assert most_waited_for(waits(2, credits=120, dma=20), 100) == "credits"
    assert most_waited_for(waits(2, math=60, ways=160), 100) == "ways inside devices"


def test_what_nothing_else_explains_was_lost_on_the_links() -> None:
    assert most_waited_for(waits(2, credits=60, dma=20), 100) == "links"
    assert most_waited_for(waits(0), 100) == "links"


def test_waits_are_told_apart_by_the_run_that_they_belong_to() -> None:
    found = waits(2, credits=30)
    before = found.copy()
    found.credits += 5

    assert ((found - before).credits, (found - before).queues, before.credits) == (5, 0, 30)
