"""Combining elements, rounded as the accelerator rounds.

Narrow floats are held as float32 whose every value is representable in the narrow type, as the
kernel language holds them: one addition in f32, rounded to the type, is the correctly rounded
narrow addition. Integers wrap around.
"""

from collections.abc import Sequence

import numpy as np

from rankwise.base.errors import ConfigError
from rankwise.core.collectives.reductions import ReduceOp
from rankwise.sim.triton.dtypes import Array, dtype

_FUNCTIONS = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def check_reduction(op: ReduceOp, kind: dtype) -> None:
    """Refuse what is no reduction, or not defined for a type."""
    if not isinstance(op, ReduceOp):
        raise ConfigError(
            f"op is {op!r}, expected a ReduceOp: {', '.join(each.name for each in ReduceOp)}"
        )
    if op is ReduceOp.AVG and not kind.is_floating():
        raise ConfigError(f"an average of {kind} is not defined: reduce with SUM and divide")


def combine(op: ReduceOp, kind: dtype, mine: Array, incoming: Array) -> None:
    """Let `mine` become `mine op incoming`, rounded to the type."""
    _FUNCTIONS[op](mine, incoming, out=mine)
    if kind.is_narrow:
        mine[:] = kind.rounded(mine)


def fold(op: ReduceOp, kind: dtype, contributions: Sequence[Array]) -> Array:
    """All contributions in the given order, accumulated in the compute type, rounded once."""
    function = _FUNCTIONS[op]
    total = contributions[0]
    for contribution in contributions[1:]:
        total = function(total, contribution)
    return kind.rounded(total)


def finish(op: ReduceOp, kind: dtype, values: Array, size: int) -> Array:
    """What is left to do when everything is combined: the division of an average."""
    if op is not ReduceOp.AVG:
        return values
    return kind.rounded((values / kind.compute.type(size)).astype(kind.compute))
