"""`and`, `or` and `not` of blocks are operations of each element."""

from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl


def stored(kernel: Any, size: int = 8) -> list[int]:
    out = np.zeros(size, np.int32)
    kernel[(1,)](out, BLOCK=size)
    return out.tolist()


def test_masks_are_combined_by_words() -> None:
    @triton.jit
    def kernel(out_ptr: Any, BLOCK: tl.constexpr) -> None:
        i = tl.arange(0, BLOCK)
        tl.store(out_ptr + i, 1, mask=(i > 1 and i < 6 and not (i > 2 and i < 4)) or i == 7)

    assert stored(kernel) == [0, 0, 1, 0, 1, 1, 0, 1]


def test_what_is_known_at_compile_time_decides_as_in_python() -> None:
    @triton.jit
    def kernel(out_ptr: Any, BLOCK: tl.constexpr, GIVEN: tl.constexpr | None = None) -> None:
        i = tl.arange(0, BLOCK)
        bound = GIVEN or 3
        tl.store(out_ptr + i, 1, mask=BLOCK > 4 and i < bound)

    assert stored(kernel) == [1, 1, 1, 0, 0, 0, 0, 0]
    assert stored(kernel, 4) == [0, 0, 0, 0]


def test_conditions_of_single_numbers_stay_conditions() -> None:
    @triton.jit
    def kernel(out_ptr: Any, BLOCK: tl.constexpr) -> None:
        i = tl.arange(0, BLOCK)
        first = tl.load(out_ptr)
        if first == 0 and not first > 0:
            tl.store(out_ptr + i, 5)

    assert stored(kernel, 2) == [5, 5]


def test_a_closure_and_defaults_survive() -> None:
    limit, value = 3, 9

    @triton.jit
    def kernel(out_ptr: Any, BLOCK: tl.constexpr, *, low: Any = 1) -> None:
        i = tl.arange(0, BLOCK)
        tl.store(out_ptr + i, value, mask=i >= low and i < limit)

    assert stored(kernel, 4) == [0, 9, 9, 0]


def test_an_error_still_names_the_line() -> None:
    @triton.jit
    def kernel(out_ptr: Any, BLOCK: tl.constexpr) -> None:
        i = tl.arange(0, BLOCK)
        wide = i >= 0 or i < 0
        tl.store(out_ptr + i + 1, 1, mask=wide)

    line = kernel.fn.__code__.co_firstlineno + 4
    with pytest.raises(triton.OutOfBounds, match=rf"test_logic\.py:{line}\)"):
        stored(kernel)


def test_a_shape_equals_a_list_of_its_sizes() -> None:
    @triton.jit
    def kernel(out_ptr: Any, BLOCK: tl.constexpr) -> None:
        i: Any = tl.arange(0, BLOCK)
        tl.static_assert(i[None, :].shape == [1, BLOCK])
        if i.shape == [BLOCK] and i.shape != [BLOCK + 1]:
            tl.store(out_ptr + i, [tl.constexpr(BLOCK)] == i.shape)
            tl.store(out_ptr + i, 4, mask=i < 2)

    assert stored(kernel, 4) == [4, 4, 1, 1]


def test_an_assertion_of_a_block_holds_for_each_element() -> None:
    @triton.jit
    def kernel(out_ptr: Any, BLOCK: tl.constexpr, LIMIT: tl.constexpr) -> None:
        i = tl.arange(0, BLOCK)
        assert i < LIMIT, "too many"
        tl.store(out_ptr + i, LIMIT.value)

    out = np.zeros(4, np.int32)

    kernel[(1,)](out, BLOCK=4, LIMIT=4)
    with pytest.raises(triton.DeviceAssertion, match=r"at \[3\] of the block: .* too many"):
        kernel[(1,)](out, BLOCK=4, LIMIT=3)

    assert out.tolist() == [4, 4, 4, 4]
