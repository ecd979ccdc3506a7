"""`num_stages`: how many turns of a loop are under way at a time on a simulated machine."""

from typing import Any

import pytest

import rankwise.sim.triton.language as tl
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.hardware.op_log import LoggedOperation

TURNS = 8


def sums(x: Any, y: Any, BLOCK: tl.constexpr) -> None:
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    places = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for turn in range(8):
        block = tl.load(x + turn * BLOCK * BLOCK + places)
        total = tl.dot(block, block, total)
    tl.store(y + places, total)


def sums_in_two_stages(x: Any, y: Any, BLOCK: tl.constexpr) -> None:
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    places = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for turn in tl.range(0, 8, num_stages=2):
        block = tl.load(x + turn * BLOCK * BLOCK + places)
        total = tl.dot(block, block, total)
    tl.store(y + places, total)


def operations(kernel: Any, *, enable_data: bool = False, **options: Any) -> list[LoggedOperation]:
    with RuntimeContext(GraphEngine("default", enable_data), ccl={}) as torch:
        x, y = torch.ones(TURNS, 64, 64, dtype="f16"), torch.empty(64, 64)
        torch.launch(kernel, 1, x, y, BLOCK=64, **options)
        return [each for each in torch.engine.op_log if each.kind in {"load", "dot", "store"}]


def most_turns_under_way(log: list[LoggedOperation]) -> int:
    """How many blocks are, at most, loaded or on their way, and not yet multiplied."""
    loads = sorted(each.start for each in log if each.kind == "load")
    dots = sorted(each.end for each in log if each.kind == "dot")
    return max(at + 1 - sum(end <= start for end in dots) for at, start in enumerate(loads))


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_so_many_turns_of_a_loop_are_under_way_as_the_launch_says(stages: int) -> None:
    assert most_turns_under_way(operations(sums, num_stages=stages)) == stages


def test_a_loop_may_say_it_for_itself() -> None:
    assert most_turns_under_way(operations(sums_in_two_stages, num_stages=1)) == 2


def test_a_second_stage_hides_loads_behind_products() -> None:
    one, two = (operations(sums, num_stages=stages)[-1].end for stages in (1, 2))
    any_number = operations(sums)[-1].end

    assert one > two >= any_number


def test_stages_take_the_same_time_with_data_and_without() -> None:
    with_data = operations(sums, enable_data=True, num_stages=2)

    assert operations(sums, num_stages=2) == with_data
