"""The kernel language: `import rankwise.sim.triton.language as tl`.

The names are Triton's. The module that implements a name says what it promises;
`docs/sim/kernels.md` says what differs from an accelerator.
"""

import builtins
from typing import Any, NoReturn

import numpy as np

from rankwise.sim.triton import debug as _debug
from rankwise.sim.triton import descriptors as _descriptors
from rankwise.sim.triton import dtypes as _dtypes
from rankwise.sim.triton import functions as _functions
from rankwise.sim.triton import random_numbers as _random_numbers
from rankwise.sim.triton import reductions as _reductions
from rankwise.sim.triton import shapes as _shapes
from rankwise.sim.triton.access import load, store
from rankwise.sim.triton.casting import cast
from rankwise.sim.triton.constants import const, constexpr
from rankwise.sim.triton.creation import arange, num_programs, program_id, range, static_range
from rankwise.sim.triton.debug import *  # noqa: F403
from rankwise.sim.triton.descriptors import *  # noqa: F403
from rankwise.sim.triton.dtypes import *  # noqa: F403
from rankwise.sim.triton.execution import Unsupported, place
from rankwise.sim.triton.functions import *  # noqa: F403
from rankwise.sim.triton.ipcq import recv, send
from rankwise.sim.triton.language import core, extra, math, standard
from rankwise.sim.triton.mapping import map_elementwise
from rankwise.sim.triton.microscaling import dot_scaled
from rankwise.sim.triton.operations import (
    add_numbers as add,
)
from rankwise.sim.triton.operations import (
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_load,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_store,
    atomic_xchg,
    atomic_xor,
    condition,
)
from rankwise.sim.triton.operations import (
    mul_numbers as mul,
)
from rankwise.sim.triton.operations import (
    sub_numbers as sub,
)
from rankwise.sim.triton.random_numbers import *  # noqa: F403
from rankwise.sim.triton.reductions import *  # noqa: F403
from rankwise.sim.triton.refusals import refusing
from rankwise.sim.triton.shapes import *  # noqa: F403
from rankwise.sim.triton.tensor import BLOCK_ELEMENTS_MAX, tensor, to_tensor

slice: Any = builtins.slice
tuple: Any = builtins.tuple
TRITON_MAX_TENSOR_NUMEL = BLOCK_ELEMENTS_MAX

_METHOD_NAMES = (
    "abs", "advance", "argmax", "argmin", "associative_scan", "atomic_add", "atomic_and",
    "atomic_cas", "atomic_max", "atomic_min", "atomic_or", "atomic_xchg", "atomic_xor",
    "broadcast_to", "cast", "cdiv", "ceil", "cos", "cumprod", "cumsum", "erf", "exp", "exp2",
    "expand_dims", "flip", "floor", "gather", "histogram", "log", "log2", "max", "min", "permute",
    "ravel", "reduce", "reshape", "rsqrt", "sigmoid", "sin", "softmax", "sort", "split", "sqrt",
    "sqrt_rn", "squeeze", "store", "sum", "trans", "unsqueeze", "view", "xor_sum",
)  # fmt: skip
for _name in _METHOD_NAMES:
    setattr(tensor, _name, globals()[_name])
for _name, _method in (("to", cast), ("T", property(trans)), ("__getitem__", _shapes.subscript)):  # noqa: F405
    setattr(tensor, _name, _method)


def _of_other_devices(name: str) -> _dtypes.dtype:
    """A type that tables of libraries have beside others; to compute with it is refused."""

    def refuse(_: Any) -> NoReturn:
        raise Unsupported(
            f"{place()}: tl.{name} is not emulated: a format of other devices' own",
            hint="docs/development/kernels.md lists refused names",
        )

    type_ = _dtypes.dtype(name.replace("float", "fp"), "f", 8, np.uint8, np.float32)
    type_._round = type_._decode = type_._encode = refuse  # noqa: SLF001  # as dtypes.py does
    return type_


float8e4b15, float8e4b8, float8e5b16 = map(
    _of_other_devices, ("float8e4b15", "float8e4b8", "float8e5b16")
)

_OF_COMPILER = "it describes types to the compiler"
__getattr__ = refusing(
    "tl",
    {
        "aggregate_replace": "there are no aggregates",
        "atomic_poll": "wait with a `while` over atomic_load",
        **dict.fromkeys(
            ("constexpr_type", "semantic", "str_to_ty", "tensor_descriptor_type", "tuple_type"),
            _OF_COMPILER,
        ),
    },
)

__all__ = [
    "TRITON_MAX_TENSOR_NUMEL", "Unsupported", "add", "arange", "atomic_add", "atomic_and",
    "atomic_cas", "atomic_load", "atomic_max", "atomic_min", "atomic_or", "atomic_store",
    "atomic_xchg", "atomic_xor", "cast", "condition", "const", "constexpr", "core", "dot_scaled",
    "extra", "load", "map_elementwise", "math", "mul", "num_programs", "place", "program_id",
    "range", "recv", "send", "slice", "standard", "static_range", "store", "sub", "tensor",
    "to_tensor", "tuple",
]  # fmt: skip
__all__ += _debug.__all__
__all__ += _descriptors.__all__
__all__ += _dtypes.__all__
__all__ += _functions.__all__
__all__ += _random_numbers.__all__
__all__ += _reductions.__all__
__all__ += _shapes.__all__
