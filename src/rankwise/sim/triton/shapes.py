"""Operations that move elements and change none of them."""

import math
from typing import Any

import numpy as np

from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.affine import Affine, Box
from rankwise.sim.triton.arithmetic import elementwise, in_type
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.dtypes import Array
from rankwise.sim.triton.execution import KernelTypeError, KernelValueError, place
from rankwise.sim.triton.promotion import combined
from rankwise.sim.triton.tensor import (
    broadcast_shape,
    broadcast_to,
    plain_shape,
    shape_of_block,
    tensor,
    to_tensor,
    with_data,
    with_pattern,
)


def broadcast(input: Any, other: Any) -> tuple[tensor, tensor]:
    """Two blocks in the shape that they have in common."""
    input, other = to_tensor(input), to_tensor(other)
    shape = broadcast_shape(input.shape, other.shape)
    return broadcast_to(input, shape), broadcast_to(other, shape)


def expand_dims(input: Any, axis: Any) -> tensor:
    """A block with axes of length one put in, at the places they have in the result."""
    input = to_tensor(input)
    axis = plain(axis)
    axes = [plain(each) for each in axis] if isinstance(axis, (list, tuple)) else [axis]
    rank = len(input.shape) + len(axes)
    places = sorted(each + rank if each < 0 else each for each in axes)
    if len(set(places)) != len(places) or any(not 0 <= each < rank for each in places):
        raise KernelValueError(
            f"{place()}: no axes {axes} can be put into shape {list(input.shape)}"
        )
    return _indexed(input, [None if at in places else slice(None) for at in range(rank)])


def _indexed(source: tensor, keys: list[Any]) -> tensor:
    """Put in an axis for every None among the keys; the others are whole slices."""
    old = iter(range(len(source.shape)))
    origin = [None if key is None else next(old) for key in keys]
    shape = tuple(1 if axis is None else source.shape[axis] for axis in origin)
    pattern = source.as_affine()
    if pattern is not None:
        strides = tuple(0 if axis is None else pattern.strides[axis] for axis in origin)
        return with_pattern(source, shape, Affine(pattern.base, strides))
    if source.box is not None:
        bounds = tuple(None if axis is None else source.box.bounds[axis] for axis in origin)
        return tensor(None, t.int1, shape, box=Box(bounds), token=source.token)
    data = source.data
    return with_data(source, data.reshape(data.shape[0], *shape))


def subscript(source: tensor, keys: Any) -> tensor:
    """`block[:, None]`: only whole slices and new axes, as in the language."""
    keys = plain(keys)
    listed = [plain(key) for key in (keys if isinstance(keys, tuple) else (keys,))]
    if Ellipsis in [key for key in listed if key is Ellipsis]:
        at = next(i for i, key in enumerate(listed) if key is Ellipsis)
        missing = len(source.shape) - sum(key is not None for key in listed) + 1
        listed[at : at + 1] = [slice(None)] * missing
    if any(key is not None and key != slice(None) for key in listed):
        raise KernelTypeError(
            f"{place()}: a block can be subscripted with `:` and `None` alone, not {keys!r}"
        )
    if not source.shape:  # what Triton accepts of a number: `x[None, :]` is `x[None]`
        listed = [key for key in listed if key is None]
    whole = sum(key is not None for key in listed)
    if whole > len(source.shape):
        raise KernelTypeError(
            f"{place()}: {whole} axes are subscripted, the block has shape {list(source.shape)}"
        )
    return _indexed(source, listed + [slice(None)] * (len(source.shape) - whole))


