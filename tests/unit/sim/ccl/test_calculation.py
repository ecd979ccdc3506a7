import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.errors import ConfigError
from rankwise.core.collectives.reductions import ReduceOp
from rankwise.sim.ccl.calculation import calculate, order_of
from rankwise.sim.ccl.plan import CollectiveRequest, plan
from rankwise.sim.ccl.program import Copy, Fold, Instruction, Receive, Send, Span
from rankwise.sim.triton.dtypes import Array, dtype_named

F32 = dtype_named("f32")


def carried_out(programs: list[list[Instruction]], *spaces: list[float]) -> list[list[float]]:
    workspaces: list[Array] = [np.array(space, np.float32) for space in spaces]
    order = order_of(programs, [len(space) for space in workspaces])
    calculate(order, workspaces, ReduceOp.SUM, F32)
    return [space.tolist() for space in workspaces]


def test_a_message_says_what_it_said_when_it_was_sent() -> None:
    programs: list[list[Instruction]] = [
        [Send(1, Span(0, 2)), Copy(Span(2, 4), Span(0, 2))],
        [Receive(0, Span(0, 2))],
    ]

    assert carried_out(programs, [1, 2, 8, 9], [0, 0]) == [[8, 9, 8, 9], [1, 2]]


@given(st.integers(0, 3), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3))
def test_it_does_so_whatever_part_of_it_is_overwritten(
    sent: int, length: int, written: int, count: int
) -> None:
    message, target = Span(sent, sent + length), Span(written, written + count)
    programs: list[list[Instruction]] = [
        [Send(1, message), Send(1, message), Copy(Span(6, 6 + count), target)],
        [Receive(0, Span(0, length)), Receive(0, Span(0, length), combines=True)],
    ]

    _sender, receiver = carried_out(programs, [1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 0, 0])

    assert receiver[:length] == [2 * (value + 1) for value in range(*message)]


def test_a_fold_reads_what_it_writes() -> None:
    programs: list[list[Instruction]] = [[Fold((Span(0, 1), Span(1, 2), Span(0, 1)), Span(0, 1))]]

    assert carried_out(programs, [3, 4]) == [[10, 4]]


@pytest.mark.parametrize("size", [2, 3, 16])
def test_a_ring_is_worked_out_without_copying_a_message(size: int) -> None:
    ring = plan(
        CollectiveRequest(
            "rankwise.sim.ccl.algorithms.ring_allreduce", "all_reduce", size, 4 * size
        )
    )

    assert ring.order.space_count == size
    assert len(ring.order.row) == 2 * (size - 1) * size


def test_a_plan_that_was_made_is_not_played_again() -> None:
    request = CollectiveRequest("rankwise.sim.ccl.algorithms.ring_allreduce", "all_reduce", 4, 8)
    values = [np.full(8, rank, np.float32) for rank in range(4)]

    first = plan(request)
    results = [first.results(values, ReduceOp.SUM, F32) for _ in range(2)]

    assert plan(request) is first
    for each in results:
        assert [result.tolist() for result in each if result is not None] == [[6.0] * 8] * 4


@pytest.mark.parametrize(
    ("programs", "complaint"),
    [
        ([[Send(1, Span(0, 2))], []], "rank 1 leaves 1 messages of rank 0 unread"),
        ([[Receive(1, Span(0, 1))], []], "rank 0 waits at instruction 0 for a message of rank 1"),
        ([[Send(1, Span(0, 2))], [Receive(0, Span(0, 1))]], "sends 2 elements where rank 1"),
        ([[Send(0, Span(0, 1))], []], "rank 0 is not another rank of 0 to 1"),
        ([[Send(2, Span(0, 1))], []], "rank 2 is not another rank of 0 to 1"),
        ([[Copy(Span(0, 1), Span(2, 3))], []], "outside the workspace of 2 elements"),
        ([[Send(1, Span(0, 3))], []], "outside the workspace of 2 elements"),
        ([[Copy(Span(0, 2), Span(0, 1))], []], "the spans differ in length"),
        ([[Fold((Span(0, 1), Span(0, 2)), Span(0, 1))], []], "the spans differ in length"),
    ],
)
def test_programs_that_do_not_fit_are_refused(
    programs: list[list[Instruction]], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        order_of(programs, [2, 2])
