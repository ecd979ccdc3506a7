"""Between tensors that are named by address and numpy arrays that show their elements.

`array_at` gives a view of host memory at an address. An address that nothing is mapped to would end
the process, so it is looked up first; an address of other memory of the same process cannot be told
from a right one.
"""

import ctypes
import errno
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankwise.base.errors import TreeValueError
from rankwise.core.tasks.tensors import CONTINUOUS_TENSOR_MAX_DIMS, ContinuousTensor, DataType
from rankwise.workers.errors import BadPointer

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

_NUMPY_NAMES = {kind: kind.name.lower() for kind in DataType} | {DataType.BFLOAT16: "uint16"}
"""The numpy type in which elements are stored; numpy has no bfloat16, so its bits are shown."""

_DATA_TYPES = {name: kind for kind, name in _NUMPY_NAMES.items() if kind != DataType.BFLOAT16} | {
    "bfloat16": DataType.BFLOAT16  # what packages that add it to numpy call it
}
_KINDS: "dict[np.dtype[Any], DataType]" = {}
"""What was found out before: a type's name takes long to make."""
_MS_ASYNC = 1
read_only: list[tuple[int, int]] = []
"""Memory from an address to another that the running task must not write; see `input_check`."""


def numpy_type(kind: DataType) -> "np.dtype[Any]":
    """The numpy type in which elements of this kind are stored."""
    return np.dtype(_NUMPY_NAMES[kind])


def data_type_of(numpy_kind: Any) -> DataType:
    """The data type that a numpy type is.

    Raises:
        ConfigError: there is none; the message lists what there is.
    """
    name = np.dtype(numpy_kind).name
    if name not in _DATA_TYPES:
        raise TreeValueError(
            f"arrays of {name} cannot be given to a task",
            hint=f"convert it with astype to one of {', '.join(_DATA_TYPES)}",
        )
    return _DATA_TYPES[name]


def describe_array(array: Any) -> ContinuousTensor:
    """Describe a numpy array, which stays the owner of its memory.

    Raises:
        ConfigError: it is no array, not dense and row-major, or of a type without `DataType`.
    """
    if not isinstance(array, np.ndarray):
        raise TreeValueError(
            f"a tensor is given as {type(array).__name__}, expected a ContinuousTensor, a numpy "
            "array or a torch tensor"
        )
    kind = _KINDS.get(array.dtype)
    if kind is None:
        kind = _KINDS[array.dtype] = data_type_of(array.dtype)
    if not array.flags.c_contiguous:
        raise TreeValueError(
            f"an array of shape {array.shape} has strides {array.strides}, and is not dense",
            hint="numpy.ascontiguousarray makes a dense copy",
        )
    if not array.dtype.isnative:
        raise TreeValueError(
            f"an array has elements of type {array.dtype}, not in native byte order"
        )
    shape, address = array.shape, array.__array_interface__["data"][0]
    if len(shape) > CONTINUOUS_TENSOR_MAX_DIMS or not 0 < array.size < 1 << 32:
        return ContinuousTensor(address, shape, kind)  # says what is wrong, if it is
    return ContinuousTensor.known(address, shape, kind)


def array_at(tensor: ContinuousTensor, name: str = "a tensor") -> Array:
    """The elements of a tensor in host memory, to be read and written in place.

    The view does not keep the memory alive: its owner has to.

    Raises:
        BadPointer: nothing is mapped there, or it is a pointer of a chip.
    """
    if tensor.child_memory:
        raise BadPointer(
            f"{name} lies in a chip's memory at {tensor.data:#x}: the host cannot look at it",
            hint="copy_from brings it to the host",
        )
    size = tensor.nbytes()
    flat = host_bytes(tensor.data, size, name)
    if read_only:
        end = tensor.data + size
        if any(tensor.data < last and first < end for first, last in read_only):
            flat.flags.writeable = False
    return flat.view(numpy_type(tensor.dtype)).reshape(tensor.shapes)


def host_bytes(address: int, size: int, name: str = "a tensor") -> Bytes:
    """Memory of this process from an address on, as an array of bytes.

    Raises:
        BadPointer: not all of it is mapped.
    """
    if size < 0:
        raise TreeValueError(f"{name} has {size} bytes, expected 0 or more")
    if size == 0:
        return np.empty(0, np.uint8)
    _check_mapped(address, size, name)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _check_mapped(address: int, size: int, name: str) -> None:
    """Ask the kernel whether a range is mapped: an msync that writes nothing says so."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if address == 0 or address + size > 1 << 63:
        problem = "a null pointer" if address == 0 else "no address of the host"
        raise BadPointer(f"{name} has {size} bytes at {address:#x}, which is {problem}")
    if _msync(start, address + size - start, _MS_ASYNC):
        number = ctypes.get_errno()
        reason = "is not mapped here" if number == errno.ENOMEM else os.strerror(number)
        raise BadPointer(
            f"{name} has {size} bytes at {address:#x}, which {reason}",
            hint="tensors of tasks must lie in memory that the worker shares: what alloc gives, "
            "or what was mapped before the worker was started",
        )


_msync = ctypes.CDLL(None, use_errno=True).msync
_msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
