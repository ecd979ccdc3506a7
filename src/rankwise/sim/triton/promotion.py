"""Promotion: which type two operands are combined in, and numbers as tensors.

A Python number takes the type of the tensor it meets unless it is of a greater kind (bool < integer
< float). Between tensors: the wider type, fp16 before bf16, and fp32 where the two halves meet;
division of floats narrower than 32 bits is done in fp32.
"""

from functools import cache
from typing import Any

import numpy as np

from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.dtypes import Array, dtype
from rankwise.sim.triton.execution import KernelTypeError, KernelValueError, place
from rankwise.sim.triton.rounding import rounded_to_odd
from rankwise.sim.triton.tensor import scalar, tensor

_FLOAT32_SMALLEST, _FLOAT32_LARGEST = (
    float(each) for each in (np.finfo(np.float32).tiny, np.finfo(np.float32).max)
)
_DIVISIONS = frozenset({"/", "//", "%"})


def number_type(value: Any) -> dtype:
    """The type that a Python number has by itself."""
    if isinstance(value, (bool, np.bool_)):
        return t.int1
    if isinstance(value, (int, np.integer)):
        if -(2**31) <= value < 2**31:
            return t.int32
        if 2**31 <= value < 2**32:
            return t.uint32
        if -(2**63) <= value < 2**63:
            return t.int64
        if value < 2**64:
            return t.uint64
        raise KernelValueError(f"{place()}: the integer {value} does not fit into 64 bits")
    if isinstance(value, (float, np.floating)):
        magnitude = abs(float(value))
        if magnitude == 0 or not np.isfinite(magnitude):
            return t.float32
        is_single = _FLOAT32_SMALLEST <= magnitude <= _FLOAT32_LARGEST
        return t.float32 if is_single else t.float64
    raise KernelTypeError(
        f"{place()}: {value!r} ({type(value).__name__}) is not a value of the kernel language"
    )


def to_tensor(x: Any) -> tensor:
    """A number as a tensor of its own type; a tensor as it is."""
    value = plain(x)
    if isinstance(value, tensor):
        return value
    return scalar(value, number_type(value))


@cache
def common_type(left: dtype, right: dtype, *, divides: bool) -> dtype | None:
    """The type in which two tensors are combined; None if there is none."""
    if left.is_fp64() or right.is_fp64():
        return t.float64
    if left.is_floating() or right.is_floating():
        return _common_float(left, right, divides=divides)
    if not (left.is_int() and right.is_int()):
        return None
    if divides and left.int_signedness is not right.int_signedness:
        return None
    wide, narrow = (
        (left, right) if left.primitive_bitwidth >= right.primitive_bitwidth else (right, left)
    )
    if wide.primitive_bitwidth > narrow.primitive_bitwidth:
        return wide
    return wide if wide.is_int_unsigned() else narrow


def _common_float(left: dtype, right: dtype, *, divides: bool) -> dtype:
    if divides or left.is_fp32() or right.is_fp32():
        return t.float32
    if left.is_fp16() or right.is_fp16():
        return t.float16
    if left.is_bf16() and right.is_bf16():
        return t.bfloat16
    if left.is_bf16() or right.is_bf16():
        return t.float32
    if left.is_fp8() and right.is_fp8():
        return left if left == right else t.float16
    return left if left.is_fp8() else right


def converted(values: Array, source: dtype, target: dtype) -> Array:
    """Values of one numeric type as values of another."""
    if source is target or source == target:
        return values
    if target.is_bool():
        truth: Array = values != 0
        return truth
    if target.is_floating():
        if target.is_narrow:
            values = rounded_to_odd(values, target)
        in_compute: Array = values.astype(target.compute, copy=False)
        return in_compute if _holds(target, source) else target.rounded(in_compute)
    whole: Array = values.astype(target.compute)
    return whole


def _holds(wide: dtype, narrow: dtype) -> bool:
    """Whether a floating-point type has every value of another, so that nothing is rounded."""
    return not wide.is_narrow or (narrow.is_fp8() and wide.is_standard_floating())


def combined(left: Any, right: Any, operation: str) -> tuple[tensor, tensor, dtype]:
    """Both operands as tensors, and the type in which they are to be combined."""
    left, right = plain(left), plain(right)
    if isinstance(left, tensor) and isinstance(right, tensor):
        type_ = common_type(left.dtype, right.dtype, divides=operation in _DIVISIONS)
        if type_ is None:
            raise KernelTypeError(
                f"{place()}: {left.dtype} {operation} {right.dtype} is not defined"
                + (": cast one to the other's sign" if operation in _DIVISIONS else "")
            )
        return left, right, type_
    if isinstance(left, tensor):
        type_ = _type_with_number(left.dtype, right, operation)
        return left, scalar(fitting(right, type_), type_), type_
    type_ = _type_with_number(right.dtype, left, operation)
    return scalar(fitting(left, type_), type_), right, type_


def _type_with_number(block: dtype, number: Any, operation: str) -> dtype:
    own = number_type(number)
    if block.is_ptr():
        raise KernelTypeError(f"{place()}: {block!r} {operation} {number!r} is not defined")
    if own.kind().value <= block.kind().value:
        own = block
    type_ = common_type(block, own, divides=operation in _DIVISIONS)
    if type_ is None:
        raise KernelTypeError(f"{place()}: {block} {operation} {number!r} is not defined")
    return type_


def fitting(number: Any, type_: dtype) -> Any:
    """A number as a value of a type; an error if it is none."""
    if type_.is_int() and not isinstance(number, bool) and isinstance(number, int):
        low, high = type_.limits()
        if not low <= number <= high:
            raise KernelValueError(
                f"{place()}: {number} is outside the range of {type_}, {low} to {high}",
                hint="cast the tensor to a wider type first",
            )
    if type_.is_narrow:
        return type_.rounded(np.array([number], dtype=type_.compute))[0]
    return number
