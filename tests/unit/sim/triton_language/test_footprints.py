"""What memory moves for an access of a kernel: whole bursts."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rankwise.sim.triton.language as tl
from rankwise.sim.hardware.commands import KernelLaunch, MmuMap
from rankwise.sim.hardware.engine import GraphEngine
from rankwise.sim.triton.access import footprint_of
from rankwise.sim.triton.affine import Affine
from rankwise.sim.triton.dtypes import dtype_named
from rankwise.sim.triton.kernel_runner import DevicePointer, KernelRunner
from rankwise.sim.triton.memory import (
    Access,
    AccessTarget,
    Buffer,
    resolve_pattern,
    resolve_scattered,
)

F32 = dtype_named("float32")


def target(address: int, shape: tuple[int, ...]) -> AccessTarget:
    return AccessTarget("load", Buffer("x", np.zeros(4_096, np.float32), F32, address), F32, shape)


def moved_bytes(aim: AccessTarget, access: Access, burst: int) -> int:
    lowest, footprint = footprint_of(aim, access)
    begins, ends = footprint.bursts(lowest, burst)
    return int((ends - begins).sum())


@given(
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.integers(-40, 40), st.integers(-40, 40)),
    st.integers(0, 40),
    st.sampled_from([4, 16, 64, 100]),
)
def test_every_burst_that_an_access_touches_is_moved_once(
    shape: tuple[int, int], strides: tuple[int, int], start: int, burst: int
) -> None:
    pattern = Affine(np.array([1_000 + start]), strides)
    index = pattern.values(shape)
    aim = target(0x1_0004, shape)
    touched = {
        byte // burst for element in index.reshape(-1) for byte in range(
            0x1_0004 + 4 * int(element), 0x1_0008 + 4 * int(element)
        )
    }  # fmt: skip

    strided = resolve_pattern(aim, pattern, None)
    scattered = resolve_scattered(aim, index, None)

    assert strided is not None
    assert moved_bytes(aim, strided, burst) == burst * len(touched)
    assert moved_bytes(aim, scattered, burst) == burst * len(touched)


def test_masked_elements_are_not_moved() -> None:
    aim = target(0, (4,))
    index, mask = np.array([[0, 100, 200, 300]]), np.array([[True, False, True, False]])

    assert moved_bytes(aim, resolve_scattered(aim, index, mask), 64) == 2 * 64


def copies(x: Any, o: Any, stride: tl.constexpr) -> None:
    i = tl.arange(0, 256)
    tl.store(o + i, tl.load(x + i * stride))


def took(stride: int, *, enable_data: bool) -> tuple[int, int]:
    """Picoseconds of the load, and the bytes that the log says it was of."""
    engine = GraphEngine("default", enable_data)
    pointers = []
    for elements in (256 * 64, 256):
        address = engine.space(0).reserve(4 * elements)
        engine.wait(engine.submit(MmuMap(sip=0, address=address, size=4 * elements)))
        pointers.append(DevicePointer(address, "float32", elements))
    runner = KernelRunner({"stride": stride})
    launch = KernelLaunch(
        sip=0, runner=runner, kernel_fn=copies, kernel_args=pointers, num_programs=1
    )
    engine.wait(engine.submit(launch))
    (load,) = (each for each in engine.op_log if each.kind == "load")
    return load.end - load.start, load.bytes


@pytest.mark.parametrize("enable_data", [True, False])
def test_a_strided_load_takes_longer_by_the_bursts_that_it_wastes(enable_data: bool) -> None:
    (row, asked), (pair, _), (column, also_asked), (far, _) = (
        took(stride, enable_data=enable_data) for stride in (1, 2, 16, 64)
    )

    assert asked == also_asked == 1_024
    per_kilobyte = pair - row
    assert column - row == pytest.approx(15 * per_kilobyte, rel=0.01)
    assert far == column
