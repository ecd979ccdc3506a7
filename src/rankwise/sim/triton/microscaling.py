"""`dot_scaled`: products of blocks in microscaling formats, whose elements share scales.

Both sides are converted to bfloat16, or fp16 where a side is fp16, as Triton does for devices that
have no such product, and multiplied then. Elements of eight bits and less with scales that are
powers of two lose nothing by it.
"""

from typing import Any

import numpy as np

from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.dtypes import Array
from rankwise.sim.triton.execution import KernelTypeError, KernelValueError, place
from rankwise.sim.triton.functions import dot
from rankwise.sim.triton.tensor import tensor

_FOUR_BITS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
_E2M1 = np.concatenate([_FOUR_BITS, -_FOUR_BITS])
_FORMATS = {
    "e2m1": t.uint8, "e4m3": t.float8e4nv, "e5m2": t.float8e5, "bf16": t.bfloat16,
    "fp16": t.float16,
}  # fmt: skip


def dot_scaled(
    lhs: tensor,
    lhs_scale: Any,
    lhs_format: Any,
    rhs: tensor,
    rhs_scale: Any,
    rhs_format: Any,
    acc: Any = None,
    fast_math: bool = False,
    lhs_k_pack: bool = True,
    rhs_k_pack: bool = True,
    out_dtype: t.dtype = t.float32,
) -> tensor:
    """The matrix product of two blocks whose elements share scales along the inner axis.

    Scales are blocks of `[rows, inner / group]` for the left side and `[columns, inner / group]`
    for the right one: bytes that are exponents of two, or eight-bit floats.
    """
    del fast_math
    if plain(out_dtype) != t.float32:
        raise KernelTypeError(f"{place()}: dot_scaled gives fp32, not {plain(out_dtype)}")
    forms = [str(plain(each)) for each in (lhs_format, rhs_format)]
    common = t.float16 if "fp16" in forms else t.bfloat16
    left = _unscaled(lhs, lhs_scale, forms[0], -1, packed=-1 if plain(lhs_k_pack) else -2)
    right = _unscaled(rhs, rhs_scale, forms[1], -2, packed=-2 if plain(rhs_k_pack) else -1)
    first, second = (
        tensor(common.rounded(data), common, data.shape[1:], token=side.token)
        for data, side in ((left, lhs), (right, rhs))
    )
    return dot(first, second, plain(acc), out_dtype=t.float32)


def _unscaled(side: tensor, scale: Any, form: str, inner: int, *, packed: int) -> Array:
    """The values of a side, its scales multiplied in."""
    if form not in _FORMATS:
        raise KernelValueError(
            f"{place()}: dot_scaled has no format {form!r}: it is one of {', '.join(_FORMATS)}"
        )
    values = _values(side, form, packed)
    scale = plain(scale)
    if scale is None:
        return values
    size, groups = values.shape[inner], scale.shape[-1]
    if size % groups or scale.shape[-2] != values.shape[-1 if inner == -2 else -2]:
        raise KernelTypeError(
            f"{place()}: dot_scaled cannot apply scales of shape {list(scale.shape)} to a block of "
            f"{list(values.shape[1:])} whose inner axis has {size} elements"
        )
    factors = _factors(scale) if inner == -1 else np.swapaxes(_factors(scale), -1, -2)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled: Array = values * np.repeat(factors, size // groups, axis=inner)
    return scaled


def _values(side: tensor, form: str, packed: int) -> Array:
    type_ = _FORMATS[form]
    if form == "e2m1":
        codes = side.data.astype(np.uint8)
        pairs = np.stack([_E2M1[codes & 15], _E2M1[codes >> 4]], axis=side.data.ndim)
        pairs = np.moveaxis(pairs, -1, side.data.ndim if packed == -1 else side.data.ndim - 1)
        shape = list(side.data.shape)
        shape[packed] *= 2
        return pairs.reshape(shape)
    if side.dtype == type_:
        return side.data
    if side.dtype.primitive_bitwidth != type_.primitive_bitwidth:
        raise KernelTypeError(f"{place()}: dot_scaled cannot read {side.dtype} as {form}")
    return type_.decode(np.ascontiguousarray(side.dtype.encode(side.data)).view(type_.storage))


def _factors(scale: tensor) -> Array:
    if scale.dtype.is_floating():
        return scale.data
    codes = scale.data.astype(np.uint8).astype(np.int32)
    factors = np.ldexp(np.float32(1), codes - 127)
    return np.where(codes == 255, np.float32(np.nan), factors)
