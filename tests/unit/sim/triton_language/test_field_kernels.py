"""Kernels as the field writes them, unmodified but for the imports, against numpy."""

from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl
from rankwise.sim.triton.tools.tensor_descriptor import TensorDescriptor

RANDOM = np.random.default_rng(20)


@triton.jit
def add_kernel(
    x_ptr: Any, y_ptr: Any, output_ptr: Any, n_elements: Any, BLOCK_SIZE: tl.constexpr
) -> None:
    pid = tl.program_id(axis=0)
    block_start = pid * BLOCK_SIZE
    offsets = block_start + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(output_ptr + offsets, x + y, mask=mask)


@pytest.mark.parametrize("size", [1, 1000, 1024, 98_432])
def test_vector_addition_gives_every_element(size: int) -> None:
    x, y = RANDOM.random(size, np.float32), RANDOM.random(size, np.float32)
    out = np.full(size, np.nan, np.float32)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(size, meta["BLOCK_SIZE"]),)

    add_kernel[grid](x, y, out, size, BLOCK_SIZE=1024)

    assert (out == x + y).all()


@triton.jit
def softmax_kernel(
    output_ptr: Any,
    input_ptr: Any,
    input_row_stride: Any,
    output_row_stride: Any,
    n_rows: Any,
    n_cols: Any,
    BLOCK_SIZE: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    row_start = tl.program_id(0)
    row_step = tl.num_programs(0)
    for row_idx in tl.range(row_start, n_rows, row_step, num_stages=num_stages):
        row_start_ptr = input_ptr + row_idx * input_row_stride
        col_offsets = tl.arange(0, BLOCK_SIZE)
        input_ptrs = row_start_ptr + col_offsets
        mask = col_offsets < n_cols
        row = tl.load(input_ptrs, mask=mask, other=-float("inf"))
        row_minus_max = row - tl.max(row, axis=0)
        numerator = tl.exp(row_minus_max)
        denominator = tl.sum(numerator, axis=0)
        softmax_output = numerator / denominator
        output_row_start_ptr = output_ptr + row_idx * output_row_stride
        tl.store(output_row_start_ptr + col_offsets, softmax_output, mask=mask)


@pytest.mark.parametrize("programs", [1, 7, 123, 200])
def test_a_persistent_softmax_gives_the_same_with_any_number_of_programs(programs: int) -> None:
    x = RANDOM.standard_normal((123, 781)).astype(np.float32)
    out = np.empty_like(x)

    softmax_kernel[(programs, 1, 1)](out, x, 781, 781, 123, 781, BLOCK_SIZE=1024, num_stages=4)

    expected = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(out, expected / expected.sum(1, keepdims=True), rtol=1e-5)


@triton.jit
def leaky_relu(x: Any) -> Any:
    return tl.where(x >= 0, x, 0.01 * x)


@triton.autotune(
    configs=[
        triton.Config(
            {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 4},
            num_stages=4,
            num_warps=4,
        ),
        triton.Config(
            {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 8}
        ),
    ],
    key=["M", "N", "K"],
)
@triton.jit
def matmul_kernel(
    a_ptr: Any,
    b_ptr: Any,
    c_ptr: Any,
    M: Any,
    N: Any,
    K: Any,
    stride_am: Any,
    stride_ak: Any,
    stride_bk: Any,
    stride_bn: Any,
    stride_cm: Any,
    stride_cn: Any,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    pid = tl.program_id(axis=0)
    num_pid_m = tl.cdiv(M, BLOCK_SIZE_M)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE_N)
    num_pid_in_group = GROUP_SIZE_M * num_pid_n
    group_id = pid // num_pid_in_group
    first_pid_m = group_id * GROUP_SIZE_M
    group_size_m = min(num_pid_m - first_pid_m, GROUP_SIZE_M)
    pid_m = first_pid_m + ((pid % num_pid_in_group) % group_size_m)
    pid_n = (pid % num_pid_in_group) // group_size_m
    tl.assume(pid_m >= 0)
    tl.assume(stride_am > 0)
    offs_am = (pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    offs_bn = (pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    offs_k = tl.arange(0, BLOCK_SIZE_K)
    a_ptrs = a_ptr + (offs_am[:, None] * stride_am + offs_k[None, :] * stride_ak)
    b_ptrs = b_ptr + (offs_k[:, None] * stride_bk + offs_bn[None, :] * stride_bn)
    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_SIZE_K)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_SIZE_K, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_SIZE_K, other=0.0)
        accumulator = tl.dot(a, b, accumulator)
        a_ptrs += BLOCK_SIZE_K * stride_ak
        b_ptrs += BLOCK_SIZE_K * stride_bk
    if ACTIVATION == "leaky_relu":
        accumulator = leaky_relu(accumulator)
    c = accumulator.to(tl.float16)
    offs_cm = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    offs_cn = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    c_ptrs = c_ptr + stride_cm * offs_cm[:, None] + stride_cn * offs_cn[None, :]
    c_mask = (offs_cm[:, None] < M) & (offs_cn[None, :] < N)
    tl.store(c_ptrs, c, mask=c_mask)


@pytest.mark.parametrize(("m", "n", "k"), [(128, 128, 64), (200, 100, 72), (33, 65, 17)])
@pytest.mark.parametrize("activation", ["", "leaky_relu"])
def test_matmul_in_grouped_order_is_right_for_even_and_odd_sizes(
    m: int, n: int, k: int, activation: str
) -> None:
    a = RANDOM.standard_normal((m, k)).astype(np.float16)
    b = RANDOM.standard_normal((n, k)).astype(np.float16).T
    c = np.full((m, n), np.nan, np.float16)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(m, meta["BLOCK_SIZE_M"]) * triton.cdiv(n, meta["BLOCK_SIZE_N"]),)

    matmul_kernel[grid](a, b, c, m, n, k, k, 1, 1, k, n, 1, ACTIVATION=activation)

    expected = a.astype(np.float32) @ b.astype(np.float32)
    if activation:
        expected = np.where(expected >= 0, expected, 0.01 * expected)
    np.testing.assert_allclose(c.astype(np.float32), expected, rtol=1e-3, atol=1e-3)


