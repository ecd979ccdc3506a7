"""Torch tensors as arguments of tasks; torch itself is only there if the caller has it."""

from typing import Any

from rankwise.base.errors import TreeValueError
from rankwise.core.tasks.tensors import ContinuousTensor, DataType

_DATA_TYPES = {kind.name.lower(): kind for kind in DataType}


def torch_dtype_to_datatype(dtype: Any) -> DataType:
    """The data type that a `torch.dtype` is.

    Raises:
        ConfigError: there is none; the message lists what there is.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DATA_TYPES:
        raise TreeValueError(
            f"tensors of {dtype} cannot be given to a task",
            hint=f"convert it with .to() to one of {', '.join(_DATA_TYPES)}",
        )
    return _DATA_TYPES[name]


def make_tensor_arg(tensor: Any) -> ContinuousTensor:
    """Describe a torch tensor, which stays the owner of its memory.

    To reach other processes, it must lie in shared memory: `tensor.share_memory_()` before the
    worker is initialised.

    Raises:
        ConfigError: it is not on the CPU, not dense, or of a type without `DataType`.
    """
    if not hasattr(tensor, "data_ptr"):
        raise TreeValueError(
            f"{type(tensor).__name__} {tensor!r:.60} is not a torch tensor",
            hint="numpy arrays and numbers are given to a task as they are",
        )
    if tensor.device.type != "cpu":
        raise TreeValueError(
            f"a tensor is on {tensor.device}, expected the CPU", hint="move it with .cpu()"
        )
    kind = torch_dtype_to_datatype(tensor.dtype)
    if not tensor.is_contiguous():
        raise TreeValueError(
            f"a tensor of shape {tuple(tensor.shape)} has strides {tuple(tensor.stride())}, and is "
            "not dense",
            hint="make it dense with .contiguous()",
        )
    return ContinuousTensor(tensor.data_ptr(), tuple(tensor.shape), kind)
