"""`libdevice`: the mathematical library of CUDA devices, for fp32 and fp64."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.arithmetic import elementwise, in_type
from rankwise.sim.triton.dtypes import Array
from rankwise.sim.triton.functions import (
    abs,
    ceil,
    cos,
    erf,
    exp,
    exp2,
    floor,
    fma,
    log,
    log2,
    rsqrt,
    sin,
    sqrt,
)
from rankwise.sim.triton.promotion import combined, to_tensor
from rankwise.sim.triton.tensor import tensor


def _one(name: str, function: Callable[[Array], Array]) -> Callable[[Any], tensor]:
    def operation(arg0: Any) -> tensor:
        arg0 = to_tensor(arg0)
        type_ = arg0.dtype if arg0.dtype.is_fp64() else t.float32
        return elementwise(name, function, type_, in_type(arg0, type_))

    operation.__name__ = name
    operation.__doc__ = f"`{name}` of each element."
    return operation


def _two(name: str, function: Callable[[Array, Array], Array]) -> Callable[[Any, Any], tensor]:
    def operation(arg0: Any, arg1: Any) -> tensor:
        left, right, type_ = combined(to_tensor(arg0), arg1, "/")
        return elementwise(name, function, type_, in_type(left, type_), in_type(right, type_))

    operation.__name__ = name
    operation.__doc__ = f"`{name}` of each pair of elements."
    return operation


def _test(name: str, function: Callable[[Array], Array]) -> Callable[[Any], tensor]:
    def operation(arg0: Any) -> tensor:
        return elementwise(name, function, t.int1, to_tensor(arg0)).to(t.int32)

    operation.__name__ = name
    operation.__doc__ = f"`{name}` of each element, as 0 or 1."
    return operation


def _by_element(function: Callable[[float], float]) -> Callable[[Array], Array]:
    def over_array(values: Array) -> Array:
        flat = [function(value) for value in values.reshape(-1).tolist()]
        return np.array(flat, dtype=values.dtype).reshape(values.shape)

    return over_array


def _gamma_logarithm(value: float) -> float:
    return math.inf if value <= 0 and value == int(value) else math.lgamma(value)


def _rounded_away(values: Array) -> Array:
    return np.copysign(np.floor(np.abs(values) + 0.5), values)


acos, acosh = _one("acos", np.arccos), _one("acosh", np.arccosh)
asin, asinh = _one("asin", np.arcsin), _one("asinh", np.arcsinh)
atan, atanh = _one("atan", np.arctan), _one("atanh", np.arctanh)
tan, tanh = _one("tan", np.tan), _one("tanh", np.tanh)
cosh, sinh = _one("cosh", np.cosh), _one("sinh", np.sinh)
cbrt = _one("cbrt", np.cbrt)
exp10 = _one("exp10", lambda values: np.power(values.dtype.type(10), values))
expm1, log1p, log10 = _one("expm1", np.expm1), _one("log1p", np.log1p), _one("log10", np.log10)
erfc = _one("erfc", _by_element(math.erfc))
lgamma = _one("lgamma", _by_element(_gamma_logarithm))
trunc, rint, nearbyint = _one("trunc", np.trunc), _one("rint", np.rint), _one("nearbyint", np.rint)
round = _one("round", _rounded_away)
fast_expf, fast_logf, fast_sinf = (
    _one("fast_expf", np.exp),
    _one("fast_logf", np.log),
    _one("fast_sinf", np.sin),
)
fast_cosf = _one("fast_cosf", np.cos)
pow = _two("pow", np.power)
atan2, hypot, fmod = _two("atan2", np.arctan2), _two("hypot", np.hypot), _two("fmod", np.fmod)
copysign = _two("copysign", np.copysign)
fdim = _two("fdim", lambda left, right: np.maximum(left - right, 0))
fmax, fmin = _two("fmax", np.fmax), _two("fmin", np.fmin)
div_rn = div_rz = fast_dividef = _two("div", np.divide)
fast_powf = _two("fast_powf", np.power)
isinf, isnan, finitef = (
    _test("isinf", np.isinf),
    _test("isnan", np.isnan),
    _test("finite", np.isfinite),
)
isfinited = finitef
signbit = _test("signbit", np.signbit)

__all__ = [
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "copysign",
    "cos", "cosh", "div_rn", "div_rz", "erf", "erfc", "exp", "exp2", "exp10", "expm1", "fast_cosf",
    "fast_dividef", "fast_expf", "fast_logf", "fast_powf", "fast_sinf", "fdim", "finitef", "floor",
    "fma", "fmax", "fmin", "fmod", "hypot", "isfinited", "isinf", "isnan", "lgamma", "log", "log1p",
    "log2", "log10", "nearbyint", "pow", "rint", "round", "rsqrt", "signbit", "sin", "sinh", "sqrt",
    "tan", "tanh", "trunc",
]  # fmt: skip