@triton.jit
def layer_norm_forward(
    X: Any, Y: Any, W: Any, B: Any, Mean: Any, Rstd: Any, stride: Any, N: Any, eps: Any,
    BLOCK_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    Y += row * stride
    X += row * stride
    mean = 0
    _mean = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        a = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        _mean += a
    mean = tl.sum(_mean, axis=0) / N
    _var = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        x = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = tl.where(cols < N, x - mean, 0.0)
        _var += x * x
    var = tl.sum(_var, axis=0) / N
    rstd = 1 / tl.sqrt(var + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        mask = cols < N
        w = tl.load(W + cols, mask=mask)
        b = tl.load(B + cols, mask=mask)
        x = tl.load(X + cols, mask=mask, other=0.0).to(tl.float32)
        x_hat = (x - mean) * rstd
        tl.store(Y + cols, x_hat * w + b, mask=mask)


@triton.jit
def layer_norm_backward(
    DX: Any, DY: Any, DW: Any, DB: Any, X: Any, W: Any, Mean: Any, Rstd: Any, Lock: Any,
    stride: Any, N: Any, GROUP_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE_N)
    mask = cols < N
    X += row * stride
    DY += row * stride
    DX += row * stride
    lock_id = row % GROUP_SIZE_M
    Lock += lock_id
    Count = Lock + GROUP_SIZE_M
    DW = DW + lock_id * N + cols
    DB = DB + lock_id * N + cols
    x = tl.load(X + cols, mask=mask, other=0).to(tl.float32)
    dy = tl.load(DY + cols, mask=mask, other=0).to(tl.float32)
    w = tl.load(W + cols, mask=mask).to(tl.float32)
    mean = tl.load(Mean + row)
    rstd = tl.load(Rstd + row)
    xhat = (x - mean) * rstd
    wdy = w * dy
    xhat = tl.where(mask, xhat, 0.0)
    wdy = tl.where(mask, wdy, 0.0)
    c1 = tl.sum(xhat * wdy, axis=0) / N
    c2 = tl.sum(wdy, axis=0) / N
    dx = (wdy - (xhat * c1 + c2)) * rstd
    tl.store(DX + cols, dx, mask=mask)
    partial_dw = (dy * xhat).to(w.dtype)
    partial_db = dy.to(w.dtype)
    while tl.atomic_cas(Lock, 0, 1) == 1:
        pass
    count = tl.load(Count)
    if count == 0:
        tl.atomic_xchg(Count, 1)
    else:
        partial_dw += tl.load(DW, mask=mask)
        partial_db += tl.load(DB, mask=mask)
    tl.store(DW, partial_dw, mask=mask)
    tl.store(DB, partial_db, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(Lock, 0)


def test_layer_norm_is_right_forward_and_backward_with_its_locks() -> None:
    rows, n, groups = 37, 300, 4
    x = RANDOM.standard_normal((rows, n)).astype(np.float32)
    w, b = RANDOM.random(n, np.float32), RANDOM.random(n, np.float32)
    dy = RANDOM.standard_normal((rows, n)).astype(np.float32)
    y, dx = np.empty_like(x), np.empty_like(x)
    mean, rstd = np.empty(rows, np.float32), np.empty(rows, np.float32)
    lock = np.zeros(2 * groups, np.int32)
    dw, db = np.zeros((groups, n), np.float32), np.zeros((groups, n), np.float32)

    layer_norm_forward[(rows,)](x, y, w, b, mean, rstd, n, n, 1e-5, BLOCK_SIZE=128)
    layer_norm_backward[(rows,)](
        dx, dy, dw, db, x, w, mean, rstd, lock, n, n, GROUP_SIZE_M=groups, BLOCK_SIZE_N=512
    )

    hat = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    wdy = w * dy
    c1, c2 = (hat * wdy).mean(1, keepdims=True), wdy.mean(1, keepdims=True)
    np.testing.assert_allclose(y, hat * w + b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dx, (wdy - (hat * c1 + c2)) * rstd[:, None], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(dw.sum(0), (dy * hat).sum(0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(db.sum(0), dy.sum(0), rtol=1e-3, atol=1e-4)
    assert lock[:groups].sum() == 0


@triton.jit
def _attention_inner(
    acc: Any, l_i: Any, m_i: Any, q: Any, K_block_ptr: Any, V_block_ptr: Any, start_m: Any,
    qk_scale: Any, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGE: tl.constexpr,
    offs_m: Any, offs_n: Any, N_CTX: Any,
) -> Any:  # fmt: skip
    if STAGE == 1:
        lo, hi = 0, start_m * BLOCK_M
    elif STAGE == 2:
        lo, hi = start_m * BLOCK_M, (start_m + 1) * BLOCK_M
        lo = tl.multiple_of(lo, BLOCK_M)
    else:
        lo, hi = 0, N_CTX
    K_block_ptr = tl.advance(K_block_ptr, (0, lo))
    V_block_ptr = tl.advance(V_block_ptr, (lo, 0))
    for start_n in range(lo, hi, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        k = tl.load(K_block_ptr)
        qk = tl.dot(q, k)
        if STAGE == 2:
            mask = offs_m[:, None] >= (start_n + offs_n[None, :])
            qk = qk * qk_scale + tl.where(mask, 0, -1.0e6)
            m_ij = tl.maximum(m_i, tl.max(qk, 1))
            qk -= m_ij[:, None]
        else:
            m_ij = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
            qk = qk * qk_scale - m_ij[:, None]
        p = tl.math.exp2(qk)
        l_ij = tl.sum(p, 1)
        alpha = tl.math.exp2(m_i - m_ij)
        l_i = l_i * alpha + l_ij
        acc = acc * alpha[:, None]
        v = tl.load(V_block_ptr)
        acc = tl.dot(p.to(tl.float16), v, acc)
        m_i = m_ij
        V_block_ptr = tl.advance(V_block_ptr, (BLOCK_N, 0))
        K_block_ptr = tl.advance(K_block_ptr, (0, BLOCK_N))
    return acc, l_i, m_i


@triton.jit
def attention_forward(
    Q: Any, K: Any, V: Any, sm_scale: Any, M: Any, Out: Any, stride_h: Any, stride_m: Any,
    H: Any, N_CTX: Any, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGE: tl.constexpr,
) -> None:  # fmt: skip
    start_m = tl.program_id(0)
    off_hz = tl.program_id(1)
    base = off_hz.to(tl.int64) * stride_h
    Q_block_ptr = tl.make_block_ptr(
        base=Q + base, shape=(N_CTX, HEAD_DIM), strides=(stride_m, 1),
        offsets=(start_m * BLOCK_M, 0), block_shape=(BLOCK_M, HEAD_DIM), order=(1, 0),
    )  # fmt: skip
    V_block_ptr = tl.make_block_ptr(
        base=V + base, shape=(N_CTX, HEAD_DIM), strides=(stride_m, 1),
        offsets=(0, 0), block_shape=(BLOCK_N, HEAD_DIM), order=(1, 0),
    )  # fmt: skip
    K_block_ptr = tl.make_block_ptr(
        base=K + base, shape=(HEAD_DIM, N_CTX), strides=(1, stride_m),
        offsets=(0, 0), block_shape=(HEAD_DIM, BLOCK_N), order=(0, 1),
    )  # fmt: skip
    O_block_ptr = tl.make_block_ptr(
        base=Out + base, shape=(N_CTX, HEAD_DIM), strides=(stride_m, 1),
        offsets=(start_m * BLOCK_M, 0), block_shape=(BLOCK_M, HEAD_DIM), order=(1, 0),
    )  # fmt: skip
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    m_i = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32) + 1.0
    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    qk_scale = sm_scale * 1.44269504
    q = tl.load(Q_block_ptr)
    if STAGE & 1:
        acc, l_i, m_i = _attention_inner(
            acc, l_i, m_i, q, K_block_ptr, V_block_ptr, start_m, qk_scale, BLOCK_M, BLOCK_N,
            4 - STAGE, offs_m, offs_n, N_CTX,
        )  # fmt: skip
    if STAGE & 2:
        acc, l_i, m_i = _attention_inner(
            acc, l_i, m_i, q, K_block_ptr, V_block_ptr, start_m, qk_scale, BLOCK_M, BLOCK_N,
            2, offs_m, offs_n, N_CTX,
        )  # fmt: skip
    m_i += tl.math.log2(l_i)
    acc = acc / l_i[:, None]
    tl.store(M + off_hz * N_CTX + offs_m, m_i)
    tl.store(O_block_ptr, acc.to(Out.type.element_ty))


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_is_the_attention_that_numpy_calculates(causal: bool) -> None:
    heads, length, width = 3, 128, 16
    q, k, v = (RANDOM.standard_normal((heads, length, width)).astype(np.float16) for _ in range(3))
    out, maxima = np.empty_like(q), np.empty((heads, length), np.float32)

    attention_forward[(length // 32, heads)](
        q, k, v, 0.25, maxima, out, length * width, width, heads, length,
        HEAD_DIM=width, BLOCK_M=32, BLOCK_N=16, STAGE=3 if causal else 1,
    )  # fmt: skip

    scores = np.einsum("hmd,hnd->hmn", q.astype(np.float32), k.astype(np.float32)) * 0.25
    if causal:
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("hmn,hnd->hmd", weights, v.astype(np.float32))
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=4e-3)


@triton.jit
def dropout_kernel(
    x_ptr: Any, output_ptr: Any, n: Any, p: Any, seed: Any, BLOCK_SIZE: tl.constexpr
) -> None:
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    x_keep = tl.rand(seed, offsets) > p
    tl.store(output_ptr + offsets, tl.where(x_keep, x / (1 - p), 0.0), mask=mask)


def test_dropout_depends_on_the_seed_alone() -> None:
    x = np.ones(5000, np.float32)
    runs = [np.empty_like(x) for _ in range(3)]

    for out, seed, block in zip(runs, (7, 7, 8), (1024, 256, 1024), strict=True):
        dropout_kernel[(triton.cdiv(5000, block),)](x, out, 5000, 0.25, seed, BLOCK_SIZE=block)

    assert (runs[0] == runs[1]).all()
    assert (runs[0] != runs[2]).any()
    assert abs((runs[0] > 0).mean() - 0.75) < 0.03


@triton.jit
def persistent_descriptor_matmul(
    a_desc: Any, b_ptr: Any, c_ptr: Any, M: Any, N: Any, K: Any, BLOCK: tl.constexpr
) -> None:
    b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BLOCK, BLOCK])
    c_desc = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BLOCK, BLOCK])
    columns = tl.cdiv(N, BLOCK)
    tiles = tl.cdiv(M, BLOCK) * columns
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, column = (tile // columns) * BLOCK, (tile % columns) * BLOCK
        acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for k in range(tl.cdiv(K, BLOCK)):
            a = a_desc.load([row, k * BLOCK])
            b = b_desc.load([column, k * BLOCK])
            acc = tl.dot(a, b.T, acc)
        c_desc.store([row, column], acc.to(tl.float32))


@pytest.mark.parametrize("programs", [1, 4, 20])
def test_a_persistent_matmul_with_descriptors_is_right_at_the_edges(programs: int) -> None:
    m, n, k = 70, 52, 40  # rows of a descriptor are multiples of 16 bytes
    a = RANDOM.standard_normal((m, k)).astype(np.float16)
    b = RANDOM.standard_normal((n, k)).astype(np.float16)
    c = np.full((m, n), np.nan, np.float32)

    descriptor = TensorDescriptor.from_tensor(a, [16, 16])
    persistent_descriptor_matmul[(programs,)](descriptor, b, c, m, n, k, BLOCK=16)

    np.testing.assert_allclose(
        c, a.astype(np.float32) @ b.astype(np.float32).T, rtol=1e-4, atol=1e-4
    )


@triton.jit
def grouped_scale(pointers: Any, sizes: Any, factor: Any, BLOCK: tl.constexpr) -> None:
    group = tl.program_id(0)
    base = tl.load(pointers + group).to(tl.pointer_type(tl.float32))
    size = tl.load(sizes + group)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(base + at, tl.load(base + at, mask=at < size) * factor, mask=at < size)


def test_pointers_that_were_loaded_from_memory_reach_their_arrays() -> None:
    arrays = [RANDOM.random(size, np.float32) for size in (100, 7, 64)]
    before = [array.copy() for array in arrays]
    pointers = np.array([array.ctypes.data for array in arrays], np.int64)
    sizes = np.array([array.size for array in arrays], np.int32)

    @triton.jit
    def kernel(pointers: Any, sizes: Any, a: Any, b: Any, c: Any, BLOCK: tl.constexpr) -> None:
        grouped_scale(pointers, sizes, 2.0, BLOCK)

    kernel[(3,)](pointers, sizes, *arrays, BLOCK=32)

    for array, old in zip(arrays, before, strict=True):
        assert (array == old * 2).all()


@triton.jit
def copy_kernel(src: tl.const, dst: Any, n: Any, BLOCK_SIZE: tl.constexpr) -> None:
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(dst + offsets, tl.load(src + offsets, mask=offsets < n), mask=offsets < n)


def test_a_pointer_to_constants_is_an_array_as_others_are() -> None:
    source, target = RANDOM.random(100, np.float32), np.zeros(100, np.float32)

    copy_kernel[(2,)](source, target, 100, BLOCK_SIZE=64)

    assert (source == target).all()
