"""Casts: between numbers, between pointers, and of bits."""

from typing import Any

import numpy as np

from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.arithmetic import checked, in_type
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.dtypes import dtype, pointer_type
from rankwise.sim.triton.execution import (
    KernelTypeError,
    KernelValueError,
    active,
    note_math,
    place,
)
from rankwise.sim.triton.promotion import converted
from rankwise.sim.triton.tensor import tensor, to_tensor


def cast(
    input: Any, dtype: Any, fp_downcast_rounding: str | None = None, bitcast: bool = False
) -> tensor:
    """A tensor or number in another type."""
    target = plain(dtype)
    source = to_tensor(input)
    if not isinstance(target, t.dtype):
        raise KernelTypeError(f"{place()}: {target!r} is not a type of the kernel language")
    target = target.scalar
    rounding = plain(fp_downcast_rounding)
    if rounding not in (None, "rtne", "rtz"):
        raise KernelValueError(
            f"{place()}: fp_downcast_rounding={rounding!r}: it is 'rtne' or 'rtz'"
        )
    if source.dtype == target:
        return source
    if source.dtype.is_ptr() or target.is_ptr():
        return _cast_pointer(source, target)
    if plain(bitcast):
        return _cast_bits(source, target)
    if rounding is not None and not (
        source.dtype.is_floating()
        and target.is_floating()
        and target.primitive_bitwidth < source.dtype.primitive_bitwidth
    ):
        raise KernelTypeError(
            f"{place()}: fp_downcast_rounding is for floats to narrower ones, not {source.dtype} "
            f"to {target}"
        )
    if rounding == "rtz":
        source = _toward_zero(source, target)
    result = in_type(source, target)
    if active().observer is not None and source.affine is None:
        note_math("cast", result, (source,))
    return result


def address_of(pointer: tensor) -> tensor:
    """A pointer's byte address, as an integer."""
    if not pointer.dtype.is_ptr():
        return in_type(pointer, t.int64)
    assert isinstance(pointer.dtype, pointer_type)
    data = pointer.data
    if pointer.buffer is not None:
        active().launch.knows_addresses = True
        data = data * pointer.dtype.element_ty.itemsize + pointer.buffer.address
    return tensor(data, t.int64, pointer.shape, token=pointer.token)


def _cast_pointer(source: tensor, target: dtype) -> tensor:
    if not target.is_ptr():
        if target.primitive_bitwidth != 64 or not target.is_int():
            raise KernelTypeError(f"{place()}: a pointer cannot become {target}, only int64")
        return in_type(address_of(source), target)
    assert isinstance(target, pointer_type)
    if not source.dtype.is_ptr():
        if not source.dtype.is_int():
            raise KernelTypeError(f"{place()}: {source.dtype} cannot become a pointer")
        return tensor(in_type(source, t.int64).data, target, source.shape, token=source.token)
    assert isinstance(source.dtype, pointer_type)
    before, after = source.dtype.element_ty.itemsize, target.element_ty.itemsize
    if source.buffer is None or before == after:
        return tensor(
            source._data,  # noqa: SLF001 (a symbolic pointer stays symbolic)
            target,
            source.shape,
            affine=source.affine,
            buffer=source.buffer,
            token=source.token,
        )
    if before % after == 0:
        data = source.data * (before // after)
        return tensor(data, target, source.shape, buffer=source.buffer, token=source.token)
    return tensor(address_of(source).data, target, source.shape, token=source.token)


def _cast_bits(source: tensor, target: dtype) -> tensor:
    if source.dtype.primitive_bitwidth != target.primitive_bitwidth:
        raise KernelTypeError(
            f"{place()}: the bits of {source.dtype} ({source.dtype.primitive_bitwidth}) cannot be "
            f"read as {target} ({target.primitive_bitwidth})"
        )
    if source.dtype.is_int() and target.is_int() and checked(source).affine is not None:
        pattern = checked(source).affine
        assert pattern is not None
        low, high = target.limits()
        below, above = pattern.span(source.shape)
        if pattern.base.min() + below >= low and pattern.base.max() + above <= high:
            return tensor(None, target, source.shape, affine=pattern, token=source.token)
    stored = np.ascontiguousarray(source.dtype.encode(source.data))
    result = tensor(target.decode(stored.view(target.storage)), target, source.shape)
    result.token = source.token
    return result


def _toward_zero(source: tensor, target: dtype) -> tensor:
    """Values truncated to a narrower type; the cast to that type then changes nothing."""
    nearest = converted(source.data, source.dtype, target)
    bits = np.ascontiguousarray(target.encode(nearest)).view(f"u{target.itemsize}")
    # Of both signs, the next value towards zero has the bits of one less.
    is_beyond = np.abs(nearest.astype(np.float64)) > np.abs(source.data.astype(np.float64))
    truncated = target.decode((bits - is_beyond).astype(bits.dtype).view(target.storage))
    held = t.float64 if target.is_fp64() else t.float32
    return tensor(truncated, held, source.shape, token=source.token)
