# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The kernels of the benches, written as Triton has them: no types, constants in capitals."""

from rankwise.sim import triton
from rankwise.sim.triton import language as tl


@triton.jit
def gemm_kernel(
    a_ptr, b_ptr, c_ptr, m, n, k,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """One tile of C = A B."""
    tiles_n = tl.cdiv(n, TILE_N)
    rows = tl.program_id(0) // tiles_n * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(0) % tiles_n * TILE_N + tl.arange(0, TILE_N)
    inner = tl.arange(0, TILE_K)
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for start in range(0, k, TILE_K):
        depth = start + inner
        a = tl.load(
            a_ptr + rows[:, None] * k + depth[None, :],
            mask=(rows[:, None] < m) & (depth[None, :] < k),
            other=0.0,
        )
        b = tl.load(
            b_ptr + depth[:, None] * n + columns[None, :],
            mask=(depth[:, None] < k) & (columns[None, :] < n),
            other=0.0,
        )
        total = tl.dot(a, b, total)
    tl.store(
        c_ptr + rows[:, None] * n + columns[None, :],
        total,
        mask=(rows[:, None] < m) & (columns[None, :] < n),
    )


@triton.jit
def softmax_kernel(
    x_ptr, y_ptr, rows, columns, ROWS_PER_PROGRAM: tl.constexpr, WIDTH: tl.constexpr
):
    """Some rows, as one block each."""
    first = tl.program_id(0) * ROWS_PER_PROGRAM
    offsets = tl.arange(0, WIDTH)
    for row in range(first, tl.minimum(first + ROWS_PER_PROGRAM, rows)):
        inside = offsets < columns
        x = tl.load(x_ptr + row * columns + offsets, mask=inside, other=-float("inf"))
        powers = tl.exp(x.to(tl.float32) - tl.max(x, axis=0).to(tl.float32))
        tl.store(y_ptr + row * columns + offsets, powers / tl.sum(powers, axis=0), mask=inside)


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, length, scale,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head against all keys."""
    blocks = tl.cdiv(length, QUERIES)
    head = tl.program_id(0) // blocks * length * WIDTH
    rows = tl.program_id(0) % blocks * QUERIES + tl.arange(0, QUERIES)
    dims = tl.arange(0, WIDTH)
    inside = rows[:, None] < length
    places = head + rows[:, None] * WIDTH + dims[None, :]
    q = tl.load(q_ptr + places, mask=inside, other=0.0)
    highest = tl.full((QUERIES,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    result = tl.zeros((QUERIES, WIDTH), dtype=tl.float32)
    for start in range(0, length, KEYS):
        keys = start + tl.arange(0, KEYS)
        key_places = head + keys[:, None] * WIDTH + dims[None, :]
        k = tl.load(k_ptr + key_places, mask=keys[:, None] < length, other=0.0)
        v = tl.load(v_ptr + key_places, mask=keys[:, None] < length, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(keys[None, :] < length, scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        shrink = tl.exp(highest - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        result = tl.dot(weights.to(q.dtype), v, result * shrink[:, None])
        highest = higher
    tl.store(out_ptr + places, result / total[:, None], mask=inside)


@triton.jit
def stream_kernel(
    a_ptr, b_ptr, c_ptr, count, factor,
    SCALES: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Some blocks that lie beside each other: c = a, factor * a, a + b, or a + factor * b."""
    for block in range(BLOCKS):
        places = (tl.program_id(0) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        inside = places < count
        value = tl.load(a_ptr + places, mask=inside)
        if ADDS:
            other = tl.load(b_ptr + places, mask=inside)
            value = value + (factor * other if SCALES else other)
        elif SCALES:
            value = value * factor
        tl.store(c_ptr + places, value, mask=inside)


@triton.jit
def relu_kernel(x_ptr, count, BLOCK: tl.constexpr):
    """Replace what is negative by zero, in place."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x_ptr + places, mask=places < count)
    tl.store(x_ptr + places, tl.maximum(values, 0.0), mask=places < count)
