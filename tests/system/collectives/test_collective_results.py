"""What comes out equals what numpy computes in the order of the ranks, to the bit."""

import hashlib
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import DTypeLike
from worlds import World

from rankwise.collectives import Communicator
from rankwise.collectives.ordered_reductions import ReductionName

pytestmark = pytest.mark.system

Worlds = dict[int, World]
MakeWorld = Callable[..., World]

UFUNCS: dict[ReductionName, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}
DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "longdouble", "complex64", "complex128", ">f8", ">i4"),
]
BUFFER_BYTES = 1 << 16


def contribution(rank: int, dtype: DTypeLike, shape: tuple[int, ...], seed: int = 0) -> Any:
    rng = np.random.default_rng([rank, seed])
    dtype = np.dtype(dtype)
    if dtype.kind in "biu":
        return rng.integers(0, 100, shape).astype(dtype)
    values = rng.normal(size=shape) + (1j * rng.normal(size=shape) if dtype.kind == "c" else 0)
    return values.astype(dtype)


def folded(op: ReductionName, arrays: list[Any]) -> Any:
    result = reduce(UFUNCS[op], arrays)
    if op == "mean":
        result = result / len(arrays)
    return result.astype(arrays[0].dtype)


def is_close(op: str, left: Any, right: Any) -> Any:
    """Equal to the bit; but numpy's own loops for complex products differ among themselves."""
    if op == "prod" and right.dtype.kind == "c":
        return left.dtype == right.dtype and np.allclose(left, right, rtol=1e-5)
    return is_same(left, right)


def is_same(left: Any, right: Any) -> Any:
    left, right = np.asarray(left), np.asarray(right)
    return left.dtype == right.dtype and left.shape == right.shape and (
        np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
    )  # fmt: skip


