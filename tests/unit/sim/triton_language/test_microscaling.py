"""Products of blocks whose elements share scales."""

from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl

M, N, K, GROUP = 16, 32, 64, 32
FOUR_BITS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@triton.jit
def product(
    a: Any, sa: Any, b: Any, sb: Any, o: Any,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, IN_LEFT: tl.constexpr, IN_RIGHT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
) -> None:  # fmt: skip
    rows, columns, groups = tl.arange(0, M), tl.arange(0, N), tl.arange(0, GROUPS)
    left = tl.load(a + rows[:, None] * IN_LEFT + tl.arange(0, IN_LEFT)[None, :])
    right = tl.load(b + tl.arange(0, IN_RIGHT)[:, None] * N + columns[None, :])
    scale_left = tl.load(sa + rows[:, None] * GROUPS + groups[None, :])
    scale_right = tl.load(sb + columns[:, None] * GROUPS + groups[None, :])
    got = tl.dot_scaled(left, scale_left, LEFT, right, scale_right, RIGHT)
    tl.store(o + rows[:, None] * N + columns[None, :], got)


def operand(form: str, shape: tuple[int, int], axis: int, seed: int) -> tuple[Any, Any]:
    """A side as memory holds it, and its values."""
    random = np.random.default_rng(seed)
    if form == "e2m1":
        codes = random.integers(0, 16, shape).astype(np.uint8)
        low, high = (np.take(codes, range(at, shape[axis], 2), axis) for at in (0, 1))
        return low | high << 4, FOUR_BITS[codes]
    type_ = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5, "bf16": tl.bfloat16}[form]
    values = type_.rounded(random.standard_normal(shape).astype(np.float32))
    return triton.typed(values, type_), values


@pytest.mark.parametrize("left", ["e2m1", "e4m3", "e5m2", "bf16"])
@pytest.mark.parametrize("right", ["e2m1", "e4m3"])
def test_scales_are_applied_along_the_inner_axis(left: str, right: str) -> None:
    a, left_values = operand(left, (M, K), 1, 0)
    b, right_values = operand(right, (K, N), 0, 1)
    random = np.random.default_rng(2)
    sa, sb = (random.integers(120, 134, (size, K // GROUP)).astype(np.uint8) for size in (M, N))
    out = np.empty((M, N), np.float32)

    product[(1,)](
        a, sa, b, sb, out, LEFT=left, RIGHT=right, M=M, N=N, GROUPS=K // GROUP,
        IN_LEFT=K // 2 if left == "e2m1" else K, IN_RIGHT=K // 2 if right == "e2m1" else K,
    )  # fmt: skip

    factors_left = np.repeat(np.ldexp(1.0, sa.astype(int) - 127), GROUP, axis=1)
    factors_right = np.repeat(np.ldexp(1.0, sb.astype(int) - 127), GROUP, axis=1).T
    expected = (left_values * factors_left) @ (right_values * factors_right)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)


def test_a_format_that_there_is_not_is_refused() -> None:
    with pytest.raises(triton.KernelValueError, match="no format 'e3m2': it is one of e2m1"):
        product[(1,)](
            np.zeros((M, K), np.uint8), np.zeros((M, 2), np.uint8), np.zeros((K, N), np.uint8),
            np.zeros((N, 2), np.uint8), np.zeros((M, N), np.float32), LEFT="e3m2", RIGHT="e4m3",
            M=M, N=N, GROUPS=2, IN_LEFT=K, IN_RIGHT=K,
        )  # fmt: skip
