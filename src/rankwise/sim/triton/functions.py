"""Mathematical functions of elements, and the matrix product."""

import math as _math
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np

from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.arithmetic import (
    absolute,
    combined_all,
    elementwise,
    extremum,
    in_type,
    truediv,
)
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
from rankwise.sim.triton.promotion import combined
from rankwise.sim.triton.rounding import calculated, fused_to_odd, rounded_to_odd
from rankwise.sim.triton.tensor import broadcast_to, tensor, to_tensor


class PropagateNan(IntEnum):
    """Whether `maximum` and its siblings return the NaN when one operand is one."""

    NONE = 0
    ALL = 0xFFFF


_WIDE_FLOATS = (t.float32, t.float64)


def _check_types(name: str, accepted: tuple[t.dtype, ...], *operands: Any) -> None:
    """Refuse blocks of other types, as Triton's compiler does; its interpreter does not."""
    for each in operands:
        if isinstance(plain(each), tensor) and plain(each).dtype not in accepted:
            raise KernelTypeError(
                f"{place()}: {name} is for {' and '.join(map(str, accepted))}, "
                f"not {plain(each).dtype}",
                hint=f"cast with .to(tl.{_long_name(accepted[0])}) first",
            )


def _long_name(type_: t.dtype) -> str:
    return repr(type_).rpartition(".")[2]


def _of_float(
    name: str,
    function: Callable[[Array], Array],
    accepted: tuple[t.dtype, ...] = _WIDE_FLOATS,
) -> Callable[[Any], tensor]:
    def operation(x: Any) -> tensor:
        _check_types(name, accepted, x)
        x = to_tensor(x)
        return elementwise(name, function, x.dtype, x)

    operation.__name__ = name
    operation.__doc__ = f"`{name}` of each element; fp16 and bf16 are refused, as in Triton."
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
sqrt_rn = _of_float("sqrt_rn", np.sqrt, (t.float32,))
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
    # The quotient is always the correctly rounded one.
    left, right, type_ = combined(to_tensor(x) if _both_plain(x, y) else x, y, "/")
    if not type_.is_floating():
        raise KernelTypeError(f"{place()}: fdiv is for floats, not {left.dtype}, {right.dtype}")
    if plain(approx) and (plain(ieee_rounding) or not type_.is_fp32()):
        raise KernelValueError(
            f"{place()}: fdiv(approx=True) is for fp32 and without ieee_rounding, not {type_}"
        )
    return truediv(left, right)


def div_rn(x: Any, y: Any) -> tensor:
    """A correctly rounded quotient."""
    _check_types("div_rn", (t.float32,), x, y)
    return truediv(x, y)


def fma(x: Any, y: Any, z: Any) -> tensor:
    """`x*y + z`, rounded once."""
    operands, type_ = combined_all("fma", x, y, z)
    if not type_.is_floating():
        raise KernelTypeError(f"{place()}: fma is for floats, not {type_}")
    return elementwise("fma", partial(_fused, type_), type_, *operands)


def _fused(type_: t.dtype, a: Array, b: Array, c: Array) -> Array:
    if not type_.is_narrow:
        return calculated("fma", "rn", a, b, c)
    # The product of two narrow floats is exact in float64.
    return rounded_to_odd(fused_to_odd(*(each.astype(np.float64) for each in (a, b, c))), type_)


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
    (value, low, high), _type = combined_all("clamp", x, min, max)
    return minimum(maximum(value, low, propagate_nan), high, propagate_nan)


def umulhi(x: Any, y: Any) -> tensor:
    """The upper half of the product of two unsigned integers."""
    _check_types("umulhi", (t.int32, t.int64, t.uint32, t.uint64), x, y)
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
    out = _dot_type(left, None if acc is None else to_tensor(acc), plain(out_dtype))
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


_INNER_MIN = {8: 32, 16: 16, 32: 8, 64: 4}
"""By the width of a number in bits: the smallest inner size of `dot`."""


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
    if left.dtype.is_int() and left.dtype != t.int8:
        raise KernelTypeError(f"{place()}: dot is for floats and int8, not {left.dtype}")
    inner_min = _INNER_MIN[left.dtype.primitive_bitwidth]
    if left.shape[-1] < inner_min:
        raise KernelValueError(
            f"{place()}: dot of {shapes}: the inner size {left.shape[-1]} has to be {inner_min} or"
            f" more for {left.dtype}, as for Triton's compiler for CUDA",
            hint="pad both blocks with zeros",
        )


def _dot_type(left: tensor, acc: tensor | None, asked: Any) -> t.dtype:
    """The type of the product: of narrow floats the one that is asked for, else fixed."""
    if asked is None:
        asked = t.float32 if acc is None else acc.dtype
    if not isinstance(asked, t.dtype):
        raise KernelTypeError(f"{place()}: out_dtype={asked!r} is not a type")
    if left.dtype.is_int():
        type_ = t.int32
    elif asked.is_bf16():
        raise KernelTypeError(
            f"{place()}: dot gives no bf16: accumulate in fp32, and cast the result"
        )
    elif left.dtype.is_fp64():
        type_ = t.float64
    elif left.dtype.is_fp32() or left.dtype.is_bf16():
        type_ = t.float32
    else:
        type_ = asked
    if acc is not None and acc.dtype != asked:
        raise KernelTypeError(
            f"{place()}: dot accumulates in {asked}, not in a block of {acc.dtype}",
            hint=f"pass out_dtype=tl.{_long_name(acc.dtype)}",
        )
    is_known = type_ == t.int32 if left.dtype.is_int() else type_ in _DOT_TYPES
    has_fitting = (
        type_ == acc.dtype if acc is not None else left.dtype.is_fp64() or not type_.is_fp64()
    )
    if not (is_known and has_fitting):
        raise KernelTypeError(
            f"{place()}: dot of {left.dtype} cannot give {type_ if acc is None else acc.dtype}"
        )
    return type_


_DOT_TYPES = (t.float16, t.float32, t.float64)


def cdiv(x: Any, div: Any) -> Any:
    """The quotient rounded up."""
    x, div = plain(x), plain(div)
    if not isinstance(x, tensor) and not isinstance(div, tensor):
        return -(-x // div)
    return (x + (div - 1)) // div


def swizzle2d(i: Any, j: Any, size_i: Any, size_j: Any, size_g: Any) -> tuple[Any, Any]:
    """The place of a tile when tiles are visited column by column in groups of `size_g` rows."""
    # Triton keeps a tensor in a variable: numbers alone make these int32.
    linear, per_group = to_tensor(i * size_j + j), to_tensor(size_g * size_j)
    first = linear // per_group * size_g
    rows = minimum(size_i - first, size_g)
    linear = linear % per_group
    return first + linear % rows, linear // rows


def full(shape: Any, value: Any, dtype: Any) -> tensor:
    """A block with the same value everywhere."""
    value, type_ = plain(value), plain(dtype)
    if not isinstance(value, tensor):
        value = _constant(value, type_)
    return broadcast_to(in_type(value, type_), shape)


def _constant(value: Any, type_: t.dtype) -> tensor:
    """A number of a type, as Triton takes it: no fraction of integers, no sign of unsigned ones."""
    own = to_tensor(value)
    if (
        type_.is_int()
        and value != 0
        and (own.dtype.is_floating() or (value < 0 and type_.is_int_unsigned()))
        and not type_.is_bool()
    ):
        raise KernelTypeError(f"{place()}: {value!r} is not a value of {type_}")
    if type_.is_fp8() and not own.dtype.is_floating():
        own = to_tensor(float(value))
    return own


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
