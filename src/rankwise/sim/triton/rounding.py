"""Results rounded as asked for: to nearest (`rn`), towards zero (`rz`), down (`rd`), up (`ru`).

numpy rounds to nearest. From there the result in another direction is the same number or its
neighbour: which of them, the sign of what rounding has left out says. For float32 that sign is read
from float64. Products are exact there; quotients and roots of float32 values are never so close to
a float32 value that float64 takes them for it. Sums are rounded to odd (Boldo and Melquiond 2008),
so that rounding them again loses nothing. For float64 the sign is calculated with fractions,
element by element.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from rankwise.sim.triton.dtypes import Array, dtype

MODES = ("rn", "rz", "rd", "ru")
TO_WHOLE: dict[str, Callable[[Array], Array]] = {
    "rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil,
}  # fmt: skip


def corrected(nearest: Array, left_out: Array, mode: str) -> Array:
    """The result in a mode: `left_out` is of the sign of (exact result - nearest)."""
    if mode == "rn":
        return nearest
    down = np.nextafter(nearest, nearest.dtype.type(-np.inf))
    up = np.nextafter(nearest, nearest.dtype.type(np.inf))
    goes_down = (left_out < 0) & ((mode == "rd") | ((mode == "rz") & (nearest > 0)))
    goes_up = (left_out > 0) & ((mode == "ru") | ((mode == "rz") & (nearest < 0)))
    return np.where(goes_down, down, np.where(goes_up, up, nearest))


def _sum_to_odd(left: Array, right: Array) -> Array:
    """A sum in float64 whose last bit is set where it is not exact."""
    total = left + right
    theirs = total - left
    missing = (left - (total - theirs)) + (right - theirs)
    inexact = (missing != 0) & np.isfinite(missing) & (total.view(np.int64) % 2 == 0)
    return np.where(inexact, np.nextafter(total, np.copysign(np.inf, missing)), total)


def fused_to_odd(left: Array, right: Array, last: Array) -> Array:
    """`left*right + last` in float64, of float32 values: exact but for its last bit."""
    return _sum_to_odd(left * right, last)


def _fused_in_double(left: Array, right: Array, last: Array) -> Array:
    """`left*right + last` in float64, rounded once."""

    def of_elements(a: float, b: float, c: float) -> float:
        if not (np.isfinite(a) and np.isfinite(b) and np.isfinite(c)):
            return float(np.float64(a) * b + c)
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        try:
            return float(exact) if exact else a * b + c
        except OverflowError:
            return float(np.copysign(np.inf, 1 if exact > 0 else -1))

    return np.asarray(np.frompyfunc(of_elements, 3, 1)(left, right, last), dtype=np.float64)


_Wide = Callable[..., Array]
_Sign = Callable[..., Any]
_OPERATIONS: dict[str, tuple[_Wide, _Wide, _Sign]] = {
    "add": (_sum_to_odd, np.add, lambda r, a, b: a + b - r),
    "sub": (lambda a, b: _sum_to_odd(a, -b), np.subtract, lambda r, a, b: a - b - r),
    "mul": (np.multiply, np.multiply, lambda r, a, b: a * b - r),
    "div": (np.divide, np.divide, lambda r, a, b: 0 if b == 0 else (a / b) - r),
    "sqrt": (np.sqrt, np.sqrt, lambda r, a: a - r * r),
    "rcp": (np.reciprocal, np.reciprocal, lambda r, a: 0 if a == 0 else 1 / a - r),
    "fma": (fused_to_odd, _fused_in_double, lambda r, a, b, c: a * b + c - r),
}
"""By operation: float32's in float64, float64's to nearest, and with fractions what that omits."""


def calculated(operation: str, mode: str, *operands: Array) -> Array:
    """An operation on float32 or float64 values, rounded once, in a mode."""
    in_double, nearest_double, left_out = _OPERATIONS[operation]
    with np.errstate(all="ignore"):
        if operands[0].dtype == np.float32:
            wide = in_double(*(each.astype(np.float64) for each in operands))
            nearest = wide.astype(np.float32)
            return corrected(nearest, wide - nearest, mode)
        nearest = nearest_double(*operands)
        if mode == "rn":
            return nearest
        signs = np.frompyfunc(lambda *each: _sign(left_out, *each), len(operands) + 1, 1)
        return corrected(nearest, signs(nearest, *operands).astype(np.int8), mode)


def _sign(left_out: _Sign, nearest: float, *operands: float) -> int:
    if not all(map(np.isfinite, operands)) or np.isnan(nearest):
        return 0
    if np.isinf(nearest):  # an overflow, or a quotient by zero, which is exact
        return 0 if left_out(0, *map(Fraction, operands)) == 0 else (-1 if nearest > 0 else 1)
    exact = left_out(*map(Fraction, (nearest, *operands)))
    return int(exact > 0) - int(exact < 0)


_EXACT_INTEGERS = 1 << 24
"""Up to here float32 has all integers."""


def rounded_to_odd(values: Array, target: dtype) -> Array:
    """Values of float64 or of integers as float32, so that rounding them to `target` is right.

    To round to nearest twice is wrong where the first rounding hits the middle between two values
    of the target: float64 to half precision through float32. A last bit that is set where
    something was left out keeps it from the middle (Boldo and Melquiond 2008). To the floats of
    eight bits there are no instructions but from 32 and 16 bits: float64 is rounded twice there.
    """
    if target.is_fp8() or values.dtype == np.float32 or values.itemsize < 4:
        return values
    if values.dtype.kind in "iu":
        magnitude = np.abs(values.astype(np.int64)).view(np.uint64)
        if values.dtype == np.uint64:
            magnitude = values
        if magnitude.max(initial=0) <= _EXACT_INTEGERS:
            return values
        # 53 bits are left, the last of which says whether the others are all there is.
        shift, rest = np.uint64(11), np.uint64((1 << 11) - 1)
        upper = magnitude >> shift | ((magnitude & rest) != 0)
        wide = np.ldexp(upper.astype(np.float64), 11)
        wide = np.where(values < 0, -wide, wide)
        exact = magnitude.astype(np.float64)  # smaller ones have all their bits in float64
        wide = np.where(magnitude < np.uint64(1 << 53), np.where(values < 0, -exact, exact), wide)
    else:
        wide = values
    nearest = np.ascontiguousarray(wide.astype(np.float32))
    left_out = wide - nearest
    is_even = nearest.view(np.uint32) % 2 == 0
    inexact = (left_out != 0) & np.isfinite(left_out) & is_even
    outwards = np.copysign(np.float32(np.inf), left_out.astype(np.float32))
    odd: Array = np.where(inexact, np.nextafter(nearest, outwards), nearest)
    return odd


def to_integer(values: Array, mode: str, target: np.dtype[Any]) -> Array:
    """Whole numbers, the nearest there is where they do not fit; of NaN what the hardware gives."""
    bounds = np.iinfo(target)
    whole = TO_WHOLE[mode](values.astype(np.float64))
    # The greatest 64-bit number is no float64: it is taken where the float reaches the next one.
    too_great = whole >= float(bounds.max)
    too_small = whole <= float(bounds.min)
    missing = np.isnan(whole)
    fitting = np.where(too_great | too_small | missing, 0, whole).astype(target)
    is_short = values.dtype == np.float32 and bounds.bits == 32
    of_missing = 0 if is_short else bounds.min or 1 << (bounds.bits - 1)
    found = np.where(too_great, target.type(bounds.max), fitting)
    found = np.where(too_small, target.type(bounds.min), found)
    return np.where(missing, target.type(of_missing), found)


def from_number(values: Array, mode: str, target: np.dtype[Any]) -> Array:
    """Integers, or float64 values, as floats."""
    with np.errstate(over="ignore"):
        nearest = values.astype(target)
    if mode == "rn":
        return nearest
    # Python compares integers and floats exactly.
    signs = np.frompyfunc(lambda value, near: (value > near) - (value < near), 2, 1)
    return corrected(nearest, signs(values, nearest).astype(np.int8), mode)
