"""`libdevice`: the mathematical library of CUDA devices.

A table says, for each name, of which types it takes what and gives what, as NVIDIA's library does,
and which numpy function does it. Other types are refused.
Results are numpy's: the approximations that the library allows itself (`fast_…`) are not imitated.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np

from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton import special_functions as special
from rankwise.sim.triton.arithmetic import elementwise, in_type
from rankwise.sim.triton.dtypes import Array, dtype
from rankwise.sim.triton.execution import KernelTypeError, place
from rankwise.sim.triton.functions import upper_of_64
from rankwise.sim.triton.refusals import refusing
from rankwise.sim.triton.rounding import MODES, calculated, from_number, to_integer
from rankwise.sim.triton.special_functions import by_element
from rankwise.sim.triton.tensor import tensor, to_tensor

_TYPES = {
    "i32": t.int32, "i64": t.int64, "u32": t.uint32, "u64": t.uint64, "f32": t.float32,
    "f64": t.float64, "i1": t.int1,
}  # fmt: skip
_Overload = tuple[tuple[dtype, ...], dtype]
_Function = Callable[..., Array]


def _overloads(text: str) -> tuple[_Overload, ...]:
    """What `i32,i32>i32 f32,i32>f32` says."""
    found = []
    for each in text.split():
        operands, _, result = each.partition(">")
        found.append((tuple(_TYPES[name] for name in operands.split(",")), _TYPES[result]))
    return tuple(found)


def _operation(name: str, text: str, function: _Function) -> Callable[..., tensor]:
    overloads = _overloads(text)

    def one(arg0: Any) -> tensor:
        return _applied(name, overloads, function, arg0)

    def two(arg0: Any, arg1: Any) -> tensor:
        return _applied(name, overloads, function, arg0, arg1)

    def three(arg0: Any, arg1: Any, arg2: Any) -> tensor:
        return _applied(name, overloads, function, arg0, arg1, arg2)

    def four(arg0: Any, arg1: Any, arg2: Any, arg3: Any) -> tensor:
        return _applied(name, overloads, function, arg0, arg1, arg2, arg3)

    made = (one, two, three, four)[len(overloads[0][0]) - 1]
    made.__name__ = name
    made.__doc__ = f"`{name}`: {text.replace('>', ' to ').replace(' ', '; ')}."
    return made


def _applied(
    name: str, overloads: tuple[_Overload, ...], function: _Function, *args: Any
) -> tensor:
    operands = [to_tensor(arg) for arg in args]
    types, result = _chosen(name, overloads, tuple(each.dtype for each in operands))
    cast = [in_type(each, type_) for each, type_ in zip(operands, types, strict=True)]
    with np.errstate(all="ignore"):
        return elementwise(name, function, result, *cast)


def _chosen(name: str, overloads: tuple[_Overload, ...], given: tuple[dtype, ...]) -> _Overload:
    """The function of just these types: as in Triton, nothing is converted."""
    for types, result in overloads:
        if types == given:
            return types, result
    raise KernelTypeError(
        f"{place()}: libdevice.{name} is not for {', '.join(map(str, given))}, but for "
        + " or ".join("(" + ", ".join(map(str, each)) + ")" for each, _result in overloads),
        hint="cast with .to(...) first",
    )


_FLOAT = "f32>f32 f64>f64"
_PAIR = "f32,f32>f32 f64,f64>f64"
_TRIPLE = "f32,f32,f32>f32 f64,f64,f64>f64"
_SHORT = "f32>f32"
_TRUTH = "f32>i1 f64>i1"
_WITH_POWER = "f32,i32>f32 f64,i32>f64"
_TWO_INTEGERS = "i32,i32>i32 u32,u32>u32"


def _bits_of(values: Array, type_: Any) -> Array:
    bits: Array = np.ascontiguousarray(values).view(type_)
    return bits


def _each(function: Callable[..., Any], type_: Any, *operands: Array) -> Array:
    """A Python function of each element."""
    found = np.frompyfunc(function, len(operands), 1)(*operands)
    return np.asarray(found, dtype=type_)


def _unsigned(values: Array) -> Array:
    return values.view(np.uint32 if values.itemsize == 4 else np.uint64)


def _leading_zeros(values: Array) -> Array:
    width = values.itemsize * 8
    return _each(lambda value: width - int(value).bit_length(), np.int32, _unsigned(values))


def _first_set(values: Array) -> Array:
    bits = _unsigned(values)
    lowest = bits & (~bits + bits.dtype.type(1))
    return values.itemsize * 8 - _leading_zeros(lowest)


def _reversed_bits(values: Array) -> Array:
    width = values.itemsize * 8
    bits = _unsigned(values)
    turned = _each(lambda value: int(f"{int(value):0{width}b}"[::-1], 2), bits.dtype, bits)
    return turned.view(values.dtype)


def _permuted_bytes(left: Array, right: Array, selector: Array) -> Array:
    both = _unsigned(right).astype(np.uint64) << np.uint64(32) | _unsigned(left)
    found = np.zeros_like(both)
    for at in range(4):
        choice = _unsigned(selector).astype(np.uint64) >> np.uint64(4 * at)
        byte = both >> ((choice & np.uint64(7)) * np.uint64(8)) & np.uint64(0xFF)
        sign = (byte >> np.uint64(7)) * np.uint64(0xFF)
        byte = np.where(choice & np.uint64(8), sign, byte)
        found = found | byte << np.uint64(8 * at)
    return found.astype(np.uint32).view(np.int32)


def _upper_half(left: Array, right: Array) -> Array:
    if left.itemsize == 4:
        wide = np.dtype(np.int64 if left.dtype.kind == "i" else np.uint64)
        upper = left.astype(wide) * right.astype(wide) >> wide.type(32)
        return upper.astype(left.dtype)
    upper = upper_of_64(_unsigned(left), _unsigned(right))
    if left.dtype.kind == "i":  # a negative number is 2^64 more when it is taken for unsigned
        upper = (
            upper
            - np.where(left < 0, _unsigned(right), 0)
            - np.where(right < 0, _unsigned(left), 0)
        )
    bits: Array = upper.astype(np.uint64)
    return bits.view(left.dtype)


def _product_of_24_bits(left: Array, right: Array) -> Array:
    shift = left.dtype.type(8)
    low = [(each << shift >> shift).astype(np.int64) for each in (left, right)]
    product: Array = (low[0] * low[1]).astype(left.dtype)
    return product


def _half_of_sum(left: Array, right: Array, more: int = 0) -> Array:
    return ((left.astype(np.int64) + right + more) >> 1).astype(left.dtype)


def _difference_and(left: Array, right: Array, last: Array) -> Array:
    return np.abs(left.astype(np.int64) - right) + last


def _exponent(values: Array) -> Array:
    return np.frexp(values)[1] - 1


def _logb(values: Array) -> Array:
    of_finite = np.where(values == 0, -np.inf, _exponent(values)).astype(values.dtype)
    return np.where(np.isfinite(values), of_finite, np.abs(values))


def _ilogb(values: Array) -> Array:
    bounds = np.iinfo(np.int32)
    of_finite = np.where(values == 0, bounds.min, _exponent(values))
    return np.where(
        np.isfinite(values), of_finite, np.where(np.isinf(values), bounds.max, bounds.min)
    )


def _norm(*values: Array) -> Array:
    wide = (each.astype(np.float64) for each in values)
    return reduce(np.hypot, wide).astype(values[0].dtype)


def _remainder(left: Array, right: Array) -> Array:
    def of_elements(x: float, y: float) -> float:
        if math.isnan(x) or math.isnan(y) or math.isinf(x) or y == 0:
            return math.nan
        return math.remainder(x, y)

    return _each(of_elements, left.dtype, left, right)


def _saturated(values: Array) -> Array:
    return np.where(np.isnan(values), 0, np.clip(values, 0, 1)).astype(values.dtype)


def _power(values: Array, exponents: Array) -> Array:
    """Powers, those with exact operations by these: numpy does so where one exponent is for all.

    Then other programs beside this one, which have exponents of their own, would change its bits.
    """
    _, each = np.broadcast_arrays(values, exponents)
    result = np.asarray(np.power(values, np.ascontiguousarray(each)))
    for exponent, exact in ((2, np.square), (0.5, np.sqrt), (-1, np.reciprocal)):
        chosen = (exponents == exponent) & ((values > 0) | (exponent != 0.5))
        if chosen.any():
            np.copyto(result, exact(values), where=chosen)
    return result


def _word(values: Array, at: int) -> Array:
    return (_bits_of(values, np.int64) >> (32 * at)).astype(np.int32)


def _from_words(high: Array, low: Array) -> Array:
    bits = high.astype(np.int64) << 32 | low.view(np.uint32).astype(np.int64)
    return bits.view(np.float64)


def _bits_as(type_: Any) -> _Function:
    return lambda values: _bits_of(values, type_)


_OF_FLOATS: dict[str, _Function] = {
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh,
    "atan": np.arctan, "atanh": np.arctanh, "cbrt": np.cbrt, "ceil": np.ceil, "cos": np.cos,
    "cosh": np.cosh, "cospi": by_element(special.cosine_of_turns),
    "cyl_bessel_i0": partial(special.modified_bessel, 0),
    "cyl_bessel_i1": partial(special.modified_bessel, 1),
    "erf": by_element(math.erf), "erfc": by_element(math.erfc),
    "erfcinv": by_element(special.inverse_erfc), "erfcx": by_element(special.scaled_erfc),
    "erfinv": by_element(special.inverse_erf), "exp": np.exp,
    "exp10": lambda values: np.power(values.dtype.type(10), values), "exp2": np.exp2,
    "expm1": np.expm1, "floor": np.floor, "j0": partial(special.bessel, np.zeros(1)),
    "j1": partial(special.bessel, np.ones(1)), "lgamma": by_element(special.gamma_logarithm),
    "y0": partial(special.second_bessel, np.zeros(())),
    "y1": partial(special.second_bessel, np.ones(())),
    "log": np.log, "log10": np.log10, "log1p": np.log1p, "log2": np.log2, "logb": _logb,
    "nearbyint": np.rint, "normcdf": by_element(special.normal_distribution),
    "normcdfinv": by_element(special.normal_quantile), "rcbrt": lambda values: 1 / np.cbrt(values),
    "rint": np.rint, "round": special.rounded_away, "rsqrt": lambda values: 1 / np.sqrt(values),
    "sin": np.sin, "sinh": np.sinh, "sinpi": by_element(special.sine_of_turns), "sqrt": np.sqrt,
    "tan": np.tan, "tanh": np.tanh, "tgamma": by_element(special.gamma), "trunc": np.trunc,
}  # fmt: skip
_FAST: dict[str, _Function] = {
    "fast_cosf": np.cos, "fast_exp10f": _OF_FLOATS["exp10"], "fast_expf": np.exp,
    "fast_log10f": np.log10, "fast_log2f": np.log2, "fast_logf": np.log, "fast_sinf": np.sin,
    "fast_tanf": np.tan, "fast_tanhf": np.tanh, "saturatef": _saturated,
    "rsqrt_rn": lambda values: (1 / np.sqrt(values.astype(np.float64))).astype(values.dtype),
}  # fmt: skip
_OF_PAIRS: dict[str, _Function] = {
    "atan2": np.arctan2, "copysign": np.copysign,
    "fdim": lambda left, right: np.where(left <= right, 0, left - right), "fmax": np.fmax,
    "fmin": np.fmin, "fmod": np.fmod, "hypot": np.hypot, "nextafter": np.nextafter,
    "remainder": _remainder, "rhypot": lambda left, right: 1 / np.hypot(left, right),
}  # fmt: skip
_OTHERS: dict[str, tuple[str, _Function]] = {
    "abs": ("i32>i32 i64>i64 f32>f32 f64>f64", np.abs),
    "brev": ("i32>i32 i64>i64", _reversed_bits),
    "byte_perm": ("i32,i32,i32>i32", _permuted_bytes),
    "clz": ("i32>i32 i64>i32", _leading_zeros),
    "double2hiint": ("f64>i32", lambda values: _word(values, 1)),
    "double2loint": ("f64>i32", lambda values: _word(values, 0)),
    "double_as_longlong": ("f64>i64", _bits_as(np.int64)),
    "fast_dividef": ("f32,f32>f32", np.divide),
    "fast_powf": ("f32,f32>f32", _power),
    "ffs": ("i32>i32 i64>i32", _first_set),
    "finitef": ("f32>i1", np.isfinite),
    "float_as_int": ("f32>i32", _bits_as(np.int32)),
    "float_as_uint": ("f32>i32", _bits_as(np.int32)),
    "fma": (_TRIPLE, partial(calculated, "fma", "rn")),
    "hadd": (_TWO_INTEGERS, _half_of_sum),
    "hiloint2double": ("i32,i32>f64", _from_words),
    "ilogb": ("f32>i32 f64>i32", _ilogb),
    "int2double_rn": ("i32>f64", lambda values: values.astype(np.float64)),
    "int_as_float": ("i32>f32", _bits_as(np.float32)),
    "isfinited": ("f64>i1", np.isfinite),
    "isinf": (_TRUTH, np.isinf),
    "isnan": (_TRUTH, np.isnan),
    "jn": ("i32,f32>f32 i32,f64>f64", special.bessel),
    "yn": ("i32,f32>f32 i32,f64>f64", special.second_bessel),
    "ldexp": (_WITH_POWER, np.ldexp),
    "llrint": ("f32>i64 f64>i64", lambda values: to_integer(values, "rn", np.dtype(np.int64))),
    "llround": (
        "f32>i64 f64>i64",
        lambda values: to_integer(special.rounded_away(values), "rz", np.dtype(np.int64)),
    ),
    "longlong_as_double": ("i64>f64", _bits_as(np.float64)),
    "mul24": (_TWO_INTEGERS, _product_of_24_bits),
    "mulhi": (_TWO_INTEGERS + " i64,i64>i64 u64,u64>u64", _upper_half),
    "norm3d": (_TRIPLE, _norm),
    "norm4d": ("f32,f32,f32,f32>f32 f64,f64,f64,f64>f64", _norm),
    "popc": ("i32>i32 i64>i32", lambda values: np.bitwise_count(_unsigned(values))),
    "pow": (_WITH_POWER + " " + _PAIR, _power),
    "rhadd": (_TWO_INTEGERS, lambda left, right: _half_of_sum(left, right, 1)),
    "rnorm3d": (_TRIPLE, lambda *values: 1 / _norm(*values)),
    "rnorm4d": ("f32,f32,f32,f32>f32 f64,f64,f64,f64>f64", lambda *values: 1 / _norm(*values)),
    "sad": ("i32,i32,u32>i32 u32,u32,u32>u32", _difference_and),
    "scalbn": (_WITH_POWER, np.ldexp),
    "signbit": ("f32>i32 f64>i32", np.signbit),
    "uint2double_rn": ("u32>f64", lambda values: values.astype(np.float64)),
    "uint_as_float": ("u32>f32", _bits_as(np.float32)),
}
_ROUNDED = {"add": _PAIR, "sub": _PAIR, "mul": _PAIR, "div": _PAIR, "sqrt": _FLOAT, "rcp": _FLOAT,
            "fma": _TRIPLE}  # fmt: skip
_TO_INTEGER: dict[str, tuple[str, Any]] = {
    "float2int": ("f32>i32", np.int32), "float2uint": ("f32>i32", np.uint32),
    "float2ll": ("f32>i64", np.int64), "float2ull": ("f32>i64", np.uint64),
    "double2int": ("f64>i32", np.int32), "double2uint": ("f64>i32", np.uint32),
    "double2ll": ("f64>i64", np.int64), "double2ull": ("f64>i64", np.uint64),
}  # fmt: skip
_TO_FLOAT: dict[str, tuple[str, Any]] = {
    "int2float": ("i32>f32", np.float32), "uint2float": ("u32>f32", np.float32),
    "ll2float": ("i64>f32", np.float32), "ull2float": ("u64>f32", np.float32),
    "ll2double": ("i64>f64", np.float64), "ull2double": ("u64>f64", np.float64),
    "double2float": ("f64>f32", np.float32),
}  # fmt: skip


def _whole(mode: str, target: Any) -> _Function:
    def function(values: Array) -> Array:
        whole = to_integer(values, mode, np.dtype(target))
        return whole.view(np.dtype(f"i{whole.itemsize}"))

    return function


def _table() -> dict[str, tuple[str, _Function]]:
    """By name: the types, and the function."""
    table = dict(_OTHERS)
    table |= {name: (_FLOAT, function) for name, function in _OF_FLOATS.items()}
    table |= {name: (_SHORT, function) for name, function in _FAST.items()}
    table |= {name: (_PAIR, function) for name, function in _OF_PAIRS.items()}
    for mode in MODES:
        for name, types in _ROUNDED.items():
            table[f"{name}_{mode}"] = types, partial(calculated, name, mode)
        for name, (types, target) in _TO_INTEGER.items():
            table[f"{name}_{mode}"] = types, _whole(mode, target)
        for name, (types, target) in _TO_FLOAT.items():
            function = partial(from_number, mode=mode, target=np.dtype(target))
            table[f"{name}_{mode}"] = types, function
    return table


TYPES: dict[str, str] = {name: types for name, (types, _function) in _table().items()}
"""By name: of which types it takes what, and gives what."""

globals().update({name: _operation(name, *each) for name, each in _table().items()})

__getattr__ = refusing("libdevice", {"rcp64h": "it gives the device's own approximation"})
