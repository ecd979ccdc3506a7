"""Mathematical functions of elements, and the matrix product."""

import math as _math
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np

from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.arithmetic import absolute, elementwise, extremum, in_type, truediv
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.dtypes import Array
from rankwise.sim.triton.execution import (
    KernelTypeError,
    KernelValueError,
    Operation,
    active,
    place,
    tokens_of,
)
from rankwise.sim.triton.promotion import combined, to_tensor
from rankwise.sim.triton.rounding import calculated
from rankwise.sim.triton.shapes import broadcast_to
from rankwise.sim.triton.tensor import tensor


class PropagateNan(IntEnum):
    """Whether `maximum` and its siblings return the NaN when one operand is one."""

    NONE = 0
    ALL = 0xFFFF


_NARROWEST_BYTES = 2
"""Of what functions of floats take. Triton's compiler asks for fp32; its interpreter does not."""


def _of_float(name: str, function: Callable[[Array], Array]) -> Callable[[Any], tensor]:
    def operation(x: Any) -> tensor:
        x = to_tensor(x)
        if not x.dtype.is_floating() or x.dtype.itemsize < _NARROWEST_BYTES:
            raise KernelTypeError(
                f"{place()}: {name} is for floats of 16 bits and more, not {x.dtype}",
                hint="cast with .to(tl.float32) first",
            )
        return elementwise(name, function, x.dtype, x)

    operation.__name__ = name
    operation.__doc__ = f"`{name}` of each element; of fp16 and bf16 in fp32, and rounded."
    return operation


def _erf(values: Array) -> Array:
    return np.vectorize(_math.erf, otypes=[values.dtype])(values) if values.size else values


exp = _of_float("exp", np.exp)
exp2 = _of_float("exp2", np.exp2)
log = _of_float("log", np.log)
log2 = _of_float("log2", np.log2)
cos = _of_float("cos", np.cos)
sin = _of_float("sin", np.sin)
sqrt = _of_float("sqrt", np.sqrt)
sqrt_rn = _of_float("sqrt_rn", np.sqrt)
rsqrt = _of_float("rsqrt", lambda values: values.dtype.type(1) / np.sqrt(values))
erf = _of_float("erf", _erf)
floor = _of_float("floor", np.floor)
ceil = _of_float("ceil", np.ceil)


def sigmoid(x: Any) -> tensor:
    """`1 / (1 + exp(-x))`."""
    x = to_tensor(x)
    return truediv(1, 1 + exp(-x))


def abs(x: Any) -> tensor:
    """The magnitude."""
    return absolute(to_tensor(x))


def fdiv(x: Any, y: Any, ieee_rounding: bool = False, approx: bool = False) -> tensor:
    """A quotient of floats."""
    del ieee_rounding, approx  # the quotient is always the correctly rounded one
    left, right = to_tensor(x), to_tensor(y)
    if not (left.dtype.is_floating() and right.dtype.is_floating()):
        raise KernelTypeError(f"{place()}: fdiv is for floats, not {left.dtype}, {right.dtype}")
    return truediv(x, y)


def div_rn(x: Any, y: Any) -> tensor:
    """A correctly rounded quotient."""
    return truediv(x, y)


def fma(x: Any, y: Any, z: Any) -> tensor:
    """`x*y + z`, rounded once."""
    left, right, type_ = combined(x, y, "*")
    _left, last, type_ = combined(tensor(left.data, type_, left.shape), z, "+")

    def fused(a: Array, b: Array, c: Array) -> Array:
        return calculated("fma", "rn", a, b, c) if type_.is_floating() else a * b + c

    operands = (in_type(side, type_) for side in (left, right, last))
    return elementwise("fma", fused, type_, *operands)


def maximum(x: Any, y: Any, propagate_nan: Any = 0) -> tensor:
    """The greater of two, element by element."""
    return extremum(
        "maximum", to_tensor(x) if _both_plain(x, y) else x, y, keeps_nan=bool(plain(propagate_nan))
    )


def minimum(x: Any, y: Any, propagate_nan: Any = 0) -> tensor:
    """The smaller of two, element by element."""
    return extremum(
        "minimum", to_tensor(x) if _both_plain(x, y) else x, y, keeps_nan=bool(plain(propagate_nan))
    )


def _both_plain(x: Any, y: Any) -> bool:
    return not isinstance(plain(x), tensor) and not isinstance(plain(y), tensor)


def clamp(x: Any, min: Any, max: Any, propagate_nan: Any = 0) -> tensor:
    """The value, kept between two bounds."""
    return minimum(maximum(x, min, propagate_nan), max, propagate_nan)


def umulhi(x: Any, y: Any) -> tensor:
    """The upper half of the product of two unsigned integers."""
    left, right, type_ = combined(to_tensor(x) if _both_plain(x, y) else x, y, "*")
    if not type_.is_int() or type_.primitive_bitwidth not in (32, 64):
        raise KernelTypeError(f"{place()}: umulhi is for 32 and 64 bits, not {type_}")
    unsigned = t.uint32 if type_.primitive_bitwidth == 32 else t.uint64
    function = _upper_of_32 if unsigned is t.uint32 else upper_of_64

    def upper(a: Array, b: Array) -> Array:
        return function(a.astype(unsigned.compute), b.astype(unsigned.compute)).astype(
            type_.compute
        )

    return elementwise("umulhi", upper, type_, in_type(left, type_), in_type(right, type_))


