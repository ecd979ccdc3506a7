"""Triton's language, emulated: `import rankwise.sim.triton as triton`.

Kernels written for Triton run unmodified on the CPU, with the accelerator's numerics. See
`docs/sim/kernels.md`.
"""

from contextlib import AbstractContextManager

from rankwise.sim.triton import language, runtime, testing, tools
from rankwise.sim.triton.constants import constexpr_function
from rankwise.sim.triton.execution import (
    DataRace,
    DeviceAssertion,
    KernelError,
    KernelTypeError,
    KernelValueError,
    Operation,
    OutOfBounds,
    Unsupported,
)
from rankwise.sim.triton.jit import JITFunction, jit
from rankwise.sim.triton.launch_arguments import TypedArray, typed
from rankwise.sim.triton.refusals import COMPILER, GLUON, refusing
from rankwise.sim.triton.runtime import cdiv, next_power_of_2, set_allocator
from rankwise.sim.triton.tuning import Config, autotune, heuristics

__getattr__ = refusing(
    "triton",
    {
        **dict.fromkeys(("AsyncCompileMode", "FutureKernel", "MockTensor", "compile"), COMPILER),
        "_C": COMPILER,
        "aggregate": "a kernel passes tuples",
        "experimental": GLUON,
    },
)

__version__ = "3.9.0"
"""The release of Triton whose language this is."""


def installed() -> AbstractContextManager[None]:
    """Let `import triton` find this emulator, in this process, for a block (`triton_shim`)."""
    from rankwise.sim.triton import triton_shim  # noqa: PLC0415  # few ask for it

    return triton_shim.installed()


__all__ = [
    "Config",
    "DataRace",
    "DeviceAssertion",
    "JITFunction",
    "KernelError",
    "KernelTypeError",
    "KernelValueError",
    "Operation",
    "OutOfBounds",
    "TypedArray",
    "Unsupported",
    "autotune",
    "cdiv",
    "constexpr_function",
    "heuristics",
    "installed",
    "jit",
    "language",
    "next_power_of_2",
    "runtime",
    "set_allocator",
    "testing",
    "tools",
    "typed",
]
