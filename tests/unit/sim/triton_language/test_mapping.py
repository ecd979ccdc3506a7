"""Functions of single elements, applied to blocks."""

from typing import Any

import numpy as np

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl


@triton.jit
def ordered(x: Any, y: Any) -> Any:
    if x < y:
        return -1
    if x == y:
        return 0
    return 1


@triton.jit
def divided(a0: Any, a1: Any, b0: Any, b1: Any) -> Any:
    return a0 // b0, a1 // b1, a0 % b0, a1 % b1


def test_a_function_may_decide_by_each_element() -> None:
    @triton.jit
    def kernel(x: Any, y: Any, o: Any, BLOCK: tl.constexpr) -> None:
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(o + i, tl.map_elementwise(ordered, tl.load(x + i), tl.load(y + i)))

    x, y = np.random.default_rng(0).integers(0, 3, (2, 64)).astype(np.int32)
    out = np.zeros(64, np.int32)

    kernel[(4,)](x, y, out, BLOCK=16)

    assert (out == np.sign(x - y)).all()


def test_neighbours_may_be_taken_together() -> None:
    @triton.jit
    def kernel(x: Any, y: Any, quotients: Any, rests: Any, BLOCK: tl.constexpr) -> None:
        i = tl.arange(0, BLOCK)
        found, rest = tl.map_elementwise(divided, tl.load(x + i), tl.load(y + i), pack=2)
        tl.store(quotients + i, found)
        tl.store(rests + i, rest)

    x, y = np.random.default_rng(1).integers(1, 100, (2, 32)).astype(np.int32)
    quotients, rests = np.zeros((2, 32), np.int32)

    kernel[(1,)](x, y, quotients, rests, BLOCK=32)

    assert (quotients == x // y).all()
    assert (rests == x % y).all()
