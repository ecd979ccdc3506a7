"""What a kernel's annotations say of its parameters' types.

`n: tl.int64` makes a number of the host an int64, whatever its value is; without an annotation the
value decides (`host`). Annotations of pointers say nothing: memory has its array's type.
"""

from inspect import Parameter
from typing import Any

import numpy as np

from rankwise.base.errors import LocalProtocolError
from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.dtypes import dtype
from rankwise.sim.triton.tensor import scalar, tensor

_TYPES = {
    spelling: each
    for each in t.SCALAR_TYPES
    for spelling in (
        each.name,
        repr(each).rpartition(".")[2],
        each.name.replace("uint", "u").replace("int", "i"),
    )
} | {
    "bool": t.int1, "uint1": t.int1, "u1": t.int1, "half": t.float16, "float": t.float32,
    "double": t.float64, "int": t.int32,
}  # fmt: skip
"""By Triton's spellings, without the `_t` that some have."""


def annotated_type(annotation: Any) -> dtype | None:
    """The type that an annotation gives to a number; None if it gives none."""
    if annotation is Parameter.empty:
        return None
    if isinstance(annotation, dtype):
        return None if annotation.is_ptr() else annotation
    word = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return _TYPES.get(word.strip().removeprefix("tl.").replace("_t", ""))


def is_number(value: Any) -> bool:
    """Whether an argument is a number of the host's."""
    return isinstance(plain(value), bool | int | float | np.number | np.bool_)


def number_as(name: str, value: Any, type_: dtype) -> tensor:
    """A number in the type of its parameter; what an integer has beyond its bits is dropped."""
    number = plain(value)
    number = number.item() if isinstance(number, np.generic) else number
    if type_.is_floating():
        return scalar(type_.rounded(np.array([number], type_.compute))[0], type_)
    if isinstance(number, float):
        raise LocalProtocolError(
            f"argument {name!r} is {number!r}, and its parameter is annotated with {type_}",
            hint="give a whole number, or annotate the parameter with tl.float32",
        )
    if type_.is_bool():
        return scalar(bool(number), type_)
    bits = type_.primitive_bitwidth
    number %= 2**bits
    return scalar(number - 2**bits if number > type_.limits()[1] else number, type_)
