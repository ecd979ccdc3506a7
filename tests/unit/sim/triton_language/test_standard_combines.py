"""The combine functions of `tl.standard`, which libraries give to `reduce`."""

from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl

VALUES = np.array([3, 5, 1, 5, 2, 1, 4, 3], np.int32)


@triton.jit
def reduced(x: Any, o: Any, combine: tl.constexpr) -> None:
    tl.store(o, tl.reduce(tl.load(x + tl.arange(0, 8)), 0, combine))


@triton.jit
def reduced_with_index(x: Any, o: Any, combine: tl.constexpr) -> None:
    at = tl.arange(0, 8)
    value, index = tl.reduce((tl.load(x + at), at), 0, combine)
    tl.store(o, value)
    tl.store(o + 1, index)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_sum_combine", 24),
        ("_prod_combine", 1800),
        ("_xor_combine", 6),
        ("_or_combine", 7),
        ("_elementwise_max", 5),
        ("_elementwise_min", 1),
    ],
)
def test_a_combine_function_reduces(name: str, expected: int) -> None:
    out = np.zeros(1, np.int32)

    reduced[(1,)](VALUES, out, getattr(tl.standard, name))

    assert out[0] == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("_argmax_combine_tie_break_left", [5, 1]), ("_argmin_combine_tie_break_left", [1, 2])],
)
def test_a_combine_function_with_indices_takes_the_first(name: str, expected: list[int]) -> None:
    out = np.zeros(2, np.int32)

    reduced_with_index[(1,)](VALUES, out, getattr(tl.standard, name))

    assert out.tolist() == expected
