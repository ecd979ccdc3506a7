"""A kernel means the same on every platform, whatever it is given and wherever that lies."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rankwise.sim.triton.language as tl
from rankwise.sim import triton
from rankwise.workers import (
    ArgDirection,
    BadArguments,
    ChipCallable,
    ChipWorker,
    ContinuousTensor,
    Parameter,
    TaskArgs,
)

IN, OUT, INOUT, SCALAR = ArgDirection.IN, ArgDirection.OUT, ArgDirection.INOUT, ArgDirection.SCALAR


@triton.jit
def blend_kernel(  # noqa: PLR0917 (kernels take their arguments in order)
    x: Any, total: Any, out: Any, n: Any, shift: Any, block: tl.constexpr
) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    mask = at < n
    value = tl.load(x + at, mask=mask, other=0)
    value = tl.where(value > shift, value - shift, value + value)
    tl.store(total + at, tl.load(total + at, mask=mask) + value, mask=mask)
    tl.store(out + at, tl.maximum(value, shift), mask=mask)


def blend(
    platform: str, arrays: dict[str, Any], on_chip: set[str], shift: int, block: int
) -> dict[str, Any]:
    """What the arrays hold afterwards; those named in `on_chip` lie in the chip's memory."""
    count = arrays["x"].size
    callable_ = ChipCallable.build(
        [IN, INOUT, OUT, Parameter.of(SCALAR, "n", "int32"), Parameter.of(SCALAR, "s", "int64")],
        "blend",
        blend_kernel,
        grid=-(-count // block),
        meta={"block": block},
    )
    worker = ChipWorker()
    worker.init(platform)
    worker.set_device(0)
    held = {name: array.copy() for name, array in arrays.items()}
    args = TaskArgs()
    pointers: dict[str, int] = {}
    for name, array in held.items():
        if name in on_chip:
            pointers[name] = worker.malloc(array.nbytes)
            worker.copy_to(pointers[name], array.ctypes.data, array.nbytes)
            kind = array.dtype.name
            args.add_tensor(ContinuousTensor.make(pointers[name], (count,), kind, True))  # noqa: FBT003
        else:
            args.add_tensor(array)
    args.add_scalar(count)
    args.add_scalar(shift)

    worker.run(callable_, args)

    for name, pointer in pointers.items():
        worker.copy_from(held[name].ctypes.data, pointer, held[name].nbytes)
        worker.free(pointer)
    worker.finalize()
    assert worker.leaks == ()
    return held


@settings(max_examples=40)
@given(
    count=st.integers(1, 400),
    kind=st.sampled_from(["float64", "float32", "float16", "int32", "int8"]),
    block=st.sampled_from([16, 64, 256]),
    shift=st.integers(-3, 3),
    on_chip=st.sets(st.sampled_from(["x", "total", "out"])),
    seed=st.integers(0, 1000),
)
def test_a_kernel_gives_on_a_simulated_chip_what_it_gives_on_the_host(
    *, count: int, kind: str, block: int, shift: int, on_chip: set[str], seed: int
) -> None:
    random = np.random.default_rng(seed)
    arrays = {name: random.integers(-8, 8, count).astype(kind) for name in ("x", "total", "out")}
    x = arrays["x"]
    value = np.where(x > shift, x - x.dtype.type(shift), x + x)

    host = blend("host", arrays, set(), shift, block)
    simulated = blend("sim", arrays, on_chip, shift, block)

    for name in arrays:
        np.testing.assert_array_equal(simulated[name], host[name])
    np.testing.assert_array_equal(host["total"], arrays["total"] + value)
    np.testing.assert_array_equal(host["out"], np.maximum(value, x.dtype.type(shift)))
    np.testing.assert_array_equal(host["x"], x)


@triton.jit
def negate_kernel(x: Any, out: Any, n: Any) -> None:
    at = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(out + at, tl.load(x + at, mask=at < n) == 0, mask=at < n)


def test_truth_values_are_the_same_on_a_simulated_chip_and_on_the_host() -> None:
    truths = np.arange(50) % 3 == 0
    callable_ = ChipCallable.build([IN, OUT, SCALAR], "negate", negate_kernel, grid=1)

    for platform in ("host", "sim"):
        worker = ChipWorker()
        worker.init(platform)
        worker.set_device(0)
        out = np.zeros(50, bool)
        args = TaskArgs()
        args.add_tensor(truths)
        args.add_tensor(out)
        args.add_scalar(50)
        worker.run(callable_, args)
        worker.finalize()
        np.testing.assert_array_equal(out, ~truths)


def test_a_type_that_no_kernel_has_is_refused_with_what_to_do() -> None:
    callable_ = ChipCallable.build([Parameter.of(IN, "x")], "negate", negate_kernel, grid=1)
    worker = ChipWorker()
    worker.init("sim")
    worker.set_device(0)
    args = TaskArgs()
    args.add_tensor(np.zeros(3, "complex64"))

    with pytest.raises(BadArguments, match=r"argument 0 \('x'\) .* COMPLEX64, .*platform='host'"):
        worker.run(callable_, args)

    worker.finalize()
