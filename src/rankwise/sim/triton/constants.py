"""`constexpr`: a value that is known when the kernel is compiled.

Kernels get their `constexpr` parameters as plain Python values; the class is for globals and for
values that a kernel wraps itself. It behaves as the value does, and a calculation with it gives a
plain value.
"""

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any

NEEDS_CONSTANT = "needs what is known at compile time"
MAKE_CONSTANT = "annotate the parameter or the variable: `N: tl.constexpr = ...`"


def plain(value: Any) -> Any:
    """The value inside a constexpr; anything else as it is."""
    while isinstance(value, constexpr):
        value = value.value
    return value


def _binary(function: Callable[[Any, Any], Any]) -> Callable[["constexpr", Any], Any]:
    def operation(self: "constexpr", other: Any) -> Any:
        return function(self.value, plain(other))

    return operation


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[["constexpr", Any], Any]:
    def operation(self: "constexpr", other: Any) -> Any:
        return function(plain(other), self.value)

    return operation


def constexpr_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of compile-time values, for kernels and their callers."""

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*map(plain, args), **{name: plain(each) for name, each in kwargs.items()})

    return call


class const:
    """The annotation of a parameter that points to what a kernel only reads; it changes nothing."""


class constexpr:
    """A value known at compile time."""

    def __init__(self, value: Any) -> None:
        self.value: Any = plain(value)

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _binary(operator.pow), _reflected(operator.pow)
    __and__, __rand__ = _binary(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _binary(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor), _reflected(operator.xor)
    __lshift__, __rlshift__ = _binary(operator.lshift), _reflected(operator.lshift)
    __rshift__, __rrshift__ = _binary(operator.rshift), _reflected(operator.rshift)
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __eq__ = _binary(operator.eq)
    __ne__ = _binary(operator.ne)

    def __hash__(self) -> int:
        return hash(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __neg__(self) -> Any:
        return -self.value

    def __pos__(self) -> Any:
        return +self.value

    def __invert__(self) -> Any:
        return ~self.value

    def __getitem__(self, key: Any) -> Any:
        return self.value[plain(key)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the value, with plain arguments."""
        return self.value(*map(plain, args), **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    def __repr__(self) -> str:
        return f"constexpr[{self.value}]"
