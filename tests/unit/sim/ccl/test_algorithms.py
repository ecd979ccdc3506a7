"""Each algorithm gives, to the bit, what numpy gives in the order that its docstring promises."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import pytest

from rankwise.base.errors import ConfigError
from rankwise.core.collectives.algorithms import tree_allreduce
from rankwise.core.collectives.levels import grid_of, units_of
from rankwise.core.collectives.reductions import ReduceOp
from rankwise.sim.ccl.plan import CollectiveRequest, Plan, plan
from rankwise.sim.ccl.program import Send
from rankwise.sim.ccl.rounded_reductions import check_reduction
from rankwise.sim.triton.dtypes import Array, dtype, dtype_named

HERE = "rankwise.sim.ccl.algorithms."
SIZES = range(1, 17)
LENGTHS = (1, 7, 33)
DTYPES = ("f16", "bf16", "f32", "i8", "i32")
Add = Callable[[Array, Array], Array]


def operands(kind: dtype, size: int, length: int) -> list[Array]:
    """Values whose sums depend on the order, but for integers, which wrap around."""
    random = np.random.default_rng([size, length, 7])
    if kind.is_floating():
        values = random.normal(size=(size, length)) * 10.0 ** random.integers(-2, 3, (size, length))
        return [kind.rounded(row.astype(np.float32)) for row in values]
    low, high = kind.limits()
    return list(random.integers(low, high, (size, length), endpoint=True).astype(kind.compute))


def planned(name: str, collective: str, size: int, elements: int, **more: Any) -> Plan:
    return plan(CollectiveRequest(HERE + name, collective, size, elements, **more))


def in_steps(kind: dtype) -> Add:
    """One addition, rounded."""

    def add(one: Array, other: Array) -> Array:
        with np.errstate(over="ignore"):
            return kind.rounded(one + other)

    return add


def cut(length: int, count: int) -> list[slice]:
    return [slice(length * index // count, length * (index + 1) // count) for index in range(count)]


def ring_order(values: Sequence[Array], add: Add, _kind: dtype) -> Array:
    size, total = len(values), np.empty_like(values[0])
    for index, part in enumerate(cut(len(total), size)):
        total[part] = reduce(add, (values[(index + step) % size][part] for step in range(size)))
    return total


def rank_order(values: Sequence[Array], _add: Add, kind: dtype) -> Array:
    with np.errstate(over="ignore"):
        return kind.rounded(reduce(np.add, values))


def at_positions(values: Sequence[Array], add: Add) -> list[Array]:
    """Those who are left when the spare ranks have given their data away."""
    size = len(values)
    spare = size - (1 << (size.bit_length() - 1))
    pairs = [add(values[2 * pair], values[2 * pair + 1]) for pair in range(spare)]
    return pairs + list(values[2 * spare :])


def neighbours_first(values: Sequence[Array], add: Add, _kind: dtype) -> Array:
    level = at_positions(values, add)
    while len(level) > 1:
        level = [add(level[index], level[index + 1]) for index in range(0, len(level), 2)]
    return level[0]


def farthest_first(values: Sequence[Array], add: Add, _kind: dtype) -> Array:
    level = at_positions(values, add)
    while len(level) > 1:
        half = len(level) // 2
        level = [add(level[index], level[index + half]) for index in range(half)]
    return level[0]


def both_trees(values: Sequence[Array], add: Add, _kind: dtype) -> Array:
    size, total = len(values), np.empty_like(values[0])

    def summed(low: int, high: int, shift: int, half: slice) -> Array | None:
        if low > high:
            return None
        root = max(range(low, high + 1), key=lambda number: number & -number)
        value = values[(root - 1 - shift) % size][half]
        for subtree in (summed(low, root - 1, shift, half), summed(root + 1, high, shift, half)):
            value = value if subtree is None else add(value, subtree)
        return value

    for shift, half in enumerate(cut(len(total), 2)):
        total[half] = summed(1, size, shift, half)
    return total


ALL_REDUCE = {
    "ring_allreduce": ring_order,
    "direct_allreduce": rank_order,
    "recursive_doubling_allreduce": neighbours_first,
    "halving_doubling_allreduce": farthest_first,
    "tree_allreduce": both_trees,
    "hierarchical_allreduce": ring_order,
}


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("name", ALL_REDUCE)
def test_all_reduce_adds_in_the_documented_order(name: str, dtype_name: str) -> None:
    kind = dtype_named(dtype_name)
    for size in SIZES:
        for length in LENGTHS:
            values = operands(kind, size, length)

            results = planned(name, "all_reduce", size, length).results(values, ReduceOp.SUM, kind)

            expected = ALL_REDUCE[name](values, in_steps(kind), kind)
            for result in results:
                np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("name", ["ring_reduce_scatter", "direct_reduce_scatter"])
def test_reduce_scatter_adds_in_the_documented_order(name: str, dtype_name: str) -> None:
    kind = dtype_named(dtype_name)
    add = in_steps(kind)
    for size in SIZES:
        for length in LENGTHS:
            values = operands(kind, size, size * length)

            results = planned(name, "reduce_scatter", size, length).results(
                values, ReduceOp.SUM, kind
            )

            for rank, result in enumerate(results):
                blocks = [value[rank * length : (rank + 1) * length] for value in values]
                if name.startswith("ring"):
                    expected = reduce(add, blocks[rank + 1 :] + blocks[: rank + 1])
                else:
                    expected = rank_order(blocks, add, kind)
                np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("name", ["ring_allgather", "direct_allgather"])
def test_all_gather_puts_the_blocks_in_the_order_of_the_ranks(name: str) -> None:
    kind = dtype_named("bf16")
    for size in SIZES:
        values = operands(kind, size, 5)

        for result in planned(name, "all_gather", size, 5).results(values, ReduceOp.SUM, kind):
            np.testing.assert_array_equal(result, np.concatenate(values))


@pytest.mark.parametrize("name", [
    "ring_all_to_all", "direct_all_to_all", "pairwise_all_to_all", "hierarchical_all_to_all",
])  # fmt: skip
def test_all_to_all_transposes_the_blocks(name: str) -> None:
    kind = dtype_named("i32")
    for size in SIZES:
        values = operands(kind, size, size * 3)

        results = planned(name, "all_to_all", size, 3).results(values, ReduceOp.SUM, kind)

        blocks = np.stack(values).reshape(size, size, 3)
        for rank, result in enumerate(results):
            np.testing.assert_array_equal(result, blocks[:, rank].reshape(-1))


@pytest.mark.parametrize(
    "name", ["direct_all_to_all", "pairwise_all_to_all", "hierarchical_all_to_all"]
)
@pytest.mark.parametrize(
    ("homes", "axes"),
    [
        (tuple(range(12)), (4, 12)), (tuple(range(12)), (2, 6, 12)),
        ((5, 0, 3, 2, 4, 1), (3, 6)), ((0, 1, 4, 5, 6), (4, 8)), ((0, 0, 1, 1), (2,)),
    ],
)  # fmt: skip
def test_all_to_alls_along_the_axes_of_a_network_transpose_the_blocks(
    name: str, homes: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    kind, size = dtype_named("i32"), len(homes)
    values = operands(kind, size, size * 3)

    results = planned(name, "all_to_all", size, 3, homes=homes, axes=axes).results(
        values, ReduceOp.SUM, kind
    )

    blocks = np.stack(values).reshape(size, size, 3)
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result, blocks[:, rank].reshape(-1))


def test_a_hierarchical_all_to_all_sends_one_message_to_each_other_node() -> None:
    task = {"homes": tuple(range(256)), "axes": (8, 256)}
    model = planned("hierarchical_all_to_all", "all_to_all", 256, 1, **task).model

    sends = [each for each in model if isinstance(each, Send)]
    assert len(sends) == 7 + 31
    assert sum(each.span.length for each in sends if each.peer >= 8) == 31 * 8


def test_the_messages_of_an_all_to_all_on_a_ring_grow_with_the_ranks() -> None:
    for size in (4, 16, 64):
        first, *_ = planned("ring_all_to_all", "all_to_all", size, 3).programs

        assert len([each for each in first if isinstance(each, Send)]) == 2 * size - 3


def test_a_broadcast_reaches_everyone_from_every_root() -> None:
    kind = dtype_named("f32")
    for size in SIZES:
        for root in range(size):
            values = operands(kind, size, 9)

            results = planned("tree_broadcast", "broadcast", size, 9, root=root).results(
                values, ReduceOp.SUM, kind
            )

            for result in results:
                np.testing.assert_array_equal(result, values[root])


def test_a_reduction_adds_the_nearest_first_and_only_the_root_has_it() -> None:
    kind = dtype_named("f16")
    add = in_steps(kind)

    def summed(values: list[Array], number: int, bit: int) -> Array:
        total, step = values[number], 1
        while step < bit:
            if number + step < len(values):
                total = add(total, summed(values, number + step, step))
            step *= 2
        return total

    for size in SIZES:
        for root in (0, size - 1):
            values = operands(kind, size, 11)

            results = planned("tree_reduce", "reduce", size, 11, root=root).results(
                values, ReduceOp.SUM, kind
            )

            turned = values[root:] + values[:root]
            np.testing.assert_array_equal(results[root], summed(turned, 0, 2 * size))
            assert [rank for rank, result in enumerate(results) if result is not None] == [root]


def test_hierarchical_all_reduce_adds_inside_devices_before_between_them() -> None:
    kind = dtype_named("f16")
    add = in_steps(kind)
    values = operands(kind, 6, 12)

    results = planned(
        "hierarchical_allreduce", "all_reduce", 6, 12, homes=(0, 0, 1, 1, 2, 2)
    ).results(values, ReduceOp.SUM, kind)

    expected = np.empty_like(values[0])
    for place, half in enumerate(cut(12, 2)):
        # Part j of a device ends at its j-th rank, so it begins at the other one.
        inside = [
            add(values[2 * device + 1 - place][half], values[2 * device + place][half])
            for device in range(3)
        ]
        expected[half] = ring_order(inside, add, kind)
    for result in results:
        np.testing.assert_array_equal(result, expected)


def test_hierarchical_all_reduce_takes_devices_with_different_numbers_of_ranks() -> None:
    kind = dtype_named("f16")
    add = in_steps(kind)
    values = operands(kind, 5, 9)

    results = planned("hierarchical_allreduce", "all_reduce", 5, 9, homes=(0, 0, 0, 1, 1)).results(
        values, ReduceOp.SUM, kind
    )

    inside = [reduce(add, values[:3]), reduce(add, values[3:])]
    for result in results:
        np.testing.assert_array_equal(result, ring_order(inside, add, kind))


def test_a_ring_may_visit_the_ranks_in_another_order() -> None:
    kind = dtype_named("f16")
    values = operands(kind, 4, 10)
    ring = (0, 1, 3, 2)

    reduced = planned("ring_allreduce", "all_reduce", 4, 10, ring=ring)
    gathered = planned("ring_allgather", "all_gather", 4, 10, ring=ring)
    scattered = planned("ring_reduce_scatter", "reduce_scatter", 4, 2, ring=ring)
    exchanged = planned("ring_all_to_all", "all_to_all", 4, 3, ring=ring)

    expected = ring_order([values[rank] for rank in ring], in_steps(kind), kind)
    np.testing.assert_array_equal(reduced.results(values, ReduceOp.SUM, kind)[2], expected)
    np.testing.assert_array_equal(
        gathered.results(values, ReduceOp.SUM, kind)[1], np.concatenate(values)
    )
    assert set(reduced.elements_sent()) == {(0, 1), (1, 3), (3, 2), (2, 0)}
    for rank, result in enumerate(
        scattered.results([value[:8] for value in values], ReduceOp.MAX, kind)
    ):
        expected = np.max([value[2 * rank : 2 * rank + 2] for value in values], axis=0)
        np.testing.assert_array_equal(result, expected)
    numbers = [np.arange(12, dtype=np.float32) + 100 * rank for rank in range(4)]
    for rank, result in enumerate(exchanged.results(numbers, ReduceOp.SUM, kind)):
        expected = np.concatenate([each[3 * rank : 3 * rank + 3] for each in numbers])
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("op", "function"),
    [
        (ReduceOp.PRODUCT, np.prod),
        (ReduceOp.MIN, np.min),
        (ReduceOp.MAX, np.max),
        (ReduceOp.AVG, np.mean),
    ],
)
def test_other_reductions_than_sums_are_right(op: ReduceOp, function: Any) -> None:
    kind = dtype_named("f32")
    values = [np.array([1.0, -2.0, 4.0], np.float32) * (rank + 1) for rank in range(4)]
    for name in ALL_REDUCE:
        for result in planned(name, "all_reduce", 4, 3).results(values, op, kind):
            np.testing.assert_array_equal(result, function(values, axis=0))


def test_a_ring_sends_over_each_link_what_its_formula_says() -> None:
    sent = planned("ring_allreduce", "all_reduce", 8, 800).elements_sent()

    assert sent == {(rank, (rank + 1) % 8): 2 * 7 * 100 for rank in range(8)}


def test_halving_doubling_sends_no_more_than_a_ring() -> None:
    sent = planned("halving_doubling_allreduce", "all_reduce", 8, 800).elements_sent()

    for rank in range(8):
        assert sum(count for (source, _), count in sent.items() if source == rank) == 2 * 7 * 100


def test_every_rank_is_a_leaf_in_one_of_the_two_trees() -> None:
    for size in range(2, 17, 2):
        for rank in range(size):
            children = [tree_allreduce.place_in_tree(rank, size, tree)[1] for tree in (0, 1)]
            assert [] in children


def test_ranks_without_a_device_of_their_own_are_grouped_by_it() -> None:
    task = CollectiveRequest("", "all_reduce", 5, 1, homes=(4, 4, 2, 4, 2)).task(0)

    assert grid_of(task) is None
    assert units_of(task) == [[0, 1, 3], [2, 4]]


def test_ranks_fill_a_grid_if_all_units_of_a_level_have_as_many() -> None:
    two_nodes = CollectiveRequest(
        "", "all_reduce", 8, 1, homes=(0, 1, 2, 3, 8, 9, 10, 11), axes=(8, 16)
    )
    uneven = CollectiveRequest("", "all_reduce", 6, 1, homes=(0, 1, 2, 3, 8, 9), axes=(8, 16))

    grid = grid_of(two_nodes.task(0))
    assert grid is not None
    assert grid.lengths == (4, 2)
    assert grid.along(5, 0) == ([4, 5, 6, 7], 1)
    assert grid.along(5, 1) == ([1, 5], 1)
    assert grid_of(uneven.task(0)) is None
    assert units_of(uneven.task(0)) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("name", ["hierarchical_allreduce", "torus_allreduce"])
@pytest.mark.parametrize("axes", [(2, 6, 12), (4, 12), (3, 12)])
def test_all_reduce_along_axes_is_right_for_any_shape(name: str, axes: tuple[int, ...]) -> None:
    kind = dtype_named("i32")
    for length in (1, 7, 24, 101):
        values = operands(kind, 12, length)

        results = planned(name, "all_reduce", 12, length, axes=axes).results(
            values, ReduceOp.SUM, kind
        )

        for result in results:
            np.testing.assert_array_equal(result, sum(values))


def test_an_average_of_integers_is_refused() -> None:
    with pytest.raises(ConfigError, match="an average of int32 is not defined"):
        check_reduction(ReduceOp.AVG, dtype_named("i32"))


def test_operands_stay_as_they_are_unless_they_may_be_overwritten() -> None:
    kind = dtype_named("f32")
    values = [np.ones(4, np.float32) for _ in range(2)]
    ring = planned("ring_allreduce", "all_reduce", 2, 4)

    ring.results(values, ReduceOp.SUM, kind)
    assert values[0].tolist() == [1.0] * 4

    results = ring.results(values, ReduceOp.SUM, kind, may_overwrite=True)
    assert results[0] is not None
    assert results[0].tolist() == [2.0] * 4
