"""How operations of torch are told: `all_reduce #3 (sum) of (4, 3) float32`.

Words are what the ranks of a group must agree on, so they are made for each operation: those that
come again are kept.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rankwise.sim.torch.arithmetic import name_of_reduction


def told_shapes(tensors: Sequence[Tensor]) -> str:
    """Tell them as `(4, 3) float32`; several are joined, many are counted."""
    told = [told_shape(tensor.shape, tensor.dtype) for tensor in tensors[:4]]
    more = f" and {len(tensors) - 4} more" if len(tensors) > 4 else ""
    return ", ".join(told) + more


_OF_GLOO = frozenset(
    (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    )
)  # fmt: skip
"""What gloo's collectives take, beside complex numbers; NCCL's take floats of eight bits, too."""


@lru_cache(maxsize=1024)
def called(call: str, shape: Any, dtype: Any, backend: str) -> str:
    """An operation on one tensor.

    Raises:
        RuntimeError: the backend takes no such tensors.
    """
    check_dtype(call, dtype, backend)
    return f"{call} of {told_shape(shape, dtype)}"


@lru_cache(maxsize=1024)
def check_dtype(call: str, dtype: Any, backend: str) -> None:
    """Refuse tensors that the collectives of a backend do not take.

    Raises:
        RuntimeError: in the words of gloo, and why.
    """
    name = call.partition(" ")[0]
    if dtype.is_complex:
        is_taken = name != "gather"
    elif dtype.is_floating_point and dtype.itemsize == 1:
        is_taken = backend != "gloo"
    else:
        is_taken = dtype in _OF_GLOO
    if not is_taken:
        raise RuntimeError(f"Invalid scalar type: {name} of {backend} takes no {_name(dtype)}")


@lru_cache(maxsize=1024)
def reducing(name: str, number: int) -> str:
    """A reduction of the kind with this number, before its tensors are told."""
    return f"{name} #? ({name_of_reduction(number)})"


def told_dtype(tensor: Tensor) -> str:
    """A tensor's dtype, for people."""
    return _name(tensor.dtype)


@lru_cache(maxsize=1024)
def told_shape(shape: Any, dtype: Any) -> str:
    """A tensor, by its shape and dtype: `(4, 3) float32`."""
    return f"{tuple(shape)} {_name(dtype)}"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