def permute(input: tensor, *dims: Any) -> tensor:
    """The axes in another order."""
    order = plain_shape(dims)
    if sorted(each % max(len(order), 1) for each in order) != list(range(len(input.shape))):
        raise KernelValueError(
            f"{place()}: {list(order)} is not an order of the axes of shape {list(input.shape)}"
        )
    order = tuple(each % len(order) for each in order)
    shape = tuple(input.shape[axis] for axis in order)
    if input.affine is not None:
        strides = tuple(input.affine.strides[axis] for axis in order)
        return with_pattern(input, shape, Affine(input.affine.base, strides))
    if input.box is not None:
        box = Box(tuple(input.box.bounds[axis] for axis in order))
        return tensor(None, t.int1, shape, box=box, token=input.token)
    return with_data(input, input.data.transpose(0, *(axis + 1 for axis in order)))


def trans(input: tensor, *dims: Any) -> tensor:
    """The axes in another order; by default the last two exchanged."""
    rank = len(input.shape)
    if dims:
        return permute(input, *dims)
    if rank < 2:
        raise KernelTypeError(f"{place()}: a block of shape {list(input.shape)} has no transpose")
    return permute(input, *range(rank - 2), rank - 1, rank - 2)


def reshape(input: Any, *shape: Any, can_reorder: bool = False) -> tensor:
    """The same elements, in row-major order, in another shape."""
    del can_reorder  # the order is kept, which is one of those allowed
    source = to_tensor(input)
    target = shape_of_block(shape)
    if target == source.shape:
        return source
    if math.prod(target) != source.numel:
        raise KernelTypeError(
            f"{place()}: {source.numel} elements of shape {list(source.shape)} cannot be reshaped "
            f"to {list(target)}"
        )
    data = source.data
    return with_data(source, data.reshape(data.shape[0], *target))


def view(input: Any, *shape: Any) -> tensor:
    """The same elements in another shape."""
    return reshape(input, *shape)


def ravel(x: tensor, can_reorder: bool = False) -> tensor:
    """All elements along one axis."""
    return reshape(x, (x.numel,), can_reorder=can_reorder)


def squeeze(x: tensor, dim: int) -> tensor:
    """Without an axis of length one."""
    dim = plain(dim) % max(len(x.shape), 1)
    if not x.shape or x.shape[dim] != 1:
        raise KernelTypeError(f"{place()}: axis {dim} of shape {list(x.shape)} is not 1 long")
    return reshape(x, x.shape[:dim] + x.shape[dim + 1 :])


def unsqueeze(x: tensor, dim: int) -> tensor:
    """With an axis of length one."""
    return expand_dims(x, dim)


def _stacked(parts: tuple[tensor, tensor]) -> tuple[Array, Array]:
    rows = max(len(part.data) for part in parts)
    first, second = (np.broadcast_to(part.data, (rows, *part.shape)) for part in parts)
    return first, second


def _alike(left: Any, right: Any) -> tuple[tensor, tensor]:
    left, right = broadcast(left, right)
    if left.dtype != right.dtype:
        left, right, type_ = combined(left, right, "join")
        left, right = in_type(left, type_), in_type(right, type_)
    return left, right


def _with_bits_of(a: tensor, b: tensor, what: str) -> tensor:
    """The second block in the type of the first: of integers, the sign may be another one."""
    if a.dtype == b.dtype:
        return b
    is_same = a.dtype.is_int() and b.dtype.is_int()
    if not is_same or a.dtype.primitive_bitwidth != b.dtype.primitive_bitwidth:
        raise KernelTypeError(
            f"{place()}: {a.dtype} and {b.dtype} cannot be {what}",
            hint="cast one with .to(...)",
        )
    return casting.cast(b, a.dtype, bitcast=True)


def join(a: Any, b: Any) -> tensor:
    """Two blocks side by side in a new last axis."""
    a, b = to_tensor(a), to_tensor(b)
    a, b = _alike(a, _with_bits_of(a, b, "joined"))
    data = np.stack(_stacked((a, b)), axis=-1)
    return tensor(data, a.dtype, data.shape[1:], token=a.token or b.token)


def split(a: tensor) -> tuple[tensor, tensor]:
    """The two blocks along a last axis of length two."""
    if not a.shape or a.shape[-1] != 2:
        raise KernelTypeError(
            f"{place()}: split needs a last axis of length 2, not shape {list(a.shape)}"
        )
    return with_data(a, a.data[..., 0]), with_data(a, a.data[..., 1])


def interleave(a: Any, b: Any) -> tensor:
    """Elements of two blocks in turn along the last axis."""
    both = join(a, b)
    return reshape(both, (*both.shape[:-2], 2 * both.shape[-2])) if len(both.shape) > 1 else both


def cat(input: tensor, other: tensor, can_reorder: bool = False, dim: int = 0) -> tensor:
    """One block after the other along an axis."""
    del can_reorder
    other = _with_bits_of(input, other, "concatenated")
    data = np.concatenate(_stacked((input, other)), axis=plain(dim) + 1)
    return tensor(data, input.dtype, data.shape[1:], token=input.token or other.token)


def flip(x: tensor, dim: int | None = None) -> tensor:
    """The elements along an axis in reverse."""
    axis = len(x.shape) - 1 if dim is None else plain(dim) % len(x.shape)
    return with_data(x, np.flip(x.data, axis=axis + 1))


def gather(src: tensor, index: tensor, axis: int) -> tensor:
    """Elements picked along an axis by a block of indices."""
    axis = plain(axis) % len(src.shape)
    size = src.shape[axis]
    picked = index.data.astype(np.int64)
    if picked.size and not (picked.min() >= 0 and picked.max() < size):
        raise KernelValueError(
            f"{place()}: gather along axis {axis}, which is {size} long, with indices from "
            f"{picked.min()} to {picked.max()}"
        )
    rows = max(len(src.data), len(picked))
    data = np.take_along_axis(
        np.broadcast_to(src.data, (rows, *src.shape)),
        np.broadcast_to(picked, (rows, *index.shape)),
        axis=axis + 1,
    )
    return with_data(src, data)


def where(condition: Any, x: Any, y: Any) -> tensor:
    """`x` where the condition holds, else `y`."""
    condition = to_tensor(condition)
    if not condition.dtype.is_bool():
        condition = (
            in_type(condition, t.int1)
            if condition.dtype.is_fp8()
            else tensor(condition.data != 0, t.int1, condition.shape, token=condition.token)
        )
    x, y = plain(x), plain(y)
    buffer = None
    if isinstance(x, tensor) and x.dtype.is_ptr():
        x, y, buffer = _same_space(x, to_tensor(y))
        type_: t.dtype = x.dtype
    elif not isinstance(x, tensor) and not isinstance(y, tensor):
        x, y, type_ = combined(to_tensor(x), y, "where")
    else:
        x, y, type_ = combined(x, y, "where")
    if not type_.is_ptr():
        x, y = in_type(x, type_), in_type(y, type_)
    shape = broadcast_shape(condition.shape, broadcast_shape(x.shape, y.shape))
    if condition.box is not None and x.shape == shape and condition.box.is_full(condition.shape):
        chosen: tensor = x
        return chosen
    result = elementwise("where", np.where, type_, condition, x, y)
    result.buffer = buffer
    return result


def _same_space(yes: tensor, no: tensor) -> tuple[tensor, tensor, Any]:
    if yes.buffer is not None and no.buffer is yes.buffer and no.dtype == yes.dtype:
        return yes, no, yes.buffer
    addresses = [casting.address_of(side) for side in (yes, no)]
    yes, no = (tensor(side.data, yes.dtype, side.shape, token=side.token) for side in addresses)
    return yes, no, None


from rankwise.sim.triton import casting  # noqa: E402 (they build on each other)

__all__ = [
    "broadcast", "broadcast_to", "cat", "expand_dims", "flip", "gather", "interleave", "join",
    "permute", "ravel", "reshape", "split", "squeeze", "trans", "unsqueeze", "view", "where",
]  # fmt: skip
