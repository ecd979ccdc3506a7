"""`map_elementwise`: a function of single elements, which may decide by them."""

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.dtypes import Array
from rankwise.sim.triton.execution import active, note_math
from rankwise.sim.triton.tensor import broadcast_shape, broadcast_to, tensor, to_tensor


def map_elementwise(scalar_fn: Callable[..., Any], *args: Any, pack: int = 1) -> Any:
    """Apply a function to the elements of blocks, or to `pack` neighbours of each at a time.

    It is called for each of them in turn.
    """
    size = plain(pack)
    blocks, shape = _broadcast(args)
    columns = _columns(blocks, prod(shape))
    found: list[list[tensor]] = []
    for start in range(0, columns[0].size, size):
        elements = [
            tensor(values[at : at + 1], block.dtype, ())
            for values, block in zip(columns, blocks, strict=True)
            for at in range(start, start + size)
        ]
        got = scalar_fn(*elements)
        found.append([to_tensor(each) for each in (got if isinstance(got, tuple) else (got,))])
    results = [_collected(found, at, size, shape) for at in range(0, len(found[0]), size)]
    if active().observer is not None:
        for result in results:
            note_math("map_elementwise", result, blocks)
    return results[0] if len(results) == 1 else tuple(results)


def _broadcast(args: tuple[Any, ...]) -> tuple[list[tensor], tuple[int, ...]]:
    blocks = [to_tensor(arg) for arg in args]
    shape = blocks[0].shape
    for block in blocks[1:]:
        shape = broadcast_shape(shape, block.shape)
    return [broadcast_to(block, shape) for block in blocks], shape


def _columns(blocks: list[tensor], count: int) -> list[Array]:
    """Each block's elements in a row, of all programs one after the other."""
    programs = max(len(block.data) for block in blocks)
    flat = [block.data.reshape(-1, count) for block in blocks]
    return [np.broadcast_to(each, (programs, count)).reshape(-1) for each in flat]


def _collected(found: list[list[tensor]], at: int, size: int, shape: tuple[int, ...]) -> tensor:
    data = np.concatenate([each.data for row in found for each in row[at : at + size]])
    return tensor(data.reshape(-1, *shape), found[0][at].dtype, shape)
