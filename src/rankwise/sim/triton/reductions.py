"""Reductions and scans along an axis, with the language's own or with a user's combine function.

A combine function gets halves of the block: pairs of neighbours first, then pairs of pairs. So it
must be associative, but need not be commutative. Sums of narrow floats are accumulated in fp32 and
rounded once, as in the accelerator's adders.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton import functions
from rankwise.sim.triton.arithmetic import in_type
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.dtypes import Array, dtype
from rankwise.sim.triton.execution import (
    KernelTypeError,
    KernelValueError,
    active,
    note_math,
    place,
)
from rankwise.sim.triton.shapes import reshape
from rankwise.sim.triton.tensor import broadcast_to, tensor, to_tensor


def _axis_of(source: tensor, axis: Any) -> int:
    rank = len(source.shape)
    axis = plain(axis)
    if not -rank <= axis < rank:
        raise KernelValueError(f"{place()}: shape {list(source.shape)} has no axis {axis}")
    return int(axis) % rank


def _along(
    name: str, source: Any, axis: Any, keep_dims: bool, function: Callable[..., Array]
) -> tensor:
    """Apply a numpy reduction; over all axes when `axis` is None."""
    source = to_tensor(source)
    axis, keep_dims = plain(axis), bool(plain(keep_dims))
    axes = tuple(range(len(source.shape))) if axis is None else (_axis_of(source, axis),)
    shape = tuple(
        1 if at in axes else size
        for at, size in enumerate(source.shape)
        if keep_dims or at not in axes
    )
    execution = active()
    if execution.launch.computes or not source.dtype.is_floating():
        # In one order, whatever lies where: a sum of one program has the bits of one among many.
        values = np.ascontiguousarray(source.data)
        data = function(values, axis=tuple(at + 1 for at in axes))
        data = data.astype(source.dtype.compute, copy=False).reshape(-1, *shape)
    else:
        data = np.zeros((1, *shape), source.dtype.compute)
    result = tensor(source.dtype.rounded(data), source.dtype, shape)
    if execution.observer is not None:
        note_math(name, result, (source,), source.numel)
    return result


def sum_type(type_: dtype, asked: Any) -> dtype:
    """The type in which elements are summed."""
    asked = plain(asked)
    if asked is not None:
        assert isinstance(asked, dtype)
        return asked
    if type_.is_int() and type_.primitive_bitwidth < 32:
        return t.int32 if type_.is_int_signed() else t.uint32
    return type_


def sum(
    input: Any,
    axis: Any = None,
    keep_dims: bool = False,
    dtype: Any = None,
) -> tensor:
    """The sum along an axis; integers narrower than 32 bits are summed in 32."""
    source = to_tensor(input)
    source = in_type(source, sum_type(source.dtype, dtype))
    # One bit wraps around at every second element.
    function = np.logical_xor.reduce if source.dtype.is_bool() else np.sum
    return _along("sum", source, axis, keep_dims, function)


def _of_integers(name: str, input: Any) -> tensor:
    source = to_tensor(input)
    if not source.dtype.is_int():
        raise KernelTypeError(f"{place()}: {name} is for integers, not {source.dtype}")
    return source


def xor_sum(input: Any, axis: Any = None, keep_dims: bool = False) -> tensor:
    """The exclusive or of all elements along an axis."""
    input = _of_integers("xor_sum", input)
    return _along("xor_sum", input, axis, keep_dims, np.bitwise_xor.reduce)


def reduce_or(input: Any, axis: Any, keep_dims: bool = False) -> tensor:
    """The bitwise or of all elements along an axis."""
    input = _of_integers("reduce_or", input)
    return _along("reduce_or", input, axis, keep_dims, np.bitwise_or.reduce)


def _indexed_extremum(
    source: tensor, axis: Any, keep_dims: bool, name: str
) -> tuple[tensor, tensor]:
    if plain(axis) is None:
        source, axis = reshape(source, (source.numel,)), 0
    at = _axis_of(source, axis)
    values = source.data
    pick = np.argmax if name == "max" else np.argmin
    if source.dtype.is_floating() and np.isnan(values).any():
        # A NaN is neither greater nor smaller: it is picked only where there is nothing else.
        values = np.where(np.isnan(values), -np.inf if name == "max" else np.inf, values)
    index = pick(values, axis=at + 1)
    best = np.take_along_axis(source.data, np.expand_dims(index, at + 1), at + 1)
    shape = tuple(1 if i == at else n for i, n in enumerate(source.shape) if keep_dims or i != at)
    found = tensor(best.reshape(-1, *shape), source.dtype, shape)
    where_ = tensor(index.astype(np.int32).reshape(-1, *shape), t.int32, shape)
    if active().observer is not None:
        note_math("arg" + name, where_, (source,), source.numel)
        found.token = where_.token
    return found, where_


def extremum_type(type_: dtype) -> dtype:
    """fp32 or int32 of narrower types; int32 of unsigned integers, too, as in Triton."""
    if type_.primitive_bitwidth >= 32:
        return type_
    return t.float32 if type_.is_floating() else t.int32


def _extremum(name: str, word: str) -> Callable[..., Any]:
    def extremum(
        input: Any,
        axis: Any = None,
        return_indices: bool = False,
        return_indices_tie_break_left: bool = True,
        keep_dims: bool = False,
    ) -> tensor | tuple[tensor, tensor]:
        del return_indices_tie_break_left
        source = to_tensor(input)
        if plain(return_indices):
            return _indexed_extremum(source, axis, keep_dims, name)
        source = in_type(source, extremum_type(source.dtype))
        whole = source.dtype.is_int()
        function = {
            "max": np.maximum.reduce if whole else np.fmax.reduce,
            "min": np.minimum.reduce if whole else np.fmin.reduce,
        }[name]
        return _along(name, source, axis, keep_dims, function)

    extremum.__name__ = extremum.__qualname__ = name
    extremum.__doc__ = f"The {word} element along an axis, and on request where it is first."
    return extremum


max = _extremum("max", "greatest")
min = _extremum("min", "smallest")


def argmax(input: Any, axis: Any, tie_break_left: bool = True, keep_dims: bool = False) -> tensor:
    """Where along an axis the greatest element is; the first of equals."""
    del tie_break_left
    index: tensor = _indexed_extremum(to_tensor(input), axis, keep_dims, "max")[1]
    return index


def argmin(input: Any, axis: Any, tie_break_left: bool = True, keep_dims: bool = False) -> tensor:
    """Where along an axis the smallest element is; the first of equals."""
    del tie_break_left
    index: tensor = _indexed_extremum(to_tensor(input), axis, keep_dims, "min")[1]
    return index


def _scan(name: str, source: Any, axis: Any, reverse: bool, function: Any, type_: Any) -> tensor:
    source = to_tensor(source)
    source = in_type(source, sum_type(source.dtype, type_))
    at = _axis_of(source, axis) + 1
    values = source.data
    if plain(reverse):
        values = np.flip(values, at)
    data = function(values, axis=at, dtype=source.dtype.compute)
    if plain(reverse):
        data = np.flip(data, at)
    result = tensor(source.dtype.rounded(data), source.dtype, source.shape)
    if active().observer is not None:
        note_math(name, result, (source,))
    return result


def cumsum(input: Any, axis: Any = 0, reverse: bool = False, dtype: Any = None) -> tensor:
    """Sums of all elements up to each place along an axis."""
    return _scan("cumsum", input, axis, reverse, np.cumsum, dtype)


def cumprod(input: Any, axis: Any = 0, reverse: bool = False, dtype: Any = None) -> tensor:
    """Products of all elements up to each place along an axis."""
    return _scan("cumprod", input, axis, reverse, np.cumprod, dtype)


def _parts(source: Any) -> tuple[tensor, ...]:
    parts = source if isinstance(source, tuple) else (source,)
    if len({part.shape for part in parts}) != 1:
        raise KernelTypeError(
            f"{place()}: blocks that are reduced together have one shape, not "
            + ", ".join(str(list(part.shape)) for part in parts)
        )
    return parts


def _call(combine: Any, mine: list[tensor], theirs: list[tensor]) -> list[tensor]:
    got = combine(*mine, *theirs)
    got = list(got) if isinstance(got, (tuple, list)) else [got]
    # A combine function may promote (int8 + int8): the result has the operands' type all the same.
    return [in_type(to_tensor(new), old.dtype) for new, old in zip(got, mine, strict=True)]


def _cut(part: tensor, axis: int, piece: slice) -> tensor:
    data = part.data[(slice(None),) * (axis + 1) + (piece,)]
    return tensor(data, part.dtype, data.shape[1:], token=part.token)


def reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: bool = False) -> Any:
    """Combine all elements along an axis, or all there are, with a function of two of them."""
    parts = list(_parts(input))
    if plain(axis) is None:
        parts = [reshape(part, (part.numel,)) for part in parts]
        at, full = 0, input[0].shape if isinstance(input, tuple) else input.shape
    else:
        at, full = _axis_of(parts[0], axis), parts[0].shape
    while parts[0].shape[at] > 1:
        size = parts[0].shape[at]
        even = [_cut(part, at, slice(0, size - size % 2, 2)) for part in parts]
        odd = [_cut(part, at, slice(1, None, 2)) for part in parts]
        paired = _call(combine_fn, even, odd)
        if size % 2:
            last = [_cut(part, at, slice(size - 1, None)) for part in parts]
            paired = [_glued(pair, rest, at) for pair, rest in zip(paired, last, strict=True)]
        parts = paired
    if plain(axis) is None:
        shape: tuple[int, ...] = (1,) * len(full) if keep_dims else ()
    else:
        shape = tuple(1 if i == at else n for i, n in enumerate(full) if keep_dims or i != at)
    results = tuple(reshape(part, shape) for part in parts)
    return results if isinstance(input, tuple) else results[0]


def _glued(left: tensor, right: tensor, axis: int) -> tensor:
    rows = np.maximum(len(left.data), len(right.data))
    sides = [np.broadcast_to(side.data, (rows, *side.shape)) for side in (left, right)]
    data = np.concatenate(sides, axis=axis + 1)
    return tensor(data, left.dtype, data.shape[1:], token=left.token)


def associative_scan(input: Any, axis: Any, combine_fn: Any, reverse: bool = False) -> Any:
    """Combine the elements up to each place along an axis."""
    parts = list(_parts(input))
    at = _axis_of(parts[0], axis)
    size = parts[0].shape[at]
    backwards = slice(None, None, -1)
    if plain(reverse):
        parts = [_cut(part, at, backwards) for part in parts]
    distance = 1
    while distance < size:
        earlier = [_cut(part, at, slice(0, size - distance)) for part in parts]
        later = [_cut(part, at, slice(distance, None)) for part in parts]
        kept = [_cut(part, at, slice(0, distance)) for part in parts]
        done = _call(combine_fn, earlier, later)
        parts = [_glued(head, tail, at) for head, tail in zip(kept, done, strict=True)]
        distance *= 2
    if plain(reverse):
        parts = [_cut(part, at, backwards) for part in parts]
    return tuple(parts) if isinstance(input, tuple) else parts[0]


def sort(x: tensor, dim: int | None = None, descending: bool = False) -> tensor:
    """The elements along an axis (the last) in order."""
    at = len(x.shape) - 1 if plain(dim) is None else _axis_of(x, dim)
    data = np.sort(x.data, axis=at + 1)
    if plain(descending):
        data = np.flip(data, at + 1)
    return tensor(data, x.dtype, x.shape, token=x.token)


def topk(x: tensor, k: int, dim: int | None = None, descending: bool = True) -> tensor:
    """The `k` greatest elements along the last axis, the greatest first; or the smallest."""
    at = len(x.shape) - 1 if plain(dim) is None else _axis_of(x, dim)
    # Triton picks by `max` and `min`, which have the wider types.
    kept = in_type(sort(x, at, descending), extremum_type(x.dtype))
    return _cut(kept, at, slice(0, plain(k)))


def bitonic_merge(x: tensor, dim: int | None = None, descending: bool = False) -> tensor:
    """Sort along the last axis what rises and then falls, or falls and then rises."""
    at = len(x.shape) - 1
    if plain(dim) not in (None, at):
        raise KernelValueError(f"{place()}: bitonic_merge sorts the last axis, not axis {dim}")
    size = x.shape[at]
    while size > 1:
        pairs = reshape(x, (*x.shape[:at], x.shape[at] // size, 2, size // 2))
        first, second = (_cut(pairs, at + 1, slice(half, half + 1)) for half in (0, 1))
        low, high = functions.minimum(first, second), functions.maximum(first, second)
        halves = (high, low) if plain(descending) else (low, high)
        x = reshape(_glued(*halves, at + 1), x.shape)
        size //= 2
    return x


def histogram(input: tensor, num_bins: int, mask: Any = None) -> tensor:
    """How often each of 0 … num_bins-1 occurs; as in Triton, other values count nowhere."""
    bins = plain(num_bins)
    if not input.dtype.is_int() or input.dtype.primitive_bitwidth != 32:
        raise KernelTypeError(f"{place()}: histogram counts 32-bit integers, not {input.dtype}")
    values = input.data.reshape(len(input.data), -1).astype(np.int64)
    counted = (values >= 0) & (values < bins)
    if mask is not None:
        counted = counted & broadcast_to(mask, input.shape).data.reshape(-1, values.shape[1])
    rows = len(counted)
    values = np.broadcast_to(values, counted.shape)
    places = (np.arange(rows)[:, None] * bins + values)[counted]
    data = np.bincount(places, minlength=rows * bins).reshape(rows, bins).astype(np.int32)
    return tensor(data, t.int32, (bins,), token=input.token)


def softmax(
    x: tensor, dim: int | None = None, keep_dims: bool | None = None, ieee_rounding: bool = False
) -> tensor:
    """The exponentials along an axis, divided by their sum."""
    del keep_dims, ieee_rounding
    at = 0 if plain(dim) is None else plain(dim)
    shifted = x - max(x, at, keep_dims=True)
    numerator = functions.exp(shifted)
    return numerator / sum(numerator, at, keep_dims=True)


__all__ = [
    "argmax", "argmin", "associative_scan", "bitonic_merge", "cumprod", "cumsum", "histogram",
    "max", "min", "reduce", "reduce_or", "softmax", "sort", "sum", "topk", "xor_sum",
]  # fmt: skip
