"""What libraries use of Triton's inner module `triton.language.core`; else the language itself."""

from typing import Any

from rankwise.sim.triton import language
from rankwise.sim.triton.constants import constexpr, plain
from rankwise.sim.triton.dtypes import dtype, dtype_named

CONSTEXPR_0 = constexpr(0)


def get_int_dtype(bitwidth: Any, signed: Any) -> dtype:
    """The integer type of so many bits."""
    return dtype_named(f"{'' if plain(signed) else 'u'}int{plain(bitwidth)}")


def __getattr__(name: str) -> Any:
    return getattr(language, name)
