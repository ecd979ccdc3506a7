"""CUDA's mathematical library: bits, rounding as asked for, special functions."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl
from rankwise.sim.triton import special_functions
from rankwise.sim.triton.language.extra import libdevice


def applied(name: str, *operands: Any, out: Any) -> Any:
    """A function of libdevice, of each element, in a kernel."""
    function = getattr(libdevice, name)
    arrays = [np.asarray(each) for each in operands]
    result = np.empty(arrays[0].shape, out)

    @triton.jit
    def kernel(pointers: Any, out_ptr: Any, N: tl.constexpr) -> None:
        offsets = tl.arange(0, N)
        tl.store(out_ptr + offsets, function(*[tl.load(each + offsets) for each in pointers]))

    kernel[(1,)](tuple(arrays), result, N=result.size)
    return result


def random_bits(type_: Any, seed: int = 0) -> Any:
    values = np.random.default_rng(seed).integers(0, 256, 64 * np.dtype(type_).itemsize)
    found = values.astype(np.uint8).view(type_)
    found[:4] = [0, 1, np.iinfo(type_).max, np.iinfo(type_).min]
    return found


@pytest.mark.parametrize("type_", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("popc", lambda value, _width: value.bit_count()),
        ("clz", lambda value, width: width - value.bit_length()),
        ("ffs", lambda value, _width: (value & -value).bit_length()),
    ],
)
def test_bits_are_counted(name: str, expected: Callable[[int, int], int], type_: Any) -> None:
    values = random_bits(type_)
    width = values.itemsize * 8

    found = applied(name, values, out=np.int32)

    assert found.tolist() == [expected(int(each) % 2**width, width) for each in values]


@pytest.mark.parametrize("type_", [np.int32, np.uint32, np.int64, np.uint64])
def test_the_upper_half_of_a_product(type_: Any) -> None:
    left, right = random_bits(type_), random_bits(type_, seed=1)
    width = left.itemsize * 8

    found = applied("mulhi", left, right, out=type_)

    assert found.tolist() == [int(a) * int(b) >> width for a, b in zip(left, right, strict=True)]


def test_bytes_are_picked_from_two_words() -> None:
    left, right = random_bits(np.int32), random_bits(np.int32, seed=1)
    selector = np.full(64, 0x7610, np.int32)

    found = applied("byte_perm", left, right, selector, out=np.int32)

    low = left.view(np.uint8).reshape(64, 4)
    high = right.view(np.uint8).reshape(64, 4)
    assert (found.view(np.uint8).reshape(64, 4) == np.c_[low[:, :2], high[:, 2:]]).all()


@pytest.mark.parametrize("type_", [np.float32, np.float64])
@pytest.mark.parametrize("mode", ["rn", "rz", "rd", "ru"])
@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("add", lambda a, b, _c: a + b),
        ("sub", lambda a, b, _c: a - b),
        ("mul", lambda a, b, _c: a * b),
        ("div", lambda a, b, _c: a / b),
        ("rcp", lambda a, *_rest: 1 / a),
        ("fma", lambda a, b, c: a * b + c),
    ],
)
def test_a_result_is_rounded_as_asked_for(
    name: str, exact: Callable[..., Fraction], mode: str, type_: Any
) -> None:
    random = np.random.default_rng(5)
    operands = [
        (random.standard_normal(64) * 10.0 ** random.integers(-9, 9, 64)).astype(type_)
        for _ in range(3)
    ]
    count = {"rcp": 1, "fma": 3}.get(name, 2)

    found = applied(f"{name}_{mode}", *operands[:count], out=type_)

    for value, *given in zip(found, *operands, strict=True):
        wanted = exact(*(Fraction(float(each)) for each in given))
        below, above = (Fraction(float(np.nextafter(value, type_(to)))) for to in (-np.inf, np.inf))
        got = Fraction(float(value))
        within = {
            "rn": abs(got - wanted) <= min(abs(below - wanted), abs(above - wanted)),
            "rd": got <= wanted < above,
            "ru": below < wanted <= got,
            "rz": got <= wanted < above if wanted > 0 else below < wanted <= got,
        }
        assert within[mode], (value, given)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("rn", [2, 2, -2, 2**31 - 1, -(2**31), 0]),
        ("rz", [1, 2, -1, 2**31 - 1, -(2**31), 0]),
        ("rd", [1, 2, -2, 2**31 - 1, -(2**31), 0]),
        ("ru", [2, 3, -1, 2**31 - 1, -(2**31), 0]),
    ],
)
def test_floats_become_integers_in_each_mode_and_saturate(mode: str, expected: list[int]) -> None:
    values = np.array([1.5, 2.5, -1.5, 3e9, -3e9, np.nan, 0, 0], np.float32)

    assert applied(f"float2int_{mode}", values, out=np.int32).tolist()[:6] == expected


def test_integers_become_floats_towards_where_they_are_asked_to() -> None:
    values = random_bits(np.int64)

    below = applied("ll2float_rd", values, out=np.float32)
    above = applied("ll2float_ru", values, out=np.float32)

    for low, value, high in zip(below, values, above, strict=True):
        assert float(low) <= int(value) <= float(high)
        assert low == high or np.nextafter(low, np.float32(np.inf)) == high


@pytest.mark.parametrize(
    ("name", "inverse", "points"),
    [
        ("erfinv", math.erf, [-0.999999, -0.7, -1e-9, 0.0, 0.3, 0.5, 0.9, 1 - 1e-12]),
        ("erfcinv", math.erfc, [1e-200, 1e-9, 0.2, 0.5, 1.0, 1.4, 1.6, 1.999]),
        ("normcdfinv", lambda x: 0.5 * math.erfc(-x / math.sqrt(2)),
         [1e-100, 1e-9, 0.1, 0.4, 0.5, 0.6, 0.9, 0.999]),
    ],
)  # fmt: skip
def test_inverses_undo_what_they_are_inverses_of(
    name: str, inverse: Callable[[float], float], points: list[float]
) -> None:
    found = applied(name, np.array(points), out=np.float64)

    np.testing.assert_allclose([inverse(each) for each in found], points, rtol=1e-13)


@pytest.mark.parametrize(
    ("name", "point", "expected"),
    [  # Abramowitz and Stegun, tables 6.1, 7.1, 9.1, 9.8
        ("j0", 2.0, 0.223890779141236),
        ("j1", 2.0, 0.576724807756873),
        ("y0", 1.0, 0.088256964215677),
        ("y0", 2.5, 0.498070359615232),
        ("y0", 0.0, -np.inf),
        ("y1", 1.0, -0.781212821300289),
        ("y1", 50.0, -0.056795668562014),
        ("cyl_bessel_i0", 1.0, 1.266065877752008),
        ("cyl_bessel_i1", 1.0, 0.565159103992485),
        ("tgamma", 0.5, 1.772453850905516),
        ("erfcx", 30.0, 0.018795888861416751),
        ("sinpi", 1e15 + 0.5, 1.0),
        ("cospi", 0.5, 0.0),
        ("logb", 0.4, -2.0),
    ],
)
def test_special_functions_give_tabulated_values(name: str, point: float, expected: float) -> None:
    found = applied(name, np.array([point]), out=np.float64)

    np.testing.assert_allclose(found, [expected], rtol=1e-13, atol=1e-15)


def test_bessel_functions_of_both_kinds_have_their_wronskian() -> None:
    points = np.concatenate([np.logspace(-3, 3, 40), [2.0, 2.1]])
    for order in (0, 1, 2, 5):
        orders, next_orders = (np.full(points.shape, n, np.int32) for n in (order, order + 1))
        first, next_first = (special_functions.bessel(n, points) for n in (orders, next_orders))
        second, next_second = (
            special_functions.second_bessel(n, points) for n in (orders, next_orders)
        )

        there = points > order / 2  # J itself has lost its digits before
        wronskian = next_first * second - first * next_second  # DLMF 10.5.2
        np.testing.assert_allclose(wronskian[there], 2 / (np.pi * points[there]), rtol=1e-9)


def test_bits_of_floats_are_read_and_written() -> None:
    values = np.random.default_rng(2).standard_normal(64).astype(np.float32)

    bits = applied("float_as_int", values, out=np.int32)

    assert (bits == values.view(np.int32)).all()
    assert (applied("int_as_float", bits, out=np.float32) == values).all()
    wide = values.astype(np.float64)
    high, low = (applied(f"double2{part}int", wide, out=np.int32) for part in ("hi", "lo"))
    assert (applied("hiloint2double", high, low, out=np.float64) == wide).all()


def test_narrow_floats_are_refused_as_in_triton() -> None:
    with pytest.raises(triton.KernelTypeError, match=r"libdevice\.tanh is not for fp16, but for"):
        applied("tanh", np.array([0.5, 1.5], np.float16), out=np.float32)


def test_what_a_function_is_not_for_is_refused() -> None:
    with pytest.raises(triton.KernelTypeError, match=r"libdevice\.popc is not for fp32, but for"):
        applied("popc", np.ones(2, np.float32), out=np.int32)


def test_functions_of_the_device_alone_are_refused_with_the_reason() -> None:
    with pytest.raises(triton.Unsupported, match=r"libdevice\.rcp64h .*own approximation"):
        applied("rcp64h", np.ones(2), out=np.float64)
