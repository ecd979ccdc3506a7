"""The type of what comes of two operands, as torch has it.

Types are of three categories: truth values, whole numbers, fractions. A tensor with dimensions says
what comes of it and a tensor without, or a Python number, unless that one is of a higher category.
Between equals the wider type is taken, and f32 where f16 and bf16 meet.
"""

from typing import Any

from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.dtypes import dtype


def category_of(kind: dtype) -> int:
    """0 for truth values, 1 for whole numbers, 2 for fractions."""
    return 0 if kind.is_bool() else 1 if kind.is_int() else 2


def common_kind(left: dtype, right: dtype) -> dtype:
    """The type of what comes of two tensors.

    Raises:
        TypeError: there is none, so that one of them has to be converted first.
    """
    if left == right:
        return left
    low, high = sorted((left, right), key=category_of)
    if category_of(low) < category_of(high):
        return high
    narrow, wide = sorted((left, right), key=lambda kind: kind.primitive_bitwidth)
    if narrow.is_floating():
        if not narrow.is_fp8():
            is_tie = narrow.primitive_bitwidth == wide.primitive_bitwidth
            return t.float32 if is_tie else wide
    elif narrow.is_int_unsigned() == wide.is_int_unsigned():
        return wide
    elif {narrow.name, wide.name} == {"int8", "uint8"}:
        return t.int16
    elif narrow.name == "uint8":
        return wide
    raise TypeError(
        f"{left.name} and {right.name} have no common type: convert one of them first, with"
        " to(dtype)"
    )


def kind_with_number(kind: dtype, number: Any) -> dtype:
    """The type of what comes of a tensor and a Python number."""
    category = 0 if isinstance(number, bool) else 1 if isinstance(number, int) else 2
    if category <= category_of(kind):
        return kind
    return t.float32 if category == 2 else t.int64


def working_kind(kind: dtype) -> dtype:
    """What it is calculated in: narrow fractions in f32, to be rounded once."""
    return t.float32 if kind.is_floating() and kind.primitive_bitwidth < 32 else kind


def fraction_kind(kind: dtype) -> dtype:
    """The type of a quotient, a root or the like of it."""
    return kind if kind.is_floating() else t.float32


def sum_kind(kind: dtype) -> dtype:
    """The type of a sum of it."""
    return kind if kind.is_floating() else t.int64
