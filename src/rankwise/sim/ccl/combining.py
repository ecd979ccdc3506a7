# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""What kernels of collectives combine with: the operations of `ReduceOp`, to the same bits."""

import rankwise.sim.triton.language as tl
from rankwise.sim.triton import jit

KEEPS_NAN = tl.constexpr(tl.PropagateNan.ALL)


@jit
def combined(mine, incoming, OP: tl.constexpr):
    """`mine OP incoming`, rounded to their type; a NaN wins."""
    if OP == "add":
        return mine + incoming
    if OP == "mul":
        return mine * incoming
    if OP == "min":
        return tl.minimum(mine, incoming, propagate_nan=KEEPS_NAN)
    return tl.maximum(mine, incoming, propagate_nan=KEEPS_NAN)
