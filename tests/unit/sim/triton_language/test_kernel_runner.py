"""Kernels on the processing elements of a simulated machine."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from greenlet import getcurrent, greenlet

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl
from rankwise.base.errors import Deadlock
from rankwise.sim.hardware.commands import KernelLaunch, MemoryRead, MemoryWrite, MmuMap
from rankwise.sim.hardware.engine import GraphEngine
from rankwise.sim.triton.execution import KernelError
from rankwise.sim.triton.kernel_runner import DevicePointer, KernelRunner


class Device:
    """A machine with arrays in its memory."""

    def __init__(self, **options: Any) -> None:
        self.engine = GraphEngine("default", **options)

    def put(self, array: Any, sip: int = 0) -> DevicePointer:
        address = self.engine.space(sip).reserve(array.nbytes)
        self.engine.wait(self.engine.submit(MmuMap(sip=sip, address=address, size=array.nbytes)))
        write = MemoryWrite(sip=sip, address=address, data=array)
        self.engine.wait(self.engine.submit(write))
        return DevicePointer(address, array.dtype.name, array.size)

    def get(self, pointer: DevicePointer, dtype: Any, sip: int = 0) -> Any:
        assert pointer.elements is not None
        size = pointer.elements * np.dtype(dtype).itemsize
        read = self.engine.submit(MemoryRead(sip=sip, address=pointer.address, size=size))
        return self.engine.wait(read).view(dtype)

    def launch(
        self, kernel: Callable[..., Any], args: Sequence[Any], programs: int, **meta: Any
    ) -> int:
        """Run a kernel; the picoseconds that it took."""
        launch = KernelLaunch(
            sip=0, runner=KernelRunner(meta), kernel_fn=kernel, kernel_args=args,
            num_programs=programs,
        )  # fmt: skip
        handle = self.engine.submit(launch)
        self.engine.wait(handle)
        assert handle.started_at is not None
        assert handle.completed_at is not None
        return handle.completed_at - handle.started_at


def add(x: Any, y: Any, o: Any, n: Any, B: tl.constexpr) -> None:
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


def test_a_plain_function_runs_as_a_kernel_with_real_values_in_simulated_time() -> None:
    device = Device()
    x, y = (np.random.default_rng(5).random(1000, np.float32) for _ in range(2))
    pointers = [device.put(array) for array in (x, y, np.zeros_like(x))]

    took = device.launch(add, [*pointers, 1000], 4, B=256)

    np.testing.assert_array_equal(device.get(pointers[2], np.float32), x + y)
    assert took > 0
    kinds = [each.kind for each in device.engine.op_log._operations]
    assert kinds.count("load") == 8
    assert kinds.count("store") == 4


def test_the_parent_of_kernels_is_the_main_greenlet_even_when_a_rank_takes_the_first_step() -> None:
    runner = KernelRunner()
    main = getcurrent()

    def rank() -> None:
        steps = runner.run(None, add, [], 1)  # type: ignore[arg-type]
        next(steps)
        steps.close()

    greenlet(rank).switch()

    assert runner._parent is main


def test_programs_are_children_of_the_main_greenlet() -> None:
    parents: list[Any] = []

    def kernel(o: Any) -> None:
        parents.append(getcurrent().parent)
        tl.store(o + tl.program_id(0), 1)

    device = Device()
    device.launch(kernel, [device.put(np.zeros(3, np.int32))], 3)

    assert parents == [getcurrent()] * 3


def product(a: Any, b: Any, o: Any, S: tl.constexpr, STEPS: tl.constexpr) -> None:
    row, column = tl.arange(0, S)[:, None], tl.arange(0, S)[None, :]
    at = row * S + column
    acc = tl.zeros((S, S), tl.float32)
    for step in range(STEPS):
        acc = tl.dot(tl.load(a + step * S * S + at), tl.load(b + step * S * S + at), acc)
    tl.store(o + at, acc)


def test_loads_overlap_with_the_products_that_do_not_need_them() -> None:
    device = Device()
    steps, size = 8, 64
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((steps, size, size)).astype(np.float16) for _ in range(2))
    pointers = [device.put(each) for each in (a, b, np.zeros((size, size), np.float32))]

    took = device.launch(product, pointers, 1, S=size, STEPS=steps)

    result = device.get(pointers[2], np.float32).reshape(size, size)
    expected = (a.astype(np.float32) @ b.astype(np.float32)).sum(0)
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)
    parts = device.engine.op_log._operations
    busy = {kind: sum(o.end - o.start for o in parts if o.kind == kind) for kind in ("load", "dot")}
    dots = [o for o in parts if o.kind == "dot"]
    assert len(dots) == steps
    assert dots[0].flops == 2 * size**3
    assert took < busy["load"] + busy["dot"]


def ring_sum(x: Any, o: Any, n: tl.constexpr, B: tl.constexpr) -> None:
    pid = tl.program_id(0)
    block = tl.load(x + pid * B + tl.arange(0, B))
    total = block
    for _hop in range(n - 1):
        tl.send((pid + 1) % n, block)
        block = tl.recv((pid + n - 1) % n, (B,), tl.float32)
        total += block
    tl.store(o + pid * B + tl.arange(0, B), total)


@pytest.mark.parametrize("block", [64, 4096])
def test_programs_send_blocks_around_a_ring_of_queues(block: int) -> None:
    device = Device()
    x = np.random.default_rng(2).random((4, block), np.float32)
    source, target = device.put(x), device.put(np.zeros_like(x))

    device.launch(ring_sum, [source, target], 4, n=4, B=block)

    result = device.get(target, np.float32).reshape(4, block)
    np.testing.assert_allclose(result, np.tile(x.sum(0), (4, 1)), rtol=1e-5)


def handed_over(o: Any, sem: tl.constexpr, masked: tl.constexpr) -> None:
    places = tl.arange(0, 4096)
    if tl.program_id(0) == 0:
        tl.store(o + places, tl.full((4096,), 1.0, tl.float32))
        block = tl.full((4096,), 2.0, tl.float32)
        tl.send(1, block, mask=places < 16 if masked else None, sem=sem)
    else:
        tl.store(o + 4096 + tl.arange(0, 16), tl.sum(tl.recv(0, (4096,), tl.float32), 0))


def arrival(sem: str, *, masked: bool = False) -> int:
    """When the receiver had the block, as its calculation tells."""
    device = Device()
    out = device.put(np.zeros(8192, np.float32))
    device.launch(handed_over, [out], 2, sem=sem, masked=masked)
    return min(each.start for each in device.engine.op_log if each.name.endswith(".sum"))


def test_a_message_waits_for_the_stores_before_it_unless_it_is_relaxed() -> None:
    assert arrival("relaxed") < arrival("release")


def test_a_masked_message_moves_only_what_the_mask_lets_through() -> None:
    assert arrival("relaxed", masked=True) < arrival("relaxed")


def test_a_message_in_an_order_that_there_is_not_is_refused() -> None:
    with pytest.raises(KernelError, match="sem='acquire': it is 'release' or 'relaxed'"):
        arrival("acquire")


def flagged(flag: Any, o: Any) -> None:
    if tl.program_id(0) == 0:
        while tl.atomic_add(flag, 0) == 0:
            pass
        tl.store(o, tl.load(o + 1))
    else:
        tl.store(o + 1, 42)
        tl.atomic_xchg(flag, 1)


def test_a_program_that_spins_sees_the_store_of_another_pe() -> None:
    device = Device()
    flag, out = device.put(np.zeros(1, np.int32)), device.put(np.zeros(2, np.int32))

    device.launch(flagged, [flag, out], 2)

    np.testing.assert_array_equal(device.get(out, np.int32), [42, 42])


def lonely_receiver(o: Any) -> None:
    tl.store(o, tl.sum(tl.recv(1, (16,), tl.float32), 0))


def endless_spinner(o: Any) -> None:
    while tl.atomic_add(o, 0) == 0:
        pass


@pytest.mark.parametrize(
    ("kernel", "awaited"),
    [(lonely_receiver, "slot of queue"), (endless_spinner, "memory to change")],
)
def test_a_kernel_that_waits_for_ever_is_a_deadlock_with_its_line(
    kernel: Callable[..., None], awaited: str
) -> None:
    device = Device()
    out = device.put(np.zeros(2, np.float32))

    with pytest.raises(Deadlock) as caught:
        device.launch(kernel, [out], 2)

    mine = [each for each in caught.value.waiting if kernel.__name__ in each.who]
    assert mine
    assert awaited in mine[0].what
    assert "test_kernel_runner.py" in mine[0].where


def flag_that_stays_set(flag: Any, o: Any) -> None:
    for _turn in range(4):
        while tl.atomic_cas(flag, 1, 1) != 1:
            pass
    tl.store(o, 7)


@triton.jit
def wait_for_flag(flag: Any) -> None:
    while tl.load(flag, volatile=True) == 0:
        pass


def the_same_wait_from_two_places(flag: Any, o: Any) -> None:
    wait_for_flag(flag)
    wait_for_flag(flag)
    tl.store(o, 7)


def counter_that_the_looker_turns(flag: Any, o: Any) -> None:
    if tl.program_id(0) == 0:
        while tl.atomic_add(flag + 1, 0) < 5:
            pass
        tl.atomic_xchg(flag + 2, 1)
    else:
        while tl.atomic_add(flag + 2, 0) == 0:
            tl.atomic_add(flag + 1, 1)
        tl.store(o, 7)


def scale_that_is_loaded_in_each_step(flag: Any, o: Any) -> None:
    total: Any = 0
    for _step in range(1100):
        total += tl.load(flag)
    tl.store(o, total - 1093)


def tries_no_more_than_so_often(flag: Any, o: Any) -> None:
    tries: Any = 0
    while tl.atomic_add(flag + 1, 0) == 0 and tries < 1100:
        tries += 1
    tl.store(o, tries - 1093)


def stores_between_looks(flag: Any, o: Any) -> None:
    while tl.load(o) < 7:
        if tl.load(flag, volatile=True) == 1:
            tl.store(o, tl.load(o) + 1)


@pytest.mark.parametrize(
    "kernel",
    [
        flag_that_stays_set,
        the_same_wait_from_two_places,
        counter_that_the_looker_turns,
        scale_that_is_loaded_in_each_step,
        tries_no_more_than_so_often,
        stores_between_looks,
    ],
)
def test_a_program_that_sees_the_same_again_and_does_other_work_does_not_wait(
    kernel: Callable[..., None],
) -> None:
    device = Device()
    flag, out = device.put(np.array([1, 0, 0], np.int32)), device.put(np.zeros(1, np.int32))

    device.launch(kernel, [flag, out], 2 if kernel is counter_that_the_looker_turns else 1)

    assert device.get(out, np.int32) == [7]


def spinner_that_counts(flag: Any) -> None:
    tries = 0
    while tl.atomic_cas(flag, 1, 1) != 1:
        tries += 1


def spinner_at_two_words(flag: Any) -> None:
    while tl.atomic_add(flag, 0) + tl.atomic_add(flag + 1, 0) != 2:
        pass


def spinner_that_stores_the_same(flag: Any) -> None:
    while tl.load(flag, volatile=True) == 0:
        tl.store(flag + 1, 5)


@pytest.mark.parametrize(
    "kernel", [spinner_that_counts, spinner_at_two_words, spinner_that_stores_the_same]
)
def test_a_program_that_only_looks_again_and_again_is_a_deadlock(
    kernel: Callable[..., None],
) -> None:
    device = Device()

    with pytest.raises(Deadlock, match="memory to change: flag"):
        device.launch(kernel, [device.put(np.zeros(2, np.int32))], 1)


def test_an_error_of_one_program_ends_the_launch_and_names_the_program() -> None:
    device = Device()
    pointers = [device.put(np.zeros(size, np.float32)) for size in (64, 64, 40)]

    with pytest.raises(triton.OutOfBounds, match=r"program \(2, 0, 0\): store of element 40"):
        device.launch(add, [*pointers, 64], 4, B=16)


def test_without_data_the_time_is_the_same_and_nothing_is_calculated() -> None:
    took = []
    for enable_data in (True, False):
        device = Device(enable_data=enable_data)
        pointers = [device.put(np.zeros(each, np.float16)) for each in (4096 * 4, 4096 * 4)]
        pointers.append(device.put(np.zeros(4096, np.float32)))
        took.append(device.launch(product, pointers, 1, S=64, STEPS=4))

    assert took[0] == took[1]


def test_two_runs_write_the_same_log() -> None:
    logs = []
    for _run in range(2):
        device = Device()
        x = np.arange(256, dtype=np.float32)
        device.launch(ring_sum, [device.put(x), device.put(x)], 4, n=4, B=64)
        logs.append(device.engine.op_log.encode())

    assert logs[0] == logs[1]
