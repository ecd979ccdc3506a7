"""The reductions that collectives know: one vocabulary, whatever carries them out."""

from enum import Enum


class ReduceOp(Enum):
    """How elements are combined; the value is what `rankwise.collectives` calls it."""

    SUM = "sum"
    AVG = "mean"
    """The sum, divided by the number of ranks at the end; not for integers."""
    PRODUCT = "prod"
    MIN = "min"
    MAX = "max"
