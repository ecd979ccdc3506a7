"""Functions that join the parts: atomics by name, arithmetic of blocks and numbers."""

from collections.abc import Callable
from typing import Any

from rankwise.sim.triton.arithmetic import add, mul, sub
from rankwise.sim.triton.atomics import atomic, compare_and_swap
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.tensor import tensor


def _atomic(name: str) -> Callable[..., tensor]:
    def operation(
        pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None
    ) -> tensor:
        return atomic(name, pointer, val, mask, plain(sem), plain(scope))

    operation.__name__ = f"atomic_{name}"
    operation.__doc__ = f"`{name}` into memory, atomically; what was there before is the result."
    return operation


atomic_add = _atomic("add")
atomic_max = _atomic("max")
atomic_min = _atomic("min")
atomic_and = _atomic("and")
atomic_or = _atomic("or")
atomic_xor = _atomic("xor")
atomic_xchg = _atomic("xchg")


def atomic_cas(pointer: Any, cmp: Any, val: Any, sem: Any = None, scope: Any = None) -> tensor:
    """Store `val` where memory holds `cmp`, atomically; what was there before is the result."""
    return compare_and_swap(pointer, cmp, val, plain(sem), plain(scope))


def atomic_load(pointer: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> tensor:
    """Read what other programs write meanwhile."""
    return atomic("load", pointer, 0, mask, plain(sem), plain(scope))


def atomic_store(
    pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None
) -> None:
    """Write what other programs read meanwhile."""
    atomic("xchg", pointer, val, mask, plain(sem), plain(scope))


def add_numbers(x: Any, y: Any, sanitize_overflow: bool = True) -> Any:
    """`x + y`."""
    del sanitize_overflow
    return add(x, y) if _any_tensor(x, y) else plain(x) + plain(y)


def sub_numbers(x: Any, y: Any, sanitize_overflow: bool = True) -> Any:
    """`x - y`."""
    del sanitize_overflow
    return sub(x, y) if _any_tensor(x, y) else plain(x) - plain(y)


def mul_numbers(x: Any, y: Any, sanitize_overflow: bool = True) -> Any:
    """`x * y`."""
    del sanitize_overflow
    return mul(x, y) if _any_tensor(x, y) else plain(x) * plain(y)


def _any_tensor(*values: Any) -> bool:
    return any(isinstance(plain(value), tensor) for value in values)


def condition(arg1: Any, disable_licm: bool = False) -> bool:
    """The truth of a number, for `while`."""
    del disable_licm
    return bool(arg1)
