"""What tensors held after a task, in a few numbers each."""

from collections.abc import Iterable

import numpy as np

from rankwise.core.tasks.tensors import ContinuousTensor, DataType
from rankwise.workers.arrays import Array
from rankwise.workers.platforms.port import TensorSummary


def summaries_of(
    tensors: Iterable[tuple[str, ContinuousTensor, Array]],
) -> tuple[TensorSummary, ...]:
    """Summarise tensors, given with their names and the elements as they are stored."""
    return tuple(_summary(name, tensor, stored) for name, tensor, stored in tensors)


def _summary(name: str, tensor: ContinuousTensor, stored: Array) -> TensorSummary:
    values = _values(tensor.dtype, stored)
    finite = values[np.isfinite(values)]
    return TensorSummary(
        argument=name,
        dtype=tensor.dtype.name,
        shape=tensor.shapes,
        minimum=float(finite.min()) if finite.size else 0.0,
        maximum=float(finite.max()) if finite.size else 0.0,
        mean=float(finite.mean(dtype=np.float64)) if finite.size else 0.0,
        nans=int(np.isnan(values).sum()),
        infinities=int(np.isinf(values).sum()),
    )


def _values(kind: DataType, stored: Array) -> Array:
    if kind is DataType.BFLOAT16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored
