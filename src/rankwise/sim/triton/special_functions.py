"""Special functions that neither numpy nor `math` has, of float32 and float64 values.

Bessel functions are the trapezoidal rule on their integrals (DLMF 10.9.2, 10.32.3), which converges
exponentially since the integrand is periodic. Those of the second kind are their series near zero
(DLMF 10.8.1), Gauss's rule on their integral elsewhere (DLMF 10.9.7), and from two orders on the
recurrence (DLMF 10.6.1), which is stable upwards. Inverses of the error function start from the
normal distribution's quantiles and are corrected by Halley's method.
"""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from rankwise.sim.triton.dtypes import Array


def by_element(function: Callable[[float], float]) -> Callable[[Array], Array]:
    """A function of one number, of each element."""

    def over_array(values: Array) -> Array:
        flat = [function(value) for value in values.reshape(-1).tolist()]
        return np.array(flat, dtype=values.dtype).reshape(values.shape)

    return over_array


def bessel(order: Array, values: Array) -> Array:
    """J of whole orders."""
    x = values.astype(np.float64)[..., None]
    n = np.asarray(order, dtype=np.float64)[..., None]
    angles = _angles(np.abs(x).max(initial=0) + np.abs(n).max(initial=0))
    found = np.mean(np.cos(n * angles - x * np.sin(angles)), axis=-1)
    return np.asarray(found, dtype=values.dtype)


def modified_bessel(order: int, values: Array) -> Array:
    """I of a whole order."""
    x = values.astype(np.float64)[..., None]
    angles = _angles(np.abs(x).max(initial=0))
    found = np.mean(np.exp(x * np.cos(angles)) * np.cos(order * angles), axis=-1)
    return np.asarray(found, dtype=values.dtype)


def second_bessel(order: Array, values: Array) -> Array:
    """Y of whole orders: of zero minus infinity, of what is below not a number."""
    orders, x = np.broadcast_arrays(np.abs(order), values.astype(np.float64))
    found = np.where(x == 0, -np.inf, np.where(x == np.inf, 0.0, np.nan))
    inside = (x > 0) & (x < np.inf)
    at = x[inside]
    with np.errstate(over="ignore", invalid="ignore"):  # high orders near zero are infinite
        before, this = _first_two(at)
        turned = np.where(orders[inside] == 0, before, this)
        for step in range(1, int(orders[inside].max(initial=1))):
            before, this = this, 2 * step / at * this - before
            turned = np.where(orders[inside] == step + 1, this, turned)
    found[inside] = np.where(np.isnan(turned), -np.inf, turned)
    sign = np.where((order < 0) & (orders % 2 == 1), -1, 1)
    return np.asarray(sign * found, dtype=values.dtype)


def _first_two(x: Array) -> tuple[Array, Array]:
    """Y of order 0 and 1, of positive numbers."""
    is_near = x <= _NEAR
    near, far = np.where(is_near, x, 1.0), np.where(is_near, _NEAR, x)
    return (
        np.where(is_near, _second_near(0, near), _second_far(0, far)),
        np.where(is_near, _second_near(1, near), _second_far(1, far)),
    )


_NEAR = 2.0
"""Up to here the series loses no digits."""
_SERIES_TERMS = 20


def _second_near(order: int, x: Array) -> Array:
    half = x / 2
    term = half**order
    harmonic = 0.0  # of k; the digamma function of k + 1 is it minus Euler's constant
    total = np.zeros_like(x)
    for k in range(_SERIES_TERMS):
        digammas = 2 * harmonic - 2 * np.euler_gamma + (1 / (k + 1) if order else 0.0)
        total += digammas * term
        term = -term * half**2 / ((k + 1) * (k + 1 + order))
        harmonic += 1 / (k + 1)
    first = bessel(np.full(x.shape, order), x)
    return np.asarray((2 * np.log(half) * first - total - order / half) / np.pi)


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)


def _second_far(order: int, x: Array) -> Array:
    def integral(panels: int, ends: Array, integrand: Callable[[Array], Array]) -> Array:
        shares = (np.arange(panels)[:, None] + (_NODES + 1) / 2).reshape(-1) / panels
        weights = np.tile(_WEIGHTS, panels) / (2 * panels)
        return np.asarray(integrand(ends[..., None] * shares) @ weights * ends)

    wide = x[..., None]
    panels = 8 + int(min(x.max(initial=0), 1e5) / 10)
    turns = integral(
        panels, np.full(x.shape, np.pi), lambda t: np.sin(wide * np.sin(t) - order * t)
    )
    tail = integral(
        16,
        np.arcsinh(745 / x),
        lambda t: (
            (np.exp(order * t) + (-1) ** order * np.exp(-order * t)) * np.exp(-wide * np.sinh(t))
        ),
    )
    return np.asarray((turns - tail) / np.pi)


def _angles(frequency: float) -> Array:
    count = 64 + 2 * int(min(frequency, 1e5))
    return np.arange(count) * (2 * np.pi / count)


def gamma(value: float) -> float:
    """The gamma function."""
    if value == -math.inf or (value < 0 and value == int(value)):
        return math.nan
    if value == 0:
        return math.copysign(math.inf, value)
    try:
        return math.gamma(value)
    except OverflowError:
        return math.inf


def gamma_logarithm(value: float) -> float:
    """The logarithm of the gamma function's magnitude."""
    if math.isinf(value) or (value <= 0 and value == int(value)):
        return math.inf
    return math.lgamma(value)


_FAR = 25.0
"""From here on the scaled error function is taken from its asymptotic series."""


def scaled_erfc(value: float) -> float:
    """`exp(x*x) * erfc(x)`."""
    if value < _FAR:
        try:
            return math.exp(value * value) * math.erfc(value)
        except OverflowError:
            return math.inf
    series = term = 1.0
    for order in range(1, 9):
        term *= -(2 * order - 1) / (2 * value * value)
        series += term
    return series / (value * math.sqrt(math.pi))


def inverse_erfc(value: float) -> float:
    """The number whose complementary error function is the value."""
    if not 0 <= value <= 2:
        return math.nan
    if value in (0, 2):
        return math.inf if value == 0 else -math.inf
    if value > 1:
        return -inverse_erfc(2 - value) if value > 1.5 else inverse_erf(1 - value)
    return _corrected(-NormalDist().inv_cdf(value / 2) / math.sqrt(2), math.erfc, value, -1)


def inverse_erf(value: float) -> float:
    """The number whose error function is the value."""
    if not -1 <= value <= 1:
        return math.nan
    if abs(value) > 0.5:
        return math.copysign(inverse_erfc(1 - abs(value)), value)
    return _corrected(value * math.sqrt(math.pi) / 2, math.erf, value, 1)


def _corrected(
    guess: float, function: Callable[[float], float], value: float, direction: int
) -> float:
    for _step in range(6):
        slope = direction * 2 / math.sqrt(math.pi) * math.exp(-guess * guess)
        if slope == 0:
            break
        step = (function(guess) - value) / slope
        guess -= step / (1 + guess * step)
    return guess


def normal_distribution(value: float) -> float:
    """The normal distribution function."""
    return 0.5 * math.erfc(-value / math.sqrt(2))


def normal_quantile(value: float) -> float:
    """The inverse of the normal distribution function."""
    return -math.sqrt(2) * inverse_erfc(2 * value)


def _of_turns(function: Callable[[float], float], quarter: int) -> Callable[[float], float]:
    def over(value: float) -> float:
        if not math.isfinite(value):
            return math.nan
        rest = math.fmod(value, 2)
        if rest * 2 == int(rest * 2):  # where the result is -1, 0 or 1
            found = (0.0, 1.0, 0.0, -1.0)[(int(rest * 2) + quarter) % 4]
            return math.copysign(found, value) if found == 0 and not quarter else found
        return function(math.pi * rest)

    return over


sine_of_turns = _of_turns(math.sin, 0)
cosine_of_turns = _of_turns(math.cos, 1)


def rounded_away(values: Array) -> Array:
    """To the nearest whole number, halves away from zero."""
    whole = np.trunc(values)
    return np.where(np.abs(values - whole) >= 0.5, whole + np.copysign(1, values), whole).astype(
        values.dtype
    )
