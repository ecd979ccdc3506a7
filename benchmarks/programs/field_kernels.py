"""One kernel of the field, timed: `field_kernels.py LANGUAGE CASE REPETITIONS`, prints seconds.

LANGUAGE is the package whose `jit` and `language` the kernels use: `rankwise.sim.triton`, or
`triton` under TRITON_INTERPRET=1. Each repetition checks the result against numpy.
"""

# mypy: ignore-errors
# The kernels are for two languages, one of which has no types.

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

LANGUAGE, CASE, REPETITIONS = sys.argv[1], sys.argv[2], int(sys.argv[3])
triton: Any = importlib.import_module(LANGUAGE)
tl: Any = importlib.import_module(LANGUAGE + ".language")
constexpr = tl.constexpr
RANDOM = np.random.default_rng(0)


def as_argument(array: Any) -> Any:
    """What this language takes: ours numpy arrays, Triton torch tensors, on the same memory."""
    return array if LANGUAGE != "triton" else importlib.import_module("torch").from_numpy(array)


@triton.jit
def add_kernel(x, y, o, n, B: constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    mask = i < n
    tl.store(o + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


def add() -> tuple[Callable[[], None], Callable[[], bool]]:
    n = 1 << 20
    x, y, o = RANDOM.random(n, np.float32), RANDOM.random(n, np.float32), np.zeros(n, np.float32)
    args = [as_argument(each) for each in (x, y, o)]
    return lambda: add_kernel[(n // 1024,)](*args, n, B=1024), lambda: bool((o == x + y).all())


@triton.jit
def softmax_kernel(o, x, stride, columns, B: constexpr):
    row, column = tl.program_id(0), tl.arange(0, B)
    mask = column < columns
    values = tl.load(x + row * stride + column, mask=mask, other=-float("inf"))
    numerator = tl.exp(values - tl.max(values, axis=0))
    tl.store(o + row * stride + column, numerator / tl.sum(numerator, axis=0), mask=mask)


def softmax() -> tuple[Callable[[], None], Callable[[], bool]]:
    x = RANDOM.standard_normal((1823, 781)).astype(np.float32)
    o = np.zeros_like(x)
    expected = np.exp(x - x.max(1, keepdims=True))
    expected /= expected.sum(1, keepdims=True)
    args = as_argument(o), as_argument(x)
    return (
        lambda: softmax_kernel[(1823,)](*args, 781, 781, B=1024),
        lambda: bool(np.allclose(o, expected, rtol=1e-4)),
    )


@triton.jit
def matmul_kernel(a, b, c, M, N, K, BM: constexpr, BN: constexpr, BK: constexpr, GROUP: constexpr):
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    in_group = GROUP * columns
    first = pid // in_group * GROUP
    height = min(rows - first, GROUP)
    row, column = first + (pid % in_group) % height, (pid % in_group) // height
    offs_m = (row * BM + tl.arange(0, BM)) % M
    offs_n = (column * BN + tl.arange(0, BN)) % N
    offs_k = tl.arange(0, BK)
    a_ptrs = a + (offs_m[:, None] * K + offs_k[None, :])
    b_ptrs = b + (offs_k[:, None] * N + offs_n[None, :])
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        left = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BK, other=0.0)
        right = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BK, other=0.0)
        acc = tl.dot(left, right, acc)
        a_ptrs += BK
        b_ptrs += BK * N
    offs_m, offs_n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(c + offs_m[:, None] * N + offs_n[None, :], acc.to(tl.float16), mask=mask)


def matmul() -> tuple[Callable[[], None], Callable[[], bool]]:
    a, b = (RANDOM.standard_normal((512, 512)).astype(np.float16) for _ in range(2))
    c = np.zeros_like(a)
    expected = a.astype(np.float32) @ b.astype(np.float32)
    args = [as_argument(each) for each in (a, b, c)]
    return (
        lambda: matmul_kernel[(256,)](*args, 512, 512, 512, BM=32, BN=32, BK=32, GROUP=8),
        lambda: bool(np.allclose(c.astype(np.float32), expected, rtol=1e-2, atol=1e-1)),
    )


@triton.jit
def layer_norm_kernel(x, y, w, b, N, eps, B: constexpr):
    row = tl.program_id(0)
    y += row * N
    x += row * N
    total = tl.zeros([B], dtype=tl.float32)
    for off in range(0, N, B):
        cols = off + tl.arange(0, B)
        total += tl.load(x + cols, mask=cols < N, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / N
    squares = tl.zeros([B], dtype=tl.float32)
    for off in range(0, N, B):
        cols = off + tl.arange(0, B)
        values = tl.load(x + cols, mask=cols < N, other=0.0).to(tl.float32)
        values = tl.where(cols < N, values - mean, 0.0)
        squares += values * values
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / N + eps)
    for off in range(0, N, B):
        cols = off + tl.arange(0, B)
        mask = cols < N
        weight = tl.load(w + cols, mask=mask)
        bias = tl.load(b + cols, mask=mask)
        values = tl.load(x + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + cols, (values - mean) * rstd * weight + bias, mask=mask)


def layer_norm() -> tuple[Callable[[], None], Callable[[], bool]]:
    rows, n = 1151, 8192
    x = (RANDOM.standard_normal((rows, n)) * 0.5 - 2.3).astype(np.float16)
    w, b = (RANDOM.random(n).astype(np.float16) for _ in range(2))
    y = np.zeros_like(x)
    wide = x.astype(np.float32)
    expected = (wide - wide.mean(1, keepdims=True)) / wide.std(1, keepdims=True) * w + b
    args = [as_argument(each) for each in (x, y, w, b)]
    return (
        lambda: layer_norm_kernel[(rows,)](*args, n, 1e-5, B=8192),
        lambda: bool(np.allclose(y.astype(np.float32), expected, rtol=2e-2, atol=2e-2)),
    )


def main() -> None:
    cases = {"add": add, "softmax": softmax, "matmul": matmul, "layer_norm": layer_norm}
    launch, is_right = cases[CASE]()
    times = []
    for _repetition in range(REPETITIONS):
        start = time.perf_counter()
        launch()
        times.append(time.perf_counter() - start)
        assert is_right(), f"{CASE} is wrong under {LANGUAGE}"
    print(json.dumps(times))


main()
