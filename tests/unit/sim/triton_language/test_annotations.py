"""Annotations of parameters give numbers their types, as in Triton."""

from typing import Any

# mypy: disable-error-code="assignment, attr-defined, operator, valid-type"
# Triton's annotations are objects, which mypy does not take for types.
import numpy as np
import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl
from rankwise.base.errors import LocalProtocolError


@triton.jit
def squares(p: Any, n: tl.int64) -> None:
    tl.store(p, n * n)


@triton.jit
def squares_by_word(p: Any, n: "tl.int64") -> None:
    tl.store(p, n * n)


@triton.jit
def doubles(p: Any, x: tl.float64) -> None:
    tl.store(p, x)


@triton.jit
def without_sign(p: Any, n: tl.uint32) -> None:
    tl.store(p, (n // 2).to(tl.int64))


@triton.jit
def half(p: Any, x: tl.float16) -> None:
    tl.store(p, x.to(tl.float32))


@triton.jit
def sides(p: Any, n: tl.int64) -> None:
    a = n
    if n > 1:
        a = n.to(tl.int32)
    tl.store(p, a)


@pytest.mark.parametrize(
    ("kernel", "argument", "kind", "expected"),
    [
        (squares, 100_000, np.int64, 10**10),
        (squares_by_word, 100_000, np.int64, 10**10),
        (doubles, 0.1, np.float64, 0.1),
        (doubles, 3, np.float64, 3.0),
        (without_sign, -2, np.int64, 2**31 - 1),
        (half, 0.1, np.float32, np.float16(0.1)),
    ],
)
def test_a_number_has_the_type_that_its_parameter_is_annotated_with(
    kernel: Any, argument: Any, kind: Any, expected: Any
) -> None:
    out = np.zeros(1, kind)

    kernel[(1,)](out, argument)

    assert out[0] == expected


def test_the_annotated_type_is_the_one_that_control_flow_compares() -> None:
    with pytest.raises(TypeError, match="`a` is int64, and the then side of this `if` makes it"):
        sides[(1,)](np.zeros(1, np.int64), 5)


def test_a_fraction_is_no_argument_for_an_annotated_integer() -> None:
    with pytest.raises(LocalProtocolError, match=r"argument 'n' is 1\.5, and its parameter"):
        squares[(1,)](np.zeros(1, np.int64), 1.5)
