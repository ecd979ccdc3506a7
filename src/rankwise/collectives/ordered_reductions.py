"""How contributions of the ranks become one: always folded in the order of the ranks.

`((rank 0 + rank 1) + rank 2) + …`, element by element in the arrays' own dtype, so a result does
not depend on timing, and equals what numpy computes for the same expression. (Except for products
of complex numbers, whose last bits differ between numpy's own loops for one and for many.)
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankwise.base.errors import ConfigError
from rankwise.base.suggestions import hint_on_name
from rankwise.core.collectives.reductions import ReduceOp


class Reduction(msgspec.Struct, frozen=True, eq=False):
    """A way to fold arrays: a numpy function of two arguments, perhaps a division at the end."""

    ufunc: np.ufunc
    kinds: str
    """The `dtype.kind`s for which it gives back the dtype that it was given."""
    divides: bool = False


ReductionName = Literal["sum", "mean", "max", "min", "prod"]

REDUCTIONS = {
    ReduceOp.SUM.value: Reduction(np.add, "biufc"),
    ReduceOp.AVG.value: Reduction(np.add, "fc", divides=True),
    ReduceOp.MAX.value: Reduction(np.maximum, "biufc"),
    ReduceOp.MIN.value: Reduction(np.minimum, "biufc"),
    ReduceOp.PRODUCT.value: Reduction(np.multiply, "biufc"),
}


def find_reduction(name: str, op: str, dtype: np.dtype[Any]) -> Reduction:
    """Look up `op` for the operation `name`; ConfigError when it cannot be done."""
    reduction = REDUCTIONS.get(op)
    if reduction is None:
        raise ConfigError(f"{name}: op is {op!r}, {hint_on_name(str(op), REDUCTIONS)}")
    if dtype.kind not in reduction.kinds:
        hint = None
        if op == "mean" and dtype.kind in "biu":
            hint = "convert it with astype(float) first, or use op='sum'"
        raise ConfigError(
            f"{name}: arrays of dtype {dtype} cannot be reduced with {op!r}", hint=hint
        )
    return reduction


def fold(reduction: Reduction, pieces: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
    """Fold pieces of equal length into `out`, which may be any of the first two pieces."""
    if len(pieces) == 1:
        np.copyto(out, pieces[0])
    else:
        reduction.ufunc(pieces[0], pieces[1], out=out)
        for piece in pieces[2:]:
            reduction.ufunc(out, piece, out=out)
    if reduction.divides:
        np.divide(out, len(pieces), out=out)
