"""What the operations compute: the very additions of gloo, in gloo's order.

gloo's all_reduce is a ring. The flat tensor is cut into one block per rank; block b begins at rank
b - 1, goes on to rank b - 2, and each rank on its way adds what it has, up to rank b. Where the
blocks are cut follows from gloo's segments. Sums of floats depend on that order, so a training that
is to be equal to one over gloo, bit for bit, has to add like this. The conformance tests compare
it with gloo itself, for sizes around every border.

Everything here runs outside of the caller's autograd and dispatch modes, and on the data of
tensors, so that no version counter moves: that is how a backend in C++ sees them.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import (
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    _DisableTorchDispatch,
    _ExcludeDispatchKeyGuard,
)
from torch.distributed import ReduceOp

_SEGMENT_BYTES_MAX = 1 << 20
"""gloo's `kMaxSegmentSize`."""
_SMALL_BLOCK = 4_096
"""Elements up to which an operation costs more than its additions."""

_NUMBERS_AT_ONCE = 1 << 17
"""As many as stay in a cache."""

Combine = Callable[[Tensor, Tensor], Tensor]


_OF_AUTOGRAD = reduce(
    or_,
    map(
        DispatchKeySet,
        (
            DispatchKey.ADInplaceOrView, DispatchKey.AutogradFunctionality,
            DispatchKey.AutogradNestedTensor, DispatchKey.AutogradOther,
        ),
    ),
)  # fmt: skip
"""What a backend in C++ is called below of."""


def plainly(compute: Callable[..., None], *args: Any) -> None:
    """Compute as C++ does below all modes: without history, and no version counter moves."""
    with _DisableTorchDispatch(), DisableTorchFunction(), _ExcludeDispatchKeyGuard(_OF_AUTOGRAD):
        compute(*args)


