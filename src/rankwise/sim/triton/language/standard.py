"""What libraries use of Triton's inner module `triton.language.standard`; else the language.

Kernels give its combine functions to `reduce` and `associative_scan`.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from rankwise.sim.triton import functions, language, shapes
from rankwise.sim.triton.constants import constexpr, plain


def _log2(i: Any) -> constexpr:
    """How often a power of two can be halved."""
    return constexpr(int(plain(i)).bit_length() - 1)


_sum_combine, _prod_combine = operator.add, operator.mul
_xor_combine, _or_combine = operator.xor, operator.or_
_elementwise_max, _elementwise_min = functions.maximum, functions.minimum


def _arg_combine(is_first: Callable[[Any, Any], Any]) -> Callable[..., tuple[Any, Any]]:
    def combine(
        value1: Any, index1: Any, value2: Any, index2: Any, tie_break_left: Any
    ) -> tuple[Any, Any]:
        first = is_first(value1, value2)
        if plain(tie_break_left):
            first = first | ((value1 == value2) & (index1 < index2))
        return shapes.where(first, value1, value2), shapes.where(first, index1, index2)

    return combine


_argmax_combine, _argmin_combine = _arg_combine(operator.gt), _arg_combine(operator.lt)
_argmax_combine_tie_break_left = partial(_argmax_combine, tie_break_left=True)
_argmax_combine_tie_break_fast = partial(_argmax_combine, tie_break_left=False)
_argmin_combine_tie_break_left = partial(_argmin_combine, tie_break_left=True)
_argmin_combine_tie_break_fast = partial(_argmin_combine, tie_break_left=False)


def __getattr__(name: str) -> Any:
    return getattr(language, name)
