"""How contributions of the ranks become one: always folded in the order of the ranks.

`((rank 0 + rank 1) + rank 2) + …`, element by element in the arrays' own dtype, so a result does
not depend on timing, and equals what numpy computes for the same expression. (Except for products
of complex numbers, whose last bits differ between numpy's own loops for one and for many.)
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankwise.base.errors import ConfigError


class Reduction(msgspec.Struct, frozen=True, eq=False):
    """A way to fold arrays: a numpy function of two arguments, perhaps a division at the end."""

    ufunc: np.ufunc
    kinds: str
    """The `dtype.kind`s for which it gives back the dtype that it was given."""
    divides: bool = False


REDUCTIONS = {
    "sum": Reduction(np.add, "biufc"),
    "mean": Reduction(np.add, "fc", divides=True),
    "max": Reduction(np.maximum, "biufc"),
    "min": Reduction(np.minimum, "biufc"),
    "prod": Reduction(np.multiply, "biufc"),
}


def find_reduction(name: str, op: str, dtype: np.dtype[Any]) -> Reduction:
    """Look up `op` for the operation `name`; ConfigError when it cannot be done."""
    reduction = REDUCTIONS.get(op)
    if reduction is None:
        raise ConfigError(f"{name}: op is {op!r}, expected one of {', '.join(REDUCTIONS)}")
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
        reduction.ufunc(pieces[0], pieces[1], out)
        for piece in pieces[2:]:
            reduction.ufunc(out, piece, out)
    if reduction.divides:
        np.divide(out, len(pieces), out)
