"""What a kernel does wrong is reported with kernel, line, program and what to do."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl
from rankwise.base.errors import LocalProtocolError


@triton.jit
def unmasked_copy(x: Any, o: Any, B: tl.constexpr) -> None:
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i))


@pytest.mark.parametrize("block", [16, 1024])
def test_a_load_beyond_the_end_names_kernel_line_program_address_and_buffer(block: int) -> None:
    x = np.zeros(3 * block - 3, np.float32)

    with pytest.raises(triton.OutOfBounds) as caught:
        unmasked_copy[(3,)](x, np.zeros(3 * block, np.float32), B=block)

    message = str(caught.value)
    assert 'kernel "unmasked_copy" (' in message
    line = unmasked_copy.fn.__code__.co_firstlineno + 3
    assert f"test_errors.py:{line})" in message
    assert "program (2, 0, 0)" in message
    assert f"load of element {x.size}, at [{block - 3}] of the block, is outside of" in message
    assert f'"x", which has {x.size} elements of fp32' in message


def test_a_store_beyond_the_end_is_refused_and_nothing_of_it_is_written() -> None:
    out = np.zeros(40, np.float32)

    with pytest.raises(triton.OutOfBounds, match=r'store of element 40.* outside of buffer "o"'):
        unmasked_copy[(3,)](np.ones(48, np.float32), out, B=16)

    assert not out[32:].any()


def test_an_element_before_the_beginning_is_out_of_bounds_too() -> None:
    @triton.jit
    def kernel(x: Any, o: Any, B: tl.constexpr) -> None:
        tl.store(o + tl.arange(0, B), tl.load(x + tl.arange(0, B) - 1))

    with pytest.raises(triton.OutOfBounds, match="load of element -1"):
        kernel[(1,)](np.zeros(16, np.int8), np.zeros(16, np.int8), B=8)


def test_an_out_of_bounds_gather_names_the_element() -> None:
    @triton.jit
    def kernel(x: Any, index: Any, o: Any, B: tl.constexpr) -> None:
        i = tl.arange(0, B)
        tl.store(o + i, tl.load(x + tl.load(index + i)))

    index = np.array([0, 3, 99, 1], np.int32)

    with pytest.raises(triton.OutOfBounds, match=r"element 99.*at \[2\] of the block"):
        kernel[(1,)](np.zeros(8, np.float32), index, np.zeros(4, np.float32), B=4)


def shapes_that_do_not_fit(x: Any) -> None:
    tl.load(x + tl.arange(0, 8)) + tl.load(x + tl.arange(0, 16))


def inner_sizes_that_differ(x: Any) -> None:
    tl.dot(tl.zeros((16, 32), tl.float16), tl.zeros((16, 16), tl.float16))


def a_dot_of_two_types(x: Any) -> None:
    tl.dot(tl.zeros((16, 16), tl.float16), tl.zeros((16, 16), tl.float32))


def an_exponential_of_an_integer(x: Any) -> None:
    tl.exp(tl.zeros((16,), tl.int32))


def a_load_from_a_number(x: Any) -> None:
    tl.load(tl.program_id(0))


def a_range_of_three(x: Any) -> None:
    tl.arange(0, 3)


def an_index_into_a_block(x: Any) -> None:
    tl.arange(0, 8)[3]


def a_decision_by_a_block(x: Any) -> None:
    if tl.arange(0, 8) > 3:
        pass


def a_range_known_at_run_time_only(x: Any) -> None:
    tl.arange(0, tl.num_programs(0))


def a_division_of_signed_by_unsigned(x: Any) -> None:
    tl.full((8,), 3, tl.int32) // tl.full((8,), 3, tl.uint32)


def a_reshape_that_loses_elements(x: Any) -> None:
    tl.arange(0, 8).reshape(4, 4)


def a_loop_without_step(x: Any) -> None:
    for _i in tl.range(0, 8, 0):
        pass


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (shapes_that_do_not_fit, r"\[8\] and \[16\] do not fit together: axis 0 is 8 long"),
        (inner_sizes_that_differ, "the inner sizes 32 and 16 have to be equal"),
        (a_dot_of_two_types, r"dot of fp16 and fp32.*cast one"),
        (an_exponential_of_an_integer, r"exp is for fp32 and fp64, not int32.*tl.float32"),
        (a_load_from_a_number, "is not a pointer"),
        (a_range_of_three, "power of two"),
        (an_index_into_a_block, "can be subscripted with"),
        (a_decision_by_a_block, "the truth of a block decides nothing"),
        (a_range_known_at_run_time_only, "known at compile time.*tl.constexpr"),
        (a_division_of_signed_by_unsigned, "int32 // uint32 is not defined"),
        (
            a_reshape_that_loses_elements,
            r"8 elements of shape \[8\] cannot be reshaped to \[4, 4\]",
        ),
        (a_loop_without_step, "step 0 never ends"),
    ],
)
def test_a_wrong_type_or_shape_is_refused_in_words(
    function: Callable[..., None], message: str
) -> None:
    with pytest.raises((triton.KernelTypeError, triton.KernelValueError), match=message) as caught:
        triton.jit(function)[(2,)](np.zeros(64, np.float32))

    assert f'kernel "{function.__name__}" ({__file__}:' in str(caught.value)


def test_a_name_that_is_not_emulated_says_so() -> None:
    @triton.jit
    def kernel(x: Any) -> None:
        tl.atomic_poll(x, 1)

    with pytest.raises(triton.Unsupported, match=r"tl\.atomic_poll is not emulated: wait with"):
        kernel[(1,)](np.zeros(4, np.float32))


def test_kernels_can_ask_whether_a_name_is_there() -> None:
    """As they do that run under several versions of Triton."""
    assert not hasattr(tl, "atomic_poll")
    assert getattr(tl, "semantic", None) is None
    assert hasattr(tl, "make_tensor_descriptor")


def test_formats_of_other_devices_can_be_named_and_are_refused_when_used() -> None:
    """Tables of libraries have them beside the others."""

    @triton.jit
    def kernel(x: Any, T: Any) -> None:
        tl.store(x, tl.load(x).to(T))

    by_name = {str(each): each for each in (tl.float8e4nv, tl.float8e4b8, tl.float8e5b16)}

    kernel[(1,)](np.ones(1, np.float32), T=by_name["fp8e4nv"])
    with pytest.raises(triton.Unsupported, match=r"tl\.float8e4b8 is not emulated"):
        kernel[(1,)](np.ones(1, np.float32), T=by_name["fp8e4b8"])


def test_device_assert_names_the_program_and_the_element() -> None:
    @triton.jit
    def kernel(x: Any, B: tl.constexpr) -> None:
        value = tl.load(x + tl.program_id(0) * B + tl.arange(0, B))
        tl.device_assert(value >= 0, "a negative value")

    x = np.ones(64, np.float32)
    x[37] = -1

    with pytest.raises(triton.DeviceAssertion, match=r"\(2, 0, 0\), at \[5\] .*: a negative value"):
        kernel[(4,)](x, B=16)


def test_a_kernel_that_is_called_without_a_launch_says_how_to_launch_it() -> None:
    with pytest.raises(LocalProtocolError, match=r"unmasked_copy\[grid\]"):
        unmasked_copy(1, 2, 3)


def test_an_operation_outside_a_kernel_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="outside a kernel"):
        tl.arange(0, 8)


def test_a_read_only_array_is_not_written() -> None:
    out = np.zeros(16, np.float32)
    out.flags.writeable = False

    with pytest.raises(triton.KernelTypeError, match='buffer "o" is read-only'):
        unmasked_copy[(1,)](np.ones(16, np.float32), out, B=16)


def test_an_argument_that_is_no_array_is_named() -> None:
    with pytest.raises(LocalProtocolError, match="argument 'x' of a kernel is a dict"):
        unmasked_copy[(1,)]({}, np.zeros(16, np.float32), B=16)


def test_missing_and_unknown_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="kernel unmasked_copy: missing a required argument: 'B'"):
        unmasked_copy[(1,)](np.zeros(1), np.zeros(1))
    with pytest.raises(TypeError, match="unexpected keyword argument 'C'"):
        unmasked_copy[(1,)](np.zeros(1), np.zeros(1), B=1, C=2)


def test_a_wrong_name_in_a_kernel_is_told_with_kernel_and_line() -> None:
    @triton.jit
    def doubled(x: Any) -> Any:
        return x * facto  # type: ignore[name-defined]  # noqa: F821

    @triton.jit
    def kernel(o: Any, B: tl.constexpr) -> None:
        tl.store(o + tl.arange(0, B), doubled(tl.arange(0, B)))

    with pytest.raises(NameError) as caught:
        kernel[(1,)](np.zeros(8, np.int32), B=8)

    place = f"{__file__}:{doubled.fn.__code__.co_firstlineno + 2}"
    assert str(caught.value) == f'kernel "kernel" ({place}): name {"facto"!r} is not defined'


def test_what_fails_in_a_function_that_a_kernel_calls_keeps_its_own_words() -> None:
    @triton.constexpr_function
    def choose(number: int) -> int:
        raise ValueError(f"no tile for {number}")

    @triton.jit
    def kernel(o: Any, B: tl.constexpr) -> None:
        tl.store(o + tl.arange(0, B), choose(B))

    with pytest.raises(ValueError, match=r"^no tile for 8$"):
        kernel[(1,)](np.zeros(8, np.int32), B=8)


@pytest.mark.parametrize("warps", [3, 0, -4, 2.0, None])
def test_a_number_of_warps_that_is_no_power_of_two_is_refused_as_by_triton(warps: Any) -> None:
    out = np.zeros(16, np.float32)

    with pytest.raises(TypeError, match=rf"num_warps is {warps}, expected a power of two"):
        unmasked_copy[(1,)](np.ones(16, np.float32), out, B=16, num_warps=warps)

    assert not out.any()
    unmasked_copy[(1,)](np.ones(16, np.float32), out, B=16, num_warps=tl.constexpr(8))
    assert out.all()
