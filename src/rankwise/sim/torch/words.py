"""How operations of torch are told: `all_reduce #3 (sum) of (4, 3) float32`.

Words are what the ranks of a group must agree on, so they are made for each operation: those that
come again are kept.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from rankwise.sim.torch.arithmetic import op_name


def told_shapes(tensors: Sequence[Tensor]) -> str:
    """Tell them as `(4, 3) float32`; several are joined, many are counted."""
    told = [_shape(tensor.shape, tensor.dtype) for tensor in tensors[:4]]
    more = f" and {len(tensors) - 4} more" if len(tensors) > 4 else ""
    return ", ".join(told) + more


@lru_cache(maxsize=1024)
def called(call: str, shape: Any, dtype: Any) -> str:
    """An operation on one tensor."""
    return f"{call} of {_shape(shape, dtype)}"


@lru_cache(maxsize=1024)
def reducing(name: str, kind: Any) -> str:
    """A reduction, before its tensors are told."""
    return f"{name} #? ({op_name(kind)})"


def told_dtype(tensor: Tensor) -> str:
    """A tensor's dtype, for people."""
    return str(tensor.dtype).removeprefix("torch.")


@lru_cache(maxsize=1024)
def _shape(shape: Any, dtype: Any) -> str:
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"
