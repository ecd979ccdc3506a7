"""Operations that move elements and change none of them."""

import sys
from typing import Any

import numpy as np

from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.affine import Affine, Box
from rankwise.sim.triton.arithmetic import elementwise, in_type
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.dtypes import Array
from rankwise.sim.triton.execution import KernelTypeError, KernelValueError, place
from rankwise.sim.triton.promotion import combined, to_tensor
from rankwise.sim.triton.tensor import OPERATORS, broadcast_shape, padded, plain_shape, tensor


def _with_data(source: tensor, data: Array) -> tensor:
    return tensor(data, source.dtype, data.shape[1:], buffer=source.buffer, token=source.token)


def _with_pattern(source: tensor, shape: tuple[int, ...], pattern: Affine) -> tensor:
    return tensor(
        None, source.dtype, shape, affine=pattern, buffer=source.buffer, token=source.token
    )


def broadcast_to(block: Any, *shape: Any) -> tensor:
    """A block repeated along its axes of length one, or a number in every place."""
    source = to_tensor(block)
    target = plain_shape(shape)
    if source.shape == target:
        return source
    if broadcast_shape(source.shape, target) != target:
        raise KernelTypeError(
            f"{place()}: a block of shape {list(source.shape)} cannot be broadcast to "
            f"{list(target)}"
        )
    rank = len(target)
    pattern = source.as_affine()
    if pattern is not None:
        return _with_pattern(source, target, _repeated(pattern, source.shape, target))
    if source.box is not None:
        box = box_in(source, target)
        if box is not None:
            return tensor(None, t.int1, target, box=box, token=source.token)
    data = padded(source.data, rank)
    return _with_data(source, np.broadcast_to(data, (data.shape[0], *target)))


def _repeated(pattern: Affine, shape: tuple[int, ...], target: tuple[int, ...]) -> Affine:
    rank = len(target)
    before = (1,) * (rank - len(shape)) + shape
    strides = tuple(
        0 if size == 1 else stride
        for size, stride in zip(before, pattern.padded(rank).strides, strict=True)
    )
    return Affine(pattern.base, strides)


def box_in(mask: tensor, shape: tuple[int, ...]) -> Box | None:
    """A box as one of a greater shape; None if an axis that it bounds is repeated."""
    assert mask.box is not None
    box = mask.box.padded(len(shape))
    before = (1,) * (len(shape) - len(mask.shape)) + mask.shape
    for old, new, bound in zip(before, shape, box.bounds, strict=True):
        if old != new and bound is not None:
            return None
    return box


def broadcast(left: Any, right: Any) -> tuple[tensor, tensor]:
    """Two blocks in the shape that they have in common."""
    left, right = to_tensor(left), to_tensor(right)
    shape = broadcast_shape(left.shape, right.shape)
    return broadcast_to(left, shape), broadcast_to(right, shape)


def expand_dims(source: Any, axis: Any) -> tensor:
    """A block with axes of length one put in, at the places they have in the result."""
    source = to_tensor(source)
    axis = plain(axis)
    axes = [plain(each) for each in axis] if isinstance(axis, (list, tuple)) else [axis]
    rank = len(source.shape) + len(axes)
    places = sorted(each + rank if each < 0 else each for each in axes)
    if len(set(places)) != len(places) or any(not 0 <= each < rank for each in places):
        raise KernelValueError(
            f"{place()}: no axes {axes} can be put into shape {list(source.shape)}"
        )
    return _indexed(source, [None if at in places else slice(None) for at in range(rank)])


def _indexed(source: tensor, keys: list[Any]) -> tensor:
    """Put in an axis for every None among the keys; the others are whole slices."""
    old = iter(range(len(source.shape)))
    origin = [None if key is None else next(old) for key in keys]
    shape = tuple(1 if axis is None else source.shape[axis] for axis in origin)
    pattern = source.as_affine()
    if pattern is not None:
        strides = tuple(0 if axis is None else pattern.strides[axis] for axis in origin)
        return _with_pattern(source, shape, Affine(pattern.base, strides))
    if source.box is not None:
        bounds = tuple(None if axis is None else source.box.bounds[axis] for axis in origin)
        return tensor(None, t.int1, shape, box=Box(bounds), token=source.token)
    data = source.data
    return _with_data(source, data.reshape(data.shape[0], *shape))


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
    whole = sum(key is not None for key in listed)
    if whole > len(source.shape):
        raise KernelTypeError(
            f"{place()}: {whole} axes are subscripted, the block has shape {list(source.shape)}"
        )
    return _indexed(source, listed + [slice(None)] * (len(source.shape) - whole))


def permute(source: tensor, *dims: Any) -> tensor:
    """The axes in another order."""
    order = plain_shape(dims)
    if sorted(each % max(len(order), 1) for each in order) != list(range(len(source.shape))):
        raise KernelValueError(
            f"{place()}: {list(order)} is no order of the axes of shape {list(source.shape)}"
        )
    order = tuple(each % len(order) for each in order)
    shape = tuple(source.shape[axis] for axis in order)
    if source.affine is not None:
        strides = tuple(source.affine.strides[axis] for axis in order)
        return _with_pattern(source, shape, Affine(source.affine.base, strides))
    if source.box is not None:
        box = Box(tuple(source.box.bounds[axis] for axis in order))
        return tensor(None, t.int1, shape, box=box, token=source.token)
    return _with_data(source, source.data.transpose(0, *(axis + 1 for axis in order)))


def trans(source: tensor, *dims: Any) -> tensor:
    """The axes in another order; by default the last two exchanged."""
    rank = len(source.shape)
    if dims:
        return permute(source, *dims)
    if rank < 2:
        raise KernelTypeError(f"{place()}: a block of shape {list(source.shape)} has no transpose")
    return permute(source, *range(rank - 2), rank - 1, rank - 2)


def reshape(block: Any, *shape: Any, can_reorder: bool = False) -> tensor:
    """The same elements, in row-major order, in another shape."""
    del can_reorder  # the order is kept, which is one of those allowed
    source = to_tensor(block)
    target = plain_shape(shape)
    if target == source.shape:
        return source
    count = 1
    for size in target:
        count *= size
    if count != source.numel:
        raise KernelTypeError(
            f"{place()}: {source.numel} elements of shape {list(source.shape)} cannot be reshaped "
            f"to {list(target)}"
        )
    data = source.data
    return _with_data(source, data.reshape(data.shape[0], *target))


def ravel(source: tensor, can_reorder: bool = False) -> tensor:
    """All elements along one axis."""
    return reshape(source, (source.numel,), can_reorder=can_reorder)


def squeeze(source: tensor, dim: int) -> tensor:
    """Without an axis of length one."""
    dim = plain(dim) % max(len(source.shape), 1)
    if not source.shape or source.shape[dim] != 1:
        raise KernelTypeError(f"{place()}: axis {dim} of shape {list(source.shape)} is not 1 long")
    return reshape(source, source.shape[:dim] + source.shape[dim + 1 :])


def unsqueeze(source: tensor, dim: int) -> tensor:
    """With an axis of length one."""
    return expand_dims(source, dim)


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


def join(left: Any, right: Any) -> tensor:
    """Two blocks side by side in a new last axis."""
    left, right = _alike(left, right)
    data = np.stack(_stacked((left, right)), axis=-1)
    return tensor(data, left.dtype, data.shape[1:], token=left.token or right.token)


def split(source: tensor) -> tuple[tensor, tensor]:
    """The two blocks along a last axis of length two."""
    if not source.shape or source.shape[-1] != 2:
        raise KernelTypeError(
            f"{place()}: split needs a last axis of length 2, not shape {list(source.shape)}"
        )
    return _with_data(source, source.data[..., 0]), _with_data(source, source.data[..., 1])


def interleave(left: Any, right: Any) -> tensor:
    """Elements of two blocks in turn along the last axis."""
    both = join(left, right)
    return reshape(both, (*both.shape[:-2], 2 * both.shape[-2]))


def cat(left: tensor, right: tensor, can_reorder: bool = False, dim: int = 0) -> tensor:
    """One block after the other along an axis."""
    del can_reorder
    if left.dtype != right.dtype:
        raise KernelTypeError(f"{place()}: {left.dtype} and {right.dtype} cannot be concatenated")
    data = np.concatenate(_stacked((left, right)), axis=plain(dim) + 1)
    return tensor(data, left.dtype, data.shape[1:], token=left.token or right.token)


def flip(source: tensor, dim: int | None = None) -> tensor:
    """The elements along an axis in reverse."""
    axis = len(source.shape) - 1 if dim is None else plain(dim) % len(source.shape)
    return _with_data(source, np.flip(source.data, axis=axis + 1))


def gather(source: tensor, index: tensor, axis: int) -> tensor:
    """Elements picked along an axis by a block of indices."""
    axis = plain(axis) % len(source.shape)
    size = source.shape[axis]
    picked = index.data.astype(np.int64)
    if picked.size and not (picked.min() >= 0 and picked.max() < size):
        raise KernelValueError(
            f"{place()}: gather along axis {axis}, which is {size} long, with indices from "
            f"{picked.min()} to {picked.max()}"
        )
    rows = max(len(source.data), len(picked))
    data = np.take_along_axis(
        np.broadcast_to(source.data, (rows, *source.shape)),
        np.broadcast_to(picked, (rows, *index.shape)),
        axis=axis + 1,
    )
    return _with_data(source, data)


def where(condition: Any, yes: Any, no: Any) -> tensor:
    """`yes` where the condition holds, else `no`."""
    condition = to_tensor(condition)
    if not condition.dtype.is_bool():
        condition = tensor(condition.data != 0, t.int1, condition.shape, token=condition.token)
    yes, no = plain(yes), plain(no)
    buffer = None
    if isinstance(yes, tensor) and yes.dtype.is_ptr():
        yes, no, buffer = _same_space(yes, to_tensor(no))
        type_: t.dtype = yes.dtype
    elif not isinstance(yes, tensor) and not isinstance(no, tensor):
        yes, no, type_ = combined(to_tensor(yes), no, "where")
    else:
        yes, no, type_ = combined(yes, no, "where")
    if not type_.is_ptr():
        yes, no = in_type(yes, type_), in_type(no, type_)
    shape = broadcast_shape(condition.shape, broadcast_shape(yes.shape, no.shape))
    if condition.box is not None and yes.shape == shape and condition.box.is_full(condition.shape):
        chosen: tensor = yes
        return chosen
    result = elementwise("where", np.where, type_, condition, yes, no)
    result.buffer = buffer
    return result


def _same_space(yes: tensor, no: tensor) -> tuple[tensor, tensor, Any]:
    if yes.buffer is not None and no.buffer is yes.buffer and no.dtype == yes.dtype:
        return yes, no, yes.buffer
    addresses = [casting.address_of(side) for side in (yes, no)]
    yes, no = (tensor(side.data, yes.dtype, side.shape, token=side.token) for side in addresses)
    return yes, no, None


from rankwise.sim.triton import casting  # noqa: E402 (they build on each other)

OPERATORS.shapes = sys.modules[__name__]
