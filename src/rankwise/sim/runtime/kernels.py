# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code=arg-type
"""The kernels behind the arithmetic of simulated tensors."""

import rankwise.sim.triton.language as tl
from rankwise.sim.triton import jit
from rankwise.sim.triton.language.extra import libdevice

KEEPS_NAN = tl.constexpr(tl.PropagateNan.ALL)
"""A NaN wins, as in torch; Triton's own choice is that it loses."""


@jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=KEEPS_NAN)


@jit
def _smaller(x, y):
    return tl.minimum(x, y, propagate_nan=KEEPS_NAN)


@jit
def _combined(x, y, OP: tl.constexpr):
    if OP == "add":
        if x.dtype == tl.int1 and y.dtype == tl.int1:
            return x | y  # torch's truth values do not wrap around
        return x + y
    if OP == "sub":
        return x - y
    if OP == "mul":
        return x * y
    if OP == "div":
        return x / y
    if OP == "pow":
        return libdevice.pow(_wide(x), _wide(y).to(_wide(x).dtype))
    if OP == "maximum":
        return _larger(x, y)
    if OP == "minimum":
        return _smaller(x, y)
    if OP == "and":
        return x & y
    if OP == "or":
        return x | y
    if OP == "xor":
        return x ^ y
    if OP == "eq":
        return x == y
    if OP == "ne":
        return x != y
    if OP == "lt":
        return x < y
    if OP == "le":
        return x <= y
    if OP == "gt":
        return x > y
    return x >= y


@jit
def _wide(x):
    """The functions are of fp32 and fp64."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@jit
def _changed(x, OP: tl.constexpr):
    if OP == "neg":
        return -x
    if OP == "abs":
        return tl.abs(x)
    if OP == "exp":
        return tl.exp(_wide(x))
    if OP == "log":
        return tl.log(_wide(x))
    if OP == "sqrt":
        return tl.sqrt(_wide(x))
    if OP == "sigmoid":
        return tl.sigmoid(_wide(x))
    if OP == "relu":
        return _larger(x, tl.zeros_like(x))
    if OP == "not":
        return x == 0
    if OP == "invert":
        return ~x
    return x


@jit
def _places(size_1, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """This program's place along the two outer axes, and its rows and columns of the inner two."""
    tiles_across = tl.cdiv(columns, WIDTH)
    tiles = tl.cdiv(rows, HEIGHT) * tiles_across
    outer = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    row = tile // tiles_across * HEIGHT + tl.arange(0, HEIGHT)
    column = tile % tiles_across * WIDTH + tl.arange(0, WIDTH)
    return outer // size_1, outer % size_1, row[:, None], column[None, :]


@jit
def binary_kernel(
    x_ptr, y_ptr, out_ptr, size_1, rows, columns, x_0, x_1, x_2, x_3, y_0, y_1, y_2, y_3,
    OP: tl.constexpr, KIND: tl.constexpr, Y_IS_NUMBER: tl.constexpr, SWAPPED: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`out = x OP y` over four axes; an operand that repeats along one has stride 0 there."""
    at_0, at_1, row, column = _places(size_1, rows, columns, HEIGHT, WIDTH)
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + at_0 * x_0 + at_1 * x_1 + row * x_2 + column * x_3, mask=inside).to(KIND)
    if Y_IS_NUMBER:
        y = tl.full((1, 1), y_ptr, KIND)
    else:
        places = at_0 * y_0 + at_1 * y_1 + row * y_2 + column * y_3
        y = tl.load(y_ptr + places, mask=inside, other=1).to(KIND)
    result = _combined(y, x, OP) if SWAPPED else _combined(x, y, OP)
    first = (at_0 * size_1 + at_1) * rows * columns
    tl.store(out_ptr + first + row * columns + column, result, mask=inside)


@jit
def unary_kernel(
    x_ptr, out_ptr, size_1, rows, columns, x_0, x_1, x_2, x_3,
    OP: tl.constexpr, KIND: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`out = OP x` over four axes, wherever along them the elements of x lie."""
    at_0, at_1, row, column = _places(size_1, rows, columns, HEIGHT, WIDTH)
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + at_0 * x_0 + at_1 * x_1 + row * x_2 + column * x_3, mask=inside, other=1)
    first = (at_0 * size_1 + at_1) * rows * columns
    tl.store(out_ptr + first + row * columns + column, _changed(x.to(KIND), OP), mask=inside)


@jit
def reduce_kernel(
    x_ptr, out_ptr, length, inner, parts, start, factor,
    OP: tl.constexpr, KIND: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Along the middle of three axes, cut into parts: one result per part, times `factor`."""
    across = tl.cdiv(inner, WIDTH)
    column = tl.program_id(0) % across * WIDTH + tl.arange(0, WIDTH)
    part = tl.program_id(0) // across % parts
    outer = tl.program_id(0) // across // parts
    size = tl.cdiv(length, parts)
    end = tl.minimum(size * (part + 1), length)
    total = tl.full((DEPTH, WIDTH), start, KIND)
    for begin in range(size * part, end, DEPTH):
        row = begin + tl.arange(0, DEPTH)
        inside = (row[:, None] < end) & (column[None, :] < inner)
        places = (outer * length + row[:, None]) * inner + column[None, :]
        x = tl.load(x_ptr + places, mask=inside, other=start).to(KIND)
        if OP == "sum":
            total = total + x
        elif OP == "max":
            total = _larger(total, x)
        else:
            total = _smaller(total, x)
    if OP == "sum":
        result = tl.sum(total, axis=0)
    elif OP == "max":
        result = tl.reduce(total, 0, _larger)
    else:
        result = tl.reduce(total, 0, _smaller)
    if factor != 1:
        result = (result * factor).to(result.dtype)
    tl.store(out_ptr + (outer * parts + part) * inner + column, result, mask=column < inner)


@jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, m, n, k, a_step, b_step,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """One tile of a product of one pair of matrices; pairs are `a_step` and `b_step` apart."""
    across = tl.cdiv(n, TILE_N)
    tiles = tl.cdiv(m, TILE_M) * across
    pair, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    rows = tile // across * TILE_M + tl.arange(0, TILE_M)
    columns = tile % across * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for start in range(0, k, TILE_K):
        depth = start + tl.arange(0, TILE_K)
        a = tl.load(
            a_ptr + pair * a_step + rows[:, None] * k + depth[None, :],
            mask=(rows[:, None] < m) & (depth[None, :] < k),
            other=0.0,
        )
        b = tl.load(
            b_ptr + pair * b_step + depth[:, None] * n + columns[None, :],
            mask=(depth[:, None] < k) & (columns[None, :] < n),
            other=0.0,
        )
        total = tl.dot(a, b, total)
    tl.store(
        c_ptr + pair * m * n + rows[:, None] * n + columns[None, :],
        total,
        mask=(rows[:, None] < m) & (columns[None, :] < n),
    )
