"""Atomics of floats do with NaN and negative zero what hardware does, which knows bits alone."""

from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl

NAN = float("nan")


@triton.jit
def swap(p: Any, compare: Any, value: Any, old: Any) -> None:
    tl.store(old, tl.atomic_cas(p, tl.load(compare), tl.load(value)))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    ("start", "compare", "left"), [(NAN, NAN, 3.0), (-0.0, 0.0, -0.0), (0.0, -0.0, 0.0)]
)
def test_compare_and_swap_compares_bits(
    kind: Any, start: float, compare: float, left: float
) -> None:
    p, old = np.array([start], kind), np.zeros(1, kind)

    swap[(1,)](p, np.array([compare], kind), np.array([3.0], kind), old)

    assert str(p[0].item()) == str(left)
    assert str(old[0].item()) == str(start)


def test_sum_by_compare_and_swap_passes_nan_on() -> None:
    """The loop of CUDA's guide; it compares bits, too, lest it never ends."""

    @triton.jit
    def kernel(p: Any, n: Any) -> None:
        seen = tl.load(p)
        found = tl.atomic_cas(p, seen, seen + 1.0)
        while seen.to(tl.int32, bitcast=True) != found.to(tl.int32, bitcast=True):
            seen = found
            found = tl.atomic_cas(p, seen, seen + 1.0)
        tl.atomic_add(n, 1)

    p, n = np.array([NAN], np.float32), np.zeros(1, np.int32)

    kernel[(4,)](p, n)

    assert n[0] == 4
    assert np.isnan(p[0])


@triton.jit
def extreme(p: Any, value: Any, GREATEST: tl.constexpr) -> None:
    i = tl.arange(0, 8)
    if GREATEST:
        tl.atomic_max(p + i, tl.load(value + i))
    else:
        tl.atomic_min(p + i, tl.load(value + i))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("greatest", [True, False])
def test_extremum_of_floats_is_that_of_their_bits(kind: Any, greatest: bool) -> None:
    old = np.array([-0.0, 0.0, NAN, 1.0, 1.0, -1.0, -2.0, 2.0], kind)
    new = np.array([0.0, -0.0, 1.0, NAN, -NAN, -2.0, -1.0, 3.0], kind)
    p = old.copy()

    extreme[(1,)](p, new, GREATEST=greatest)

    signed, unsigned = (f"{letter}{np.dtype(kind).itemsize}" for letter in "iu")
    a, b = (np.maximum, np.minimum) if greatest else (np.minimum, np.maximum)
    as_triton_does = np.where(
        np.signbit(new),
        b(old.view(unsigned), new.view(unsigned)).view(signed),
        a(old.view(signed), new.view(signed)),
    )
    np.testing.assert_array_equal(p.view(signed), as_triton_does)
    ordinary = slice(5, None)
    np.testing.assert_array_equal(
        p[ordinary], (np.maximum if greatest else np.minimum)(old, new)[5:]
    )


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_atomic_load_leaves_negative_zero_and_nan_as_they_are(kind: Any) -> None:
    @triton.jit
    def kernel(p: Any, o: Any) -> None:
        i = tl.arange(0, 2)
        tl.store(o + i, tl.atomic_load(p + i))

    p, out = np.array([-0.0, NAN], kind), np.zeros(2, kind)
    before = p.tobytes()

    kernel[(1,)](p, out)

    assert p.tobytes() == before
    assert out.tobytes() == before


def test_exchange_takes_the_bits_of_nan() -> None:
    @triton.jit
    def kernel(p: Any, value: Any, o: Any) -> None:
        tl.store(o, tl.atomic_xchg(p, tl.load(value)))

    p, out = np.array([-0.0], np.float32), np.zeros(1, np.float32)
    value = np.array([0xFFC0_0001], np.uint32).view(np.float32)

    kernel[(1,)](p, value, out)

    assert p.tobytes() == value.tobytes()
    assert np.signbit(out[0])


@pytest.mark.parametrize("kind", [np.float16, np.int8, np.uint16])
def test_extremum_of_narrow_elements_is_refused_as_in_triton(kind: Any) -> None:
    with pytest.raises(triton.KernelTypeError, match="atomic_max is not for"):
        extreme[(1,)](np.zeros(8, kind), np.zeros(8, kind), GREATEST=True)