def counts_for(dtype: DTypeLike) -> list[int]:
    """One element, a few, and more than fit into a buffer."""
    return [1, 7, 1000, 100_003 // np.dtype(dtype).itemsize]


def bits_of(array: Any) -> Any:
    """All that an array says, without what pads a long double."""
    if array.dtype != np.longdouble:
        return array.tobytes()
    high = array.astype(np.float64)
    return high.tobytes() + (array - high).astype(np.float64).tobytes()


def reduce_all_dtypes(communicator: Communicator) -> Any:
    """What differs from numpy, and a digest of all that the ranks must have in common.

    The ranks share the work of numpy, which takes most of the time: each has some of the cases.
    """
    size, rank = communicator.size, communicator.rank
    wrong = []
    common = hashlib.sha256()
    for number, (dtype, count) in enumerate((d, c) for d in DTYPES for c in counts_for(d)):
        is_mine = number % size == rank
        mine = contribution(rank, dtype, (size * count,))
        flat = [contribution(r, dtype, mine.shape) for r in range(size)] if is_mine else []
        for op in UFUNCS:
            if op == "mean" and np.dtype(dtype).kind in "biu":
                continue
            reduced = communicator.all_reduce(mine, op)
            common.update(f"{op} {dtype} {reduced.dtype.str} {reduced.shape}".encode())
            common.update(bits_of(reduced))
            if is_mine and not is_close(op, reduced, folded(op, flat)):
                wrong.append(("all_reduce", op, dtype, count))
            part = communicator.reduce_scatter(mine.reshape(size, count), op)
            if not is_close(op, part, reduced.reshape(size, count)[rank]):
                wrong.append(("reduce_scatter", op, dtype, count))
    return wrong, common.hexdigest()


def move_all_dtypes(communicator: Communicator) -> Any:
    wrong = []
    for dtype in [*DTYPES, "datetime64[s]", "S5", "i4,f8"]:
        for count in counts_for(dtype):
            source = np.arange(count) % 251
            everybody = [
                np.frombuffer(
                    np.resize(source + r, count * np.dtype(dtype).itemsize).astype(np.uint8), dtype
                )
                for r in range(communicator.size)
            ]
            if dtype == "bool":
                everybody = [array.view(np.uint8) % 2 == 1 for array in everybody]
            mine = everybody[communicator.rank]
            gathered = communicator.all_gather(mine)
            if gathered.tobytes() != b"".join(array.tobytes() for array in everybody):
                wrong.append(("all_gather", dtype, count))
            rows = np.concatenate(everybody).reshape(communicator.size, count)
            exchanged = communicator.all_to_all(np.roll(rows, communicator.rank, axis=0))
            places = [(communicator.rank - peer) % communicator.size for peer in range(len(rows))]
            if exchanged.tobytes() != rows[places].tobytes():
                wrong.append(("all_to_all", dtype, count))
            root = count % communicator.size
            received = communicator.broadcast(mine, root=root)
            if received.dtype != mine.dtype or received.tobytes() != everybody[root].tobytes():
                wrong.append(("broadcast", dtype, count))
    return wrong


@pytest.mark.parametrize("size", range(1, 9))
def test_reductions_of_every_dtype_equal_numpy(lasting_worlds: Worlds, size: int) -> None:
    results = lasting_worlds[size].run(reduce_all_dtypes)

    assert [wrong for wrong, _ in results] == [[]] * size
    assert len({common for _, common in results}) == 1, "not all ranks have the same bits"


@pytest.mark.parametrize("size", range(1, 9))
def test_every_dtype_is_moved_unchanged(lasting_worlds: Worlds, size: int) -> None:
    assert lasting_worlds[size].run(move_all_dtypes) == [[]] * size


def awkward_bits(communicator: Communicator, count: int) -> Any:
    rng = np.random.default_rng(communicator.rank)
    choices = np.array([np.nan, -np.nan, 0.0, -0.0, np.inf, -np.inf, 1e-310, 1.0])
    array = rng.choice(choices, count)
    complex_array = contribution(communicator.rank, "complex64", (count,))
    with np.errstate(all="ignore"):
        return [
            *(communicator.all_reduce(array, op).tobytes() for op in ("sum", "max", "min")),
            communicator.all_reduce(complex_array, "prod").tobytes(),
        ]


@pytest.mark.parametrize("count", [1, 7, 1001, 40_003])
def test_all_ranks_get_the_same_bits_even_of_nan_and_negative_zero(
    lasting_worlds: Worlds, count: int
) -> None:
    results = lasting_worlds[4].run(awkward_bits, count)

    assert all(result == results[0] for result in results)


def reduce_shape(communicator: Communicator, shape: tuple[int, ...]) -> Any:
    array = np.full(shape, communicator.rank + 1.0)
    result = communicator.all_reduce(array)
    gathered = communicator.all_gather(array)
    scattered = communicator.reduce_scatter(gathered)
    sent = communicator.broadcast(array, root=1)
    return result, gathered.shape, scattered.shape, sent.shape


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_shapes_are_kept_empty_and_scalar_ones_too(
    lasting_worlds: Worlds, shape: tuple[int, ...]
) -> None:
    for result, *shapes in lasting_worlds[3].run(reduce_shape, shape):
        assert is_same(result, np.full(shape, 6.0))
        assert shapes == [(3, *shape), shape, shape]


def use_strided_arrays(communicator: Communicator) -> Any:
    whole = np.arange(60_000.0).reshape(200, 300) + communicator.rank
    view = whole[::2, 5:100].T
    out = np.zeros((200, 95))[::2].T
    before = whole.copy()
    returned = communicator.all_reduce(view, out=out)
    return (
        returned is out,
        is_same(whole, before),
        is_same(out, 2 * view - 2 * communicator.rank + 1),
    )


def test_arguments_and_results_need_not_be_contiguous(lasting_worlds: Worlds) -> None:
    assert lasting_worlds[2].run(use_strided_arrays) == [(True, True, True)] * 2


def work_in_place(communicator: Communicator, count: int) -> Any:
    size, rank = communicator.size, communicator.rank
    array = np.arange(float(count)) + rank
    returned = communicator.all_reduce(array, "max", out=array)
    reduced = returned is array and is_same(array, np.arange(float(count)) + size - 1)
    rows = np.zeros((size, count))
    rows[rank] = rank
    communicator.all_gather(rows[rank], out=rows)
    gathered = all((rows[r] == r).all() for r in range(size))
    array[:] = rank
    communicator.broadcast(array, root=2, out=array)
    shifted = np.arange(count + 1.0)
    communicator.all_reduce(shifted[:-1], out=shifted[1:])
    moved = is_same(shifted[1:], np.arange(float(count)) * size)
    rows = np.arange(size * float(count)).reshape(size, count)
    communicator.reduce_scatter(rows, out=rows[0])
    scattered = is_same(rows[0], size * (np.arange(float(count)) + rank * count))
    return reduced, gathered, bool((array == 2).all()), moved, scattered


@pytest.mark.parametrize("count", [5, 30_000])
def test_results_may_overlap_their_arguments(lasting_worlds: Worlds, count: int) -> None:
    assert lasting_worlds[3].run(work_in_place, count) == [(True,) * 5] * 3


def take_many_turns(communicator: Communicator, count: int) -> Any:
    total = 0
    for number in range(count):
        total += int(communicator.all_reduce(np.array([number, communicator.rank]))[0])
        communicator.barrier()
    return total


def test_thousands_of_operations_follow_each_other(lasting_worlds: Worlds) -> None:
    assert lasting_worlds[4].run(take_many_turns, 3000) == [4 * 3000 * 2999 // 2] * 4


@pytest.mark.parametrize("wrap_bits", [20, 32])
def test_the_count_of_arrivals_may_wrap_around(make_world: MakeWorld, wrap_bits: int) -> None:
    world = make_world(3, phases_passed=(1 << wrap_bits) // 3 - 50)

    assert world.run(take_many_turns, 100) == [3 * 100 * 99 // 2] * 3


OPERATIONS = st.tuples(
    st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"]),
    st.sampled_from(sorted(UFUNCS)),
    st.sampled_from(["float32", "complex128", "float16"]),
    st.integers(0, 3 * BUFFER_BYTES // 4),
    st.integers(0, 2),
)


def follow(communicator: Communicator, program: list[tuple[Any, ...]]) -> Any:
    size, rank = communicator.size, communicator.rank
    wrong = []
    for number, (name, op, dtype, count, root) in enumerate(program):
        shape = (size, count // size) if name == "reduce_scatter" else (count,)
        everybody = [contribution(r, dtype, shape, number) for r in range(size)]
        mine = everybody[rank]
        with np.errstate(all="ignore"):
            if name == "barrier":
                communicator.barrier()
                continue
            if name == "all_reduce":
                result, expected = communicator.all_reduce(mine, op), folded(op, everybody)
            elif name == "reduce_scatter":
                result = communicator.reduce_scatter(mine, op)
                expected = folded(op, everybody)[rank]
            elif name == "all_gather":
                result, expected = communicator.all_gather(mine), np.stack(everybody)
            else:
                result, expected = communicator.broadcast(mine, root), everybody[root]
        if not is_same(result, expected):
            wrong.append((number, name))
    return wrong


@settings(max_examples=30, deadline=None)
@given(program=st.lists(OPERATIONS, max_size=8), size=st.sampled_from([3, 5]))
def test_any_sequence_of_operations_equals_numpy(
    lasting_worlds: Worlds, program: list[tuple[Any, ...]], size: int
) -> None:
    assert lasting_worlds[size].run(follow, program) == [[]] * size


@settings(max_examples=40, deadline=None)
@given(
    count=st.one_of(
        st.integers(0, 50_000),
        st.integers(1, 3).flatmap(lambda n: st.integers(n * 8192 - 3, n * 8192 + 3)),
    ),
    size=st.integers(2, 8),
)
def test_any_length_is_cut_into_the_right_chunks(
    lasting_worlds: Worlds, count: int, size: int
) -> None:
    program = [("all_reduce", "sum", "float64", count, 0), ("all_gather", "", "float64", count, 0)]

    assert lasting_worlds[size].run(follow, program) == [[]] * size
