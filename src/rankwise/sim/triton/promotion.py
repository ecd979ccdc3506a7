"""Promotion: which type two operands are combined in.

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
from rankwise.sim.triton.tensor import number_type, scalar, tensor

_DIVISIONS = frozenset({"/", "//", "%"})


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
