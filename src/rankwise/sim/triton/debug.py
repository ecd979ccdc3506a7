"""Assertions, prints, and the hints that a compiler would use."""

from typing import Any, TypeVar

import numpy as np

from rankwise.sim.triton.constants import MAKE_CONSTANT, NEEDS_CONSTANT, plain
from rankwise.sim.triton.execution import (
    DeviceAssertion,
    KernelTypeError,
    Unsupported,
    active,
    place,
    program_text,
)
from rankwise.sim.triton.tensor import broadcast_to, tensor, to_tensor

T = TypeVar("T")


class StaticAssertion(DeviceAssertion):
    """A `static_assert` did not hold: the kernel would not have compiled."""


def static_assert(cond: Any, msg: Any = "") -> None:
    """Refuse to run a kernel whose compile-time parameters do not fit together."""
    cond = plain(cond)
    if isinstance(cond, tensor):
        raise KernelTypeError(
            f"{place()}: static_assert {NEEDS_CONSTANT}",
            hint=f"{MAKE_CONSTANT}; or use tl.device_assert",
        )
    if not cond:
        raise StaticAssertion(f"{place()}: static_assert failed" + (f": {msg}" if msg else ""))


def static_print(
    *values: Any, sep: str = " ", end: str = "\n", file: Any = None, flush: bool = False
) -> None:
    """Print at compile time: once for the programs that run together."""
    del file, flush  # where a launch prints is not for its kernel to say
    active().launch.prints(sep.join(str(plain(value)) for value in values) + end.rstrip("\n"))


def device_assert(cond: Any, msg: Any = "", mask: Any = None) -> None:
    """Stop the launch where a condition does not hold."""
    if not active().launch.computes:
        return
    condition = to_tensor(cond)
    failed = condition.data == 0
    if mask is not None:
        failed = failed & broadcast_to(to_tensor(mask), condition.shape).data
    if failed.any():
        bad = np.argwhere(failed)[0]
        at = f", at {[int(index) for index in bad[1:]]} of the block" if len(bad) > 1 else ""
        raise DeviceAssertion(
            f"{place()}, {program_text(int(bad[0]))}{at}: device_assert failed"
            + (f": {plain(msg)}" if msg else "")
        )


def device_print(prefix: Any, *args: Any, hex: bool = False) -> None:
    """Print values, program by program."""
    execution = active()
    tensors = [to_tensor(arg) for arg in args if not isinstance(plain(arg), str)]
    words = [str(plain(arg)) for arg in args if isinstance(plain(arg), str)]
    rows = max([execution.size if len(each.data) > 1 else 1 for each in tensors], default=1)
    for position in range(execution.size if rows > 1 else 1):
        shown = [_shown(each, position, in_hex=bool(plain(hex))) for each in tensors]
        where = execution.coordinates(position) if rows > 1 or execution.size == 1 else "all"
        text = " ".join([str(plain(prefix)), *words, *shown])
        execution.launch.prints(f"pid {where} {text}")


def _shown(value: tensor, position: int, *, in_hex: bool) -> str:
    row = value.data[position if len(value.data) > 1 else 0]
    if in_hex and value.dtype.is_int():
        return str(np.vectorize(hex)(row))
    return str(row)


def debug_barrier() -> None:
    """A meeting of a program's threads, of which there is one here."""


def assume(cond: Any) -> None:
    """A promise to the compiler; it is checked here."""
    if not active().launch.computes:
        return
    condition = to_tensor(cond)
    if not condition.data.all():
        position = int(np.argwhere(condition.data == 0)[0][0])
        raise DeviceAssertion(f"{place()}, {program_text(position)}: assume(...) does not hold")


def multiple_of(input: T, values: Any) -> T:
    """A promise about divisibility, for a compiler."""
    del values
    return input


def max_contiguous(input: T, values: Any) -> T:
    """A promise about contiguity, for a compiler."""
    del values
    return input


def max_constancy(input: T, values: Any) -> T:
    """A promise about equal values, for a compiler."""
    del values
    return input


def expect_zero(x: T, mask: Any) -> T:
    """A promise about values that underflow, for a sanitizer."""
    del mask
    return x


def inline_asm_elementwise(
    asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int
) -> Any:
    """Assembler of a real accelerator; there is none here."""
    del constraints, args, dtype, is_pure, pack
    raise Unsupported(
        f"{place()}: inline_asm_elementwise has no emulation: it is assembler of another device, "
        f"{' '.join(str(plain(asm)).split())[:60]!r}",
        hint="write the operation in the kernel language when running here",
    )


__all__ = [
    "assume", "debug_barrier", "device_assert", "device_print", "expect_zero",
    "inline_asm_elementwise", "max_constancy", "max_contiguous", "multiple_of", "static_assert",
    "static_print",
]  # fmt: skip
