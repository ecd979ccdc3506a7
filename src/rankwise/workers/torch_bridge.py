"""Torch tensors as arguments of tasks; torch itself is only there if the caller has it."""

from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.core.mailbox.tensors import ContinuousTensor, DataType

_DATA_TYPES = {
    "float32": DataType.FLOAT32, "float16": DataType.FLOAT16, "int32": DataType.INT32,
    "int16": DataType.INT16, "int8": DataType.INT8, "uint8": DataType.UINT8,
    "bfloat16": DataType.BFLOAT16, "int64": DataType.INT64, "uint64": DataType.UINT64,
    "uint16": DataType.UINT16, "uint32": DataType.UINT32,
}  # fmt: skip


def torch_dtype_to_datatype(dtype: Any) -> DataType:
    """The data type that a `torch.dtype` is.

    Raises:
        ConfigError: there is none; the message lists what there is.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DATA_TYPES:
        raise ConfigError(
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
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"a tensor is on {tensor.device}, expected the CPU", hint="move it with .cpu()"
        )
    kind = torch_dtype_to_datatype(tensor.dtype)
    if not tensor.is_contiguous():
        raise ConfigError(
            f"a tensor of shape {tuple(tensor.shape)} has strides {tuple(tensor.stride())}, and is "
            "not dense",
            hint="make it dense with .contiguous()",
        )
    return ContinuousTensor(tensor.data_ptr(), tuple(tensor.shape), kind)
