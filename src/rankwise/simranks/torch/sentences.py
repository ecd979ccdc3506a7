"""What operations of torch are, as values that the ranks of a group must agree on.

Each operation of each rank needs one: those that come again are kept, so that the values of equal
calls are one object.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from rankwise.core.matching import NO_RANK, CallSignature, TensorForm, describe_tensors
from rankwise.simranks.torch.gloo_arithmetic import name_of_reduction

_TENSORS_NAMED = 4
"""How many tensors of one call are described; others are counted."""


def describe_shapes(tensors: Sequence[Tensor]) -> str:
    """Tell them as `(4, 3) float32`; several are joined, many are counted."""
    return describe_tensors(*_forms(tensors))


def with_tensors(call: CallSignature, tensors: Sequence[Tensor]) -> CallSignature:
    """An operation on some tensors."""
    told, more = _forms(tensors)
    return replace(call, tensors=told, more=more)


def _forms(tensors: Sequence[Tensor]) -> tuple[tuple[TensorForm, ...], int]:
    told = tuple(form_of(tensor.shape, tensor.dtype) for tensor in tensors[:_TENSORS_NAMED])
    return told, max(0, len(tensors) - _TENSORS_NAMED)


_OF_GLOO = frozenset(
    (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    )
)  # fmt: skip
"""What gloo's collectives take, beside complex numbers; NCCL's take floats of eight bits, too."""


@lru_cache(maxsize=1024)
def operation(name: str, root: int = NO_RANK) -> CallSignature:
    """An operation before its tensors are known; `root` is of all ranks."""
    return CallSignature(name, root=root)


@lru_cache(maxsize=1024)
def with_tensor(call: CallSignature, shape: Any, dtype: Any, backend: str) -> CallSignature:
    """An operation on one tensor.

    Raises:
        RuntimeError: the backend takes no such tensors.
    """
    check_dtype(call.operation, dtype, backend)
    return replace(call, tensors=(form_of(shape, dtype),))


@lru_cache(maxsize=1024)
def of_dtype(call: CallSignature, dtype: Any) -> CallSignature:
    """An operation on tensors of a dtype, whose shapes may differ."""
    return replace(call, tensors=(TensorForm(None, _name(dtype)),))


@lru_cache(maxsize=1024)
def check_dtype(name: str, dtype: Any, backend: str) -> None:
    """Refuse tensors that the collectives of a backend do not take.

    Raises:
        RuntimeError: in the words of gloo, and why.
    """
    if dtype.is_complex:
        is_taken = name != "gather"
    elif dtype.is_floating_point and dtype.itemsize == 1:
        is_taken = backend != "gloo"
    else:
        is_taken = dtype in _OF_GLOO
    if not is_taken:
        raise RuntimeError(f"Invalid scalar type: {name} of {backend} takes no {_name(dtype)}")


@lru_cache(maxsize=1024)
def reducing(name: str, number: int, root: int = NO_RANK) -> CallSignature:
    """A reduction of the kind with this number, before its tensors are known."""
    return CallSignature(name, name_of_reduction(number), root)


def describe_dtype(tensor: Tensor) -> str:
    """A tensor's dtype, for people."""
    return _name(tensor.dtype)


def describe_shape(shape: Any, dtype: Any) -> str:
    """A tensor, by its shape and dtype: `(4, 3) float32`."""
    return str(form_of(shape, dtype))


@lru_cache(maxsize=1024)
def form_of(shape: Any, dtype: Any) -> TensorForm:
    """A tensor without its values."""
    return TensorForm(tuple(shape), _name(dtype))


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
