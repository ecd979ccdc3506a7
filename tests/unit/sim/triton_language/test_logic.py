"""`and`, `or` and `not` of blocks are operations of each element; a variable holds tensors."""

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


def test_a_chain_of_comparisons_is_one_of_each_element() -> None:
    @triton.jit
    def kernel(out_ptr: Any, BLOCK: tl.constexpr) -> None:
        i = tl.arange(0, BLOCK)
        program = tl.program_id(0)
        if -1 < program < 1 and not 2 < BLOCK < 4:
            tl.store(out_ptr + i, 1, mask=2 < i + program <= 4 != BLOCK)
        tl.store(out_ptr + i, 7, mask=BLOCK < 0 < tl.load(out_ptr + 1_000_000))

    assert stored(kernel) == [0, 0, 0, 1, 1, 0, 0, 0]


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


def types_of(capsys: Any, kernel: Any, dtype: Any) -> list[str]:
    """What the kernel prints: types of products with a block of a type."""
    kernel[(1,)](np.ones(8, dtype), C=2)
    printed: str = capsys.readouterr().out
    return printed.split()


def test_a_number_in_a_variable_is_a_tensor_of_its_own_type(capsys: Any) -> None:
    @triton.jit
    def kernel(x_ptr: Any, C: tl.constexpr) -> None:
        x = tl.load(x_ptr + tl.arange(0, 8))
        scale, (count, flag) = 0.1, (C, True)
        scale += 1
        half: tl.constexpr | float = 0.5
        later: tl.constexpr | float
        later = 0.5
        tl.static_print((x * 0.1).dtype, (x * scale).dtype, (x * half).dtype, (x * later).dtype)
        tl.static_print((x * C).dtype, (x * count).dtype, (x + flag).dtype, count.to(tl.int8).dtype)

    assert types_of(capsys, kernel, np.float16) == [
        "fp16", "fp32", "fp16", "fp16", "fp16", "fp16", "fp16", "int8",
    ]  # fmt: skip
    assert types_of(capsys, kernel, np.int8) == [
        "fp32", "fp32", "fp32", "fp32", "int8", "int32", "int8", "int8",
    ]  # fmt: skip


def test_a_number_in_a_variable_is_calculated_with_as_a_tensor() -> None:
    @triton.jit
    def kernel(out_ptr: Any, BLOCK: tl.constexpr) -> None:
        seed, below = 12345, -7
        for _ in range(5):
            seed = seed * 1103515245 + 12345
        tl.store(out_ptr, seed)
        tl.store(out_ptr + 1, below // 2)
        tl.store(out_ptr + 2, -7 // 2)

    assert stored(kernel, 3) == [-1038148470, -3, -4]


def test_a_named_expression_leaves_the_rest_of_a_kernel_as_it_is_meant(capsys: Any) -> None:
    @triton.jit
    def kernel(x_ptr: Any, C: tl.constexpr) -> None:
        x = tl.load(x_ptr + (at := tl.arange(0, 8)))
        scale = 0.1 + (more := 0.2)
        tl.static_print((x * scale).dtype, (x * more).dtype, at.dtype)

    assert types_of(capsys, kernel, np.float16) == ["fp32", "fp32", "int32"]


@pytest.mark.parametrize("use", ["arange", "static_range", "next_power_of_2"])
def test_what_has_to_be_known_at_compile_time_asks_for_the_annotation(use: str) -> None:
    @triton.jit
    def kernel(out_ptr: Any, BLOCK: tl.constexpr, USE: tl.constexpr) -> None:
        size: Any = BLOCK
        if USE == "arange":
            tl.arange(0, size)
        elif USE == "static_range":
            tl.static_range(size)
        else:
            triton.next_power_of_2(size)

    with pytest.raises(triton.KernelTypeError, match=rf"{use} needs what is known at compile time"):
        kernel[(1,)](np.zeros(8, np.int32), BLOCK=8, USE=use)
