"""Atomics whose programs and elements meet at the same words, on a simulated machine."""

from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton.language as tl
from rankwise.sim import GraphEngine, RuntimeContext, triton

N = 256


@triton.jit
def count(o: Any, data: Any, block: tl.constexpr) -> None:
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.atomic_add(o + tl.load(data + i), 1)


@triton.jit
def count_wrapped(o: Any, data: Any, block: tl.constexpr) -> None:
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.atomic_add(o + i % 16, 1)


@triton.jit
def count_folded(o: Any, data: Any, block: tl.constexpr) -> None:
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.atomic_add(o + i // 16, 1, mask=i < 200)


@triton.jit
def count_all(o: Any, data: Any, block: tl.constexpr) -> None:
    tl.atomic_add(o + tl.zeros((block,), tl.int32), 1)


@triton.jit
def largest(o: Any, data: Any, block: tl.constexpr) -> None:
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.atomic_max(o + i % 4, i)


@triton.jit
def swap_all(o: Any, data: Any, block: tl.constexpr) -> None:
    tl.atomic_cas(o + tl.arange(0, block) // block, 0, 1)


KERNELS = (count, count_wrapped, count_folded, count_all, largest, swap_all)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_the_machine_counts_as_the_emulator_does(kernel: Any) -> None:
    data = np.random.default_rng(3).integers(0, 16, N).astype(np.int32)
    emulated = np.zeros(16, np.int32)
    kernel[4,](emulated, data, block=N // 4)
    ctx = RuntimeContext(GraphEngine("default"), ccl={})
    o = ctx.zeros(16, dtype="i32")

    kernel[4,](o, ctx.from_numpy(data), block=N // 4)

    assert emulated.any()
    np.testing.assert_array_equal(o.numpy(), emulated)


@triton.jit
def add_far_apart(o: Any, stride: Any, block: tl.constexpr) -> None:
    tl.atomic_add(o + tl.arange(0, block) * stride, 1)


def test_an_atomic_costs_the_bursts_that_it_touches() -> None:
    def took(kernel: Any, *args: Any, **meta: Any) -> int:
        ctx = RuntimeContext(GraphEngine("default", enable_data=False), ccl={})
        o = ctx.zeros(4096, dtype="i32")
        start = ctx.now
        kernel[1,](o, *args, **meta)
        return ctx.now - start

    side_by_side, apart = (took(add_far_apart, stride, block=256) for stride in (1, 16))
    at_one_word = took(add_far_apart, 0, block=256)

    assert at_one_word <= side_by_side < apart


@triton.jit
def in_turn(x: Any, lock: Any, block: tl.constexpr) -> None:
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    i = tl.arange(0, block)
    tl.store(x + i, tl.load(x + i) + 1)
    tl.atomic_xchg(lock, 0)


@pytest.mark.parametrize("count", [20, 64])
def test_a_lock_that_is_released_while_a_program_looks_at_it_is_seen(count: int) -> None:
    ctx = RuntimeContext(GraphEngine("pod64"), ccl={})
    x, lock = ctx.zeros(64), ctx.zeros(1, dtype="i32")

    in_turn[count,](x, lock, block=64)

    assert x.numpy().tolist() == [float(count)] * 64
