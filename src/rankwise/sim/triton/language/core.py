"""What libraries use of Triton's inner module `triton.language.core`; else the language itself."""

from typing import Any

from rankwise.sim.triton import language
from rankwise.sim.triton.constants import constexpr, plain
from rankwise.sim.triton.dtypes import dtype, dtype_named
from rankwise.sim.triton.execution import Unsupported
from rankwise.sim.triton.refusals import refusing

_REFUSED = dict.fromkeys(
    ("_experimental_reduction", "builtin", "extern", "ir", "is_builtin"),
    "operations of one's own would be written for the compiler; write a jit function",
)
_refused = refusing("tl.core", _REFUSED)
CONSTEXPR_0 = constexpr(0)


def get_int_dtype(bitwidth: Any, signed: Any) -> dtype:
    """The integer type of so many bits."""
    return dtype_named(f"{'' if plain(signed) else 'u'}int{plain(bitwidth)}")


def _aggregate(cls: Any) -> Any:
    """Refuse: classes of values. vLLM imports it beside the language, for its kernels in gluon."""
    raise Unsupported(
        f"class {cls.__name__}: aggregates are not emulated", hint="a kernel passes tuples"
    )


def __getattr__(name: str) -> Any:
    return _refused(name) if name in _REFUSED else getattr(language, name)
