"""The kernels of the parallel layers, in the kernel language."""

from typing import Any

import rankwise.sim.triton.language as tl
from rankwise.sim.triton import jit


@jit
def linear_kernel(  # noqa: PLR0917 (kernels take their arguments in order)
    x: Any,
    weight: Any,
    bias: Any,
    y: Any,
    m: int,
    n: int,
    k: int,
    has_bias: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """`y = x @ weight.T + bias`, a tile of `y` per program; accumulated in f32."""
    program = tl.program_id(0)
    tiles = tl.cdiv(n, block_n)
    rows = program // tiles * block_m + tl.arange(0, block_m)
    columns = program % tiles * block_n + tl.arange(0, block_n)
    depth = tl.arange(0, block_k)
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for start in range(0, k, block_k):
        inner = start + depth
        left = tl.load(
            x + rows[:, None] * k + inner[None, :],
            mask=(rows[:, None] < m) & (inner[None, :] < k),
            other=0.0,
        )
        right = tl.load(
            weight + columns[None, :] * k + inner[:, None],
            mask=(columns[None, :] < n) & (inner[:, None] < k),
            other=0.0,
        )
        total = tl.dot(left, right, total)
    if has_bias:
        total += tl.load(bias + columns, mask=columns < n, other=0.0)[None, :]
    tl.store(
        y + rows[:, None] * n + columns[None, :],
        total.to(y.dtype.element_ty),
        mask=(rows[:, None] < m) & (columns[None, :] < n),
    )


@jit
def copy_columns_kernel(  # noqa: PLR0917 (kernels take their arguments in order)
    source: Any,
    target: Any,
    columns: int,
    source_stride: int,
    target_stride: int,
    source_start: int,
    target_start: int,
    block: tl.constexpr,
) -> None:
    """Copy some columns of one matrix to columns of another, a row per program; cast as needed."""
    row = tl.program_id(0)
    for start in range(0, columns, block):
        column = start + tl.arange(0, block)
        inside = column < columns
        values = tl.load(source + source_start + row * source_stride + column, mask=inside)
        tl.store(
            target + target_start + row * target_stride + column,
            values.to(target.dtype.element_ty),
            mask=inside,
        )


@jit
def add_bias_kernel(  # noqa: PLR0917 (kernels take their arguments in order)
    x: Any, bias: Any, y: Any, columns: int, has_bias: tl.constexpr, block: tl.constexpr
) -> None:
    """`y = x + bias`, a row per program; cast to the type of `y`."""
    row = tl.program_id(0)
    for start in range(0, columns, block):
        column = start + tl.arange(0, block)
        inside = column < columns
        values = tl.load(x + row * columns + column, mask=inside)
        if has_bias:
            values = values + tl.load(bias + column, mask=inside)
        tl.store(y + row * columns + column, values.to(y.dtype.element_ty), mask=inside)


@jit
def embedding_kernel(  # noqa: PLR0917 (kernels take their arguments in order)
    ids: Any, weight: Any, y: Any, first: int, last: int, width: int, block: tl.constexpr
) -> None:
    """Row `ids[i] - first` of the weight for ids from `first` to `last`, and zeros for others."""
    token = tl.program_id(0)
    word = tl.load(ids + token)
    is_here = (word >= first) & (word < last)
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        inside = column < width
        values = tl.load(weight + (word - first) * width + column, mask=inside & is_here, other=0.0)
        tl.store(y + token * width + column, values, mask=inside)