def upper_of_64(left: Array, right: Any) -> Array:
    """The upper halves of 128-bit products."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    left_low, left_high = left & low, left >> half
    right_low, right_high = right & low, right >> half
    middle = left_high * right_low + ((left_low * right_low) >> half)
    other = left_low * right_high + (middle & low)
    upper: Array = left_high * right_high + (middle >> half) + (other >> half)
    return upper


def _upper_of_32(left: Array, right: Array) -> Array:
    upper: Array = (left.astype(np.uint64) * right.astype(np.uint64)) >> np.uint64(32)
    return upper


def dot(
    input: Any,
    other: Any,
    acc: Any = None,
    input_precision: str | None = None,
    allow_tf32: bool | None = None,
    max_num_imprecise_acc: int | None = None,
    out_dtype: Any = None,
) -> tensor:
    """The matrix product of the last two axes, accumulated in fp32, or in int32 for int8.

    `input_precision` other than `ieee` is accepted, and fp32 is multiplied exactly all the same.
    """
    del max_num_imprecise_acc, allow_tf32
    left, right = to_tensor(input), to_tensor(other)
    if plain(input_precision) not in (None, "tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"):
        raise KernelValueError(f"{place()}: input_precision={input_precision!r} is not known")
    _check_dot(left, right)
    out = _dot_type(left, right, plain(out_dtype))
    m, k = left.shape[-2:]
    n = right.shape[-1]
    shape = (*left.shape[:-2], m, n)
    if acc is not None:
        acc = to_tensor(acc)
        if acc.shape != shape:
            raise KernelTypeError(
                f"{place()}: dot of {list(left.shape)} and {list(right.shape)} cannot be "
                f"accumulated in a block of shape {list(acc.shape)}"
            )
        out = acc.dtype
    execution = active()
    launch = execution.launch
    launch.saw_block(left.numel)
    launch.saw_block(right.numel)
    launch.saw_block(m * n)
    if launch.computes:
        wide = np.float64 if out.is_fp64() or left.dtype.is_int() else np.float32
        # In one order in memory: libraries add in another one where an operand is transposed.
        factors = (side.data.astype(wide, order="C", copy=False) for side in (left, right))
        data = np.matmul(*factors)
        if acc is not None:
            data = data + acc.data.astype(wide, copy=False)
        data = out.rounded(data.astype(out.compute, copy=False))
    else:
        data = np.broadcast_to(np.zeros(1, out.compute), (1, *shape))
    result = tensor(data, out, shape)
    if execution.observer is not None:
        batch = result.numel // max(m * n, 1)
        result.token = execution.note(
            Operation(
                "dot",
                "dot",
                left.dtype.name,
                result.numel,
                tuple(map(int, execution.programs)),
                shape=(batch * m, n, k),
                after=tokens_of((left, right) if acc is None else (left, right, acc)),
            )
        )
    return result


def _check_dot(left: tensor, right: tensor) -> None:
    shapes = f"{list(left.shape)} and {list(right.shape)}"
    if len(left.shape) not in (2, 3) or len(left.shape) != len(right.shape):
        raise KernelTypeError(f"{place()}: dot takes two matrices, not blocks of shapes {shapes}")
    if left.shape[-1] != right.shape[-2] or left.shape[:-2] != right.shape[:-2]:
        raise KernelTypeError(
            f"{place()}: dot of {shapes}: the inner sizes {left.shape[-1]} and {right.shape[-2]} "
            "have to be equal"
        )
    if left.dtype != right.dtype and not (left.dtype.is_fp8() and right.dtype.is_fp8()):
        raise KernelTypeError(
            f"{place()}: dot of {left.dtype} and {right.dtype}: both have to be of one type",
            hint="cast one with .to(...)",
        )
    if left.dtype.is_int() and left.dtype.primitive_bitwidth != 8:
        raise KernelTypeError(f"{place()}: dot is for floats, int8 and uint8, not {left.dtype}")


def _dot_type(left: tensor, right: tensor, asked: Any) -> t.dtype:
    del right
    if left.dtype.is_int():
        return t.int32
    if left.dtype.is_fp64():
        return t.float64
    if asked is None:
        return t.float32
    if not isinstance(asked, t.dtype) or not asked.is_floating():
        raise KernelTypeError(
            f"{place()}: out_dtype={asked!r} is not a type for a product of floats"
        )
    return asked


def cdiv(x: Any, div: Any) -> Any:
    """The quotient rounded up."""
    x, div = plain(x), plain(div)
    if not isinstance(x, tensor) and not isinstance(div, tensor):
        return -(-x // div)
    return (x + (div - 1)) // div


def swizzle2d(i: Any, j: Any, size_i: Any, size_j: Any, size_g: Any) -> tuple[Any, Any]:
    """The place of a tile when tiles are visited column by column in groups of `size_g` rows."""
    linear = i * size_j + j
    per_group = size_g * size_j
    first = linear // per_group * size_g
    rows = minimum(size_i - first, size_g)
    linear = linear % per_group
    return first + linear % rows, linear // rows


def full(shape: Any, value: Any, dtype: Any) -> tensor:
    """A block with the same value everywhere."""
    return broadcast_to(in_type(to_tensor(value), plain(dtype)), shape)


def zeros(shape: Any, dtype: Any) -> tensor:
    """A block of zeros."""
    return full(shape, 0, dtype)


def zeros_like(input: tensor) -> tensor:
    """A block of zeros like another."""
    return full(input.shape, 0, input.dtype)


__all__ = [
    "PropagateNan", "abs", "cdiv", "ceil", "clamp", "cos", "div_rn", "dot", "erf", "exp", "exp2",
    "fdiv", "floor", "fma", "full", "log", "log2", "maximum", "minimum", "rsqrt", "sigmoid", "sin",
    "sqrt", "sqrt_rn", "swizzle2d", "umulhi", "zeros", "zeros_like",
]  # fmt: skip