@lru_cache(maxsize=256)
def block_elements(element_count: int, element_bytes: int, size: int) -> int:
    """How many elements gloo gives to each rank's block; the last blocks may be cut, or empty."""
    total = element_count * element_bytes
    segments = max(-(-total // _SEGMENT_BYTES_MAX), 2 * size)
    per_rank = -(-segments // size)
    segment_bytes = _rounded_up(-(-total // (per_rank * size)), element_bytes)
    return per_rank * segment_bytes // element_bytes


def ring_reduced(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """The reduction of equal tensors, one per rank, as gloo's ring computes it; it is flat."""
    kind = op_number(op)
    if kind == PREMUL_SUM:  # NCCL's alone: each rank's numbers are scaled before the sum
        _, factor = op.__getstate__()
        tensors, kind = [tensor * factor for tensor in tensors], _SUM
    size, first = len(tensors), tensors[0]
    if kind in _OF_BITS and first.is_floating_point():
        raise RuntimeError(f"Cannot use ReduceOp.{op_name(kind).upper()} with non-integral dtype")
    length = block_elements(first.numel(), first.element_size(), size)
    if size == 1:
        result = first.reshape(-1).clone()
    elif length <= _SMALL_BLOCK:
        result = _all_blocks_at_once(tensors, length, kind)
    else:
        flats = [tensor.reshape(-1) for tensor in tensors]
        result = _block_by_block(flats, length, _COMBINE[kind])
    if kind == _AVG:  # equal, and yet another object
        result.div_(size)
    return result


def _all_blocks_at_once(tensors: Sequence[Tensor], length: int, kind: int) -> Tensor:
    """Put what each number gets in each step of the ring into a row, and add the rows."""
    size, count = len(tensors), tensors[0].numel()
    stacked, fold = torch.stack(tensors), _FOLD.get(kind)
    # A row has two numbers at least: numpy adds pairwise along rows, and row after row otherwise.
    if fold is None or count == 1 or stacked.dtype is torch.bfloat16:
        rows = stacked.view(-1)[torch.from_numpy(_order_of_ring(size, count, length, 0, count))]
        combine, result = _COMBINE[kind], rows[0]
        for row in rows[1:]:
            combine(result, row)
        return result
    numbers = stacked.numpy().reshape(-1)
    result = np.empty(count, numbers.dtype)
    step = max(2, _NUMBERS_AT_ONCE // size)
    with np.errstate(all="ignore"):  # as torch
        for begin in range(0, count, step):
            begin, end = min(begin, count - 2), min(begin + step, count)  # noqa: PLW2901  # two at least
            rows = numbers[_order_of_ring(size, count, length, begin, end)]
            fold(rows, axis=0, dtype=rows.dtype, out=result[begin:end])
    return torch.from_numpy(result)


@lru_cache(maxsize=8)
def _order_of_ring(size: int, count: int, length: int, begin: int, end: int) -> Any:
    """Which of all ranks' numbers is added in which step, for some places of the result."""
    place = np.arange(begin, end)
    return (place // length - 1 - np.arange(size)[:, None]) % size * count + place


def _block_by_block(flats: Sequence[Tensor], length: int, combine: Combine) -> Tensor:
    """Go around the ring with each block, without copies of large tensors."""
    size, result = len(flats), flats[0].clone()
    for block in range(size):
        part = slice(block * length, (block + 1) * length)
        result[part] = flats[(block - 1) % size][part]
        for step in range(2, size + 1):
            combine(result[part], flats[(block - step) % size][part])
    return result


def add_sparse(tensors: Sequence[Tensor], op: Any) -> None:
    """Give each rank the sum of all sparse tensors, rank by rank as gloo adds them."""
    if op_number(op) != _SUM:
        raise RuntimeError(f"all_reduce of sparse tensors can sum, and not {op_name(op)}")
    total = tensors[0].clone()
    for each in tensors[1:]:
        total = total + each
    for each in tensors:
        each.copy_(total.coalesce())


def op_name(op: Any) -> str:
    """Name it for people: `sum`, `max`."""
    return name_of_reduction(op_number(op))


def op_number(op: Any) -> int:
    """The number of its kind, of whichever type torch hands it over: what C++ hashes it to."""
    return hash(op)


@cache
def name_of_reduction(number: int) -> str:
    """Name the kind of reduction with a number for people."""
    return str(ReduceOp.RedOpType(number)).rpartition(".")[2].lower()


def data_of(tensor: Tensor) -> Tensor:
    """The tensor's values without its history: writing them moves no version counter."""
    return tensor.detach() if tensor.is_inference() else tensor.data


def flat_of(tensor: Tensor) -> Tensor:
    """The values in one dimension; a copy only if they are not contiguous."""
    return data_of(tensor).reshape(-1)


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _maximum(into: Tensor, other: Tensor) -> Tensor:
    return torch.maximum(other, into, out=into)


def _minimum(into: Tensor, other: Tensor) -> Tensor:
    return torch.minimum(other, into, out=into)


_SUM, _AVG, PREMUL_SUM = map(op_number, (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM))
OF_COMPLEX = frozenset((_SUM, _AVG, PREMUL_SUM))
"""Reductions that backends do with complex numbers, as pairs of real ones."""
_OF_BITS = frozenset(map(op_number, (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)))

_FOLD: dict[int, Callable[..., Any]] = {
    _SUM: np.add.reduce, _AVG: np.add.reduce, op_number(ReduceOp.PRODUCT): np.multiply.reduce,
}  # fmt: skip
"""What numpy does to the bit as torch, in one call for all rows."""

_COMBINE: dict[int, Combine] = {
    _SUM: Tensor.add_,
    _AVG: Tensor.add_,
    op_number(ReduceOp.PRODUCT): Tensor.mul_,
    op_number(ReduceOp.MIN): _minimum,
    op_number(ReduceOp.MAX): _maximum,
    op_number(ReduceOp.BAND): Tensor.bitwise_and_,
    op_number(ReduceOp.BOR): Tensor.bitwise_or_,
    op_number(ReduceOp.BXOR): Tensor.bitwise_xor_,
}
