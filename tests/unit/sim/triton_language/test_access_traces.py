"""Launches with data that are images of each other: nobody can tell, not even from the numbers."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.benches.kernels import (
    attention_kernel,
    gemm_kernel,
    relu_kernel,
    softmax_kernel,
    stream_kernel,
)
from rankwise.sim.hardware.commands import KernelLaunch
from rankwise.sim.kernel import Future
from rankwise.sim.parallel.kernels import linear_kernel
from rankwise.sim.runtime.kernels import (
    binary_kernel,
    matmul_kernel,
    reduce_kernel,
    unary_kernel,
)
from rankwise.sim.triton.kernel_runner import DevicePointer, KernelRunner
from rankwise.sim.triton.language.extra import libdevice

RANKS = 4
Arrays = list[np.ndarray[Any, Any]]


def floats(*shape: int, dtype: type = np.float32) -> Callable[[Any], Any]:
    return lambda random: random.standard_normal(shape, dtype=np.float32).astype(dtype)


def of_any_size(*shape: int) -> Callable[[Any], Any]:
    return lambda random: floats(*shape)(random) * np.float32(10 ** random.integers(0, 6))


def whole(high: int, *shape: int) -> Callable[[Any], Any]:
    return lambda random: random.integers(0, high, shape, dtype=np.int32)


def ran(kernel: Any, grid: int, makers: list[Any], numbers: list[Any], meta: dict[str, Any],
        *, replicas: bool, before: Any = None) -> tuple[GraphEngine, list[Arrays]]:  # fmt: skip
    """Launch a kernel on all ranks, each with data of its own; what memory holds afterwards."""
    found: list[Arrays] = [[] for _ in range(RANKS)]
    engine = GraphEngine("default")
    engine.replicas.are_allowed = replicas
    with RuntimeContext(engine, ccl={}) as torch:

        def worker(rank: int) -> None:
            random = np.random.default_rng(rank)
            arrays = [torch.from_numpy(make(random)) for make in makers]
            if before is not None:
                before(torch, rank, arrays)
            torch.launch(kernel, grid, *arrays, *numbers, **meta)
            found[rank] = [array.numpy() for array in arrays]

        torch.multiprocessing.spawn(worker, nprocs=RANKS)
    return engine, found


def check_equal(kernel: Any, grid: int, makers: list[Any], numbers: list[Any],
                **meta: Any) -> int:  # fmt: skip
    """Launch with images and without: the same numbers, times and log; how many images."""
    (engine, here), (other, there) = (
        ran(kernel, grid, makers, numbers, meta, replicas=replicas) for replicas in (True, False)
    )
    assert other.replicas.count == 0
    for mine, theirs in zip(here, there, strict=True):
        for one, two in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one.view(np.uint8), two.view(np.uint8))
    assert engine.now == other.now
    logs = [Counter(replace(each, number=0) for each in each.op_log) for each in (engine, other)]
    assert logs[0] == logs[1]
    parts = [
        {part.name: (part.busy, part.amount) for part in [*machine.links, *machine.servers]}
        for machine in (engine.machine, other.machine)
    ]
    assert parts[0] == parts[1]
    return engine.replicas.count


HALF = np.float16
SHIPPED = [
    pytest.param(
        gemm_kernel, 6, [floats(40, 50, dtype=HALF), floats(50, 33, dtype=HALF), floats(40, 33)],
        [40, 33, 50], {"TILE_M": 16, "TILE_N": 16, "TILE_K": 32}, id="gemm",
    ),
    pytest.param(
        linear_kernel, 6, [floats(40, 50), floats(33, 50), floats(33), floats(40, 33)],
        [40, 33, 50], {"has_bias": True, "block_m": 16, "block_n": 16, "block_k": 32}, id="linear",
    ),
    pytest.param(
        matmul_kernel, 12, [floats(2, 40, 50), floats(2, 50, 33), floats(2, 40, 33)],
        [40, 33, 50, 2_000, 1_650], {"TILE_M": 16, "TILE_N": 16, "TILE_K": 16}, id="matmul",
    ),
    pytest.param(
        softmax_kernel, 5, [floats(9, 70), floats(9, 70)], [9, 70],
        {"ROWS_PER_PROGRAM": 2, "WIDTH": 128}, id="softmax",
    ),
    pytest.param(
        attention_kernel, 6, [floats(2, 40, 16)] * 4, [40, 0.25],
        {"WIDTH": 16, "QUERIES": 16, "KEYS": 16}, id="attention",
    ),
    pytest.param(
        stream_kernel, 3, [floats(900)] * 3, [900, 3.5],
        {"SCALES": True, "ADDS": True, "BLOCK": 128, "BLOCKS": 3}, id="stream",
    ),
    pytest.param(relu_kernel, 4, [floats(900)], [900], {"BLOCK": 256}, id="relu, in place"),
    pytest.param(
        reduce_kernel, 12, [floats(3, 41, 50), floats(3, 50)], [41, 50, 1, 0, 1],
        {"OP": "sum", "KIND": tl.float32, "DEPTH": 16, "WIDTH": 16}, id="sum",
    ),
    pytest.param(
        unary_kernel, 4, [floats(20, 30), floats(30, 20)], [1, 30, 20, 0, 0, 1, 30],
        {"OP": "exp", "KIND": tl.float32, "HEIGHT": 16, "WIDTH": 16}, id="exp of a transpose",
    ),
    pytest.param(
        binary_kernel, 4, [floats(20, 30), floats(30), floats(20, 30)],
        [1, 20, 30, 0, 0, 30, 1, 0, 0, 0, 1],
        {"OP": "pow", "KIND": tl.float32, "Y_IS_NUMBER": False, "SWAPPED": False, "HEIGHT": 16,
         "WIDTH": 16}, id="pow",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "grid", "makers", "numbers", "meta"), SHIPPED)
def test_kernels_of_other_data_are_images_with_numbers_of_their_own(
    kernel: Any, grid: int, makers: list[Any], numbers: list[Any], meta: dict[str, Any]
) -> None:
    assert check_equal(kernel, grid, makers, numbers, **meta) == RANKS - 1


def columns(x: Any, o: Any, n: Any, H: tl.constexpr) -> None:
    """A sum for each column, each by a program of its own: its elements lie far apart."""
    row = tl.arange(0, H)
    value = tl.load(x + row * n + tl.program_id(0), mask=row < 33)
    tl.store(o + tl.program_id(0), tl.sum(value))


def test_sums_have_the_same_bits_in_whatever_order_elements_lie() -> None:
    assert check_equal(columns, 24, [floats(33, 24), floats(24)], [24], H=64) == RANKS - 1


def powers(x: Any, e: Any, o: Any, B: tl.constexpr) -> None:
    """An exponent for each program."""
    place = tl.program_id(0) * B + tl.arange(0, B)
    base = tl.abs(tl.load(x + place))
    tl.store(o + place, libdevice.pow(base, tl.load(e + tl.program_id(0))))


def test_powers_have_the_same_bits_beside_other_exponents() -> None:
    exponents = np.array([2, 0.5, -1, 3, 1.7, 0], np.float32)
    makers = [floats(384), lambda _: exponents, floats(384)]

    assert check_equal(powers, 6, makers, [], B=64) == RANKS - 1


def picked(table: Any, at: Any, o: Any, B: tl.constexpr) -> None:
    place = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + place, tl.load(table + tl.load(at + place)))


def as_many(x: Any, count: Any, o: Any, B: tl.constexpr) -> None:
    place = tl.program_id(0) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for _ in range(tl.load(count)):
        total += tl.load(x + place)
    tl.store(o + place, total)


def up_to(x: Any, length: Any, o: Any, B: tl.constexpr) -> None:
    place = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + place, tl.load(x + place, mask=place < tl.load(length), other=7.0))


def apart_by(x: Any, step: Any, o: Any, B: tl.constexpr) -> None:
    place = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + place, tl.load(x + place * tl.load(step)))


def turned_by(x: Any, by: Any, o: Any, B: tl.constexpr) -> None:
    """What is loaded reaches no address, but whether the remainder has to be calculated."""
    place = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + place, (place + tl.load(by)) % 64 + tl.load(x + place))


def where_positive(_: Any, x: Any, o: Any, B: tl.constexpr) -> None:
    place = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + place)
    tl.store(o + place, value, mask=value > 0)


def if_positive(_: Any, x: Any, o: Any, B: tl.constexpr) -> None:
    place = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + place)
    if tl.sum(value) > 0:
        value = tl.exp(value)
    tl.store(o + place, value)


def until_small(_: Any, x: Any, o: Any, B: tl.constexpr) -> None:
    place = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + place)
    while tl.max(value) > 0.1:
        value = value / 2
    tl.store(o + place, value)


def to_the_greatest(_: Any, x: Any, o: Any, B: tl.constexpr) -> None:
    """A float decides, by way of an index, where a number is stored."""
    place = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + tl.program_id(0) * B + tl.argmax(tl.load(x + place), axis=0), 1.0)


@pytest.mark.parametrize(
    ("kernel", "second"),
    [
        pytest.param(picked, whole(64, 128), id="an index from memory"),
        pytest.param(as_many, whole(9, 1), id="the bound of a loop"),
        pytest.param(up_to, whole(64, 1), id="the bound of a mask"),
        pytest.param(apart_by, whole(3, 1), id="a stride from memory"),
        pytest.param(turned_by, whole(64, 1), id="a number in a pattern"),
        pytest.param(where_positive, floats(256), id="a mask"),
        pytest.param(if_positive, floats(256), id="a condition"),
        pytest.param(until_small, of_any_size(256), id="a loop that ends by a value"),
        pytest.param(to_the_greatest, floats(256), id="an address from a float"),
    ],
)
def test_launches_whose_data_decides_otherwise_are_simulated(kernel: Any, second: Any) -> None:
    assert check_equal(kernel, 2, [floats(512), second, floats(256)], [], B=64) < RANKS - 1


@pytest.mark.parametrize(
    ("kernel", "second"),
    [
        pytest.param(picked, lambda _: np.arange(128, dtype=np.int32), id="indices"),
        pytest.param(up_to, lambda _: np.array([40], np.int32), id="a length"),
    ],
)
def test_data_that_decides_and_is_equal_on_all_devices_makes_images(
    kernel: Any, second: Any
) -> None:
    assert check_equal(kernel, 2, [floats(256), second, floats(256)], [], B=64) == RANKS - 1


def shifted(x: Any, o: Any, B: tl.constexpr) -> None:
    """In place: what a program loads may have been stored by another one."""
    place = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + place, tl.load(x + place + 1) + tl.load(o + place))


def all_to_one_place(x: Any, o: Any, B: tl.constexpr) -> None:
    place = tl.arange(0, B)
    tl.store(o + place, tl.load(x + tl.program_id(0) * B + place))


def counted(x: Any, o: Any, B: tl.constexpr) -> None:
    tl.atomic_add(o + tl.arange(0, B), tl.load(x + tl.program_id(0) * B + tl.arange(0, B)))


def looked_at(x: Any, o: Any, B: tl.constexpr) -> None:
    """Python sees the numbers, and may decide by them."""
    place = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + place)
    tl.store(o + place, tl.exp(value) if value.numpy().sum() > 0 else value)


def half_over_half(x: Any, o: Any, B: tl.constexpr) -> None:
    """Stores elements of half the size over those that another program loads."""
    place = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + place)
    tl.store(x.to(tl.pointer_type(tl.float16)) + place, value.to(tl.float16))


def look(flag: Any) -> Any:
    return tl.load(flag)


FLAGS = SimpleNamespace(look=triton.jit(look))


def waiting(x: Any, o: Any, B: tl.constexpr) -> None:
    """One program waits for the next one, which nobody sees who reads it."""
    if tl.program_id(0) == 1:
        tl.store(o + 1, 1.0)
    else:
        tl.store(o, 0.0)
        while FLAGS.look(o + 1) != 1.0:
            pass
        tl.store(x + tl.arange(0, B), 2.0)


def chosen_from_two(x: Any, o: Any, B: tl.constexpr) -> None:
    """Pointers into two arrays in one block: addresses decide."""
    place = tl.program_id(0) * B + tl.arange(0, B)
    there = tl.where(tl.load(x + place) > 0, x + place, o + place)
    tl.store(o + 2 * B + place, tl.load(there))


@pytest.mark.parametrize(
    "kernel",
    [half_over_half, shifted, all_to_one_place, counted, looked_at, waiting, chosen_from_two],
)
def test_launches_whose_programs_look_at_each_other_are_simulated(kernel: Any) -> None:
    assert check_equal(kernel, 2, [floats(256), floats(256)], [], B=64) == 0


def asserting(x: Any, o: Any, B: tl.constexpr) -> None:
    place = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + place)
    tl.store(o + place, value)
    tl.device_assert(tl.max(value) < 100)


def test_what_fails_by_its_data_fails_as_it_does_without_images() -> None:
    """On rank 2 alone: all are simulated, as if nothing had been tried."""

    def spoil(torch: Any, rank: int, arrays: list[Any]) -> None:
        torch.launch(stream_kernel, 2, arrays[0], arrays[0], arrays[0], 128, 1e6 * (rank == 2),
                     SCALES=True, ADDS=False, BLOCK=64, BLOCKS=1)  # fmt: skip

    makers = [floats(256), floats(256)]
    for replicas in (True, False):
        with pytest.raises(BaseException, match=r"device_assert failed") as caught:
            ran(asserting, 2, makers, [], {"B": 64}, replicas=replicas, before=spoil)
        assert "rank 2" in str(caught.value)


def launched_on_lent_memory(
    *, replicas: bool, shared: bool, awaits: bool = False, twice: bool = False
) -> tuple[GraphEngine, Arrays]:
    """Launch a kernel that works in place on each SIP, on memory of the host."""
    engine = GraphEngine("default")
    engine.replicas.are_allowed = replicas
    arrays = [np.arange(256, dtype=np.float32)]
    arrays = arrays * RANKS if shared else [arrays[0] * sip for sip in range(RANKS)]
    if awaits:
        engine.watchpoints.watch_everything(Future(engine.simulator, "a signal"))
    for sip, array in enumerate(arrays):
        mapped = [engine.map_host(sip, array.view(np.uint8)) for _ in range(1 + twice)]
        pointers = [DevicePointer(memory.start, "float32", 256) for memory in mapped]
        numbers = pointers[0], pointers[0], pointers[-1], 256, 2.0
        meta = {"SCALES": True, "ADDS": False, "BLOCK": 64, "BLOCKS": 1}
        engine.submit(
            KernelLaunch(
                sip=sip, runner=KernelRunner(meta), kernel_fn=stream_kernel, kernel_args=numbers,
                num_programs=4,
            )
        )  # fmt: skip
    engine.run()
    return engine, arrays


@pytest.mark.parametrize("shared", [True, False])
def test_launches_on_the_same_memory_of_the_host_are_simulated(shared: bool) -> None:
    (engine, here), (other, there) = (
        launched_on_lent_memory(replicas=replicas, shared=shared) for replicas in (True, False)
    )

    assert engine.replicas.count == (0 if shared else RANKS - 1)
    assert engine.now == other.now
    np.testing.assert_array_equal(here, there)


def test_launches_that_have_the_same_memory_in_two_places_are_simulated() -> None:
    """By their addresses no program uses what another one has stored."""
    engine, _ = launched_on_lent_memory(replicas=True, shared=False, twice=True)

    assert engine.replicas.count == 0


def test_launches_while_somebody_waits_for_memory_to_change_are_simulated() -> None:
    """Who is woken by a store sees what it has stored, and not what will be stored later."""
    engine, _ = launched_on_lent_memory(replicas=True, shared=False, awaits=True)

    assert engine.replicas.count == 0
