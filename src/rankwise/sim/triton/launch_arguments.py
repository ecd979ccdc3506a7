"""Arguments of a launch: what a caller passes, as what a kernel sees.

An array becomes a pointer to its first element, a number a scalar of the narrowest type that Triton
would choose. Arrays of any library are taken by their shape: `__array_interface__`, or torch's
`data_ptr`; torch itself is never imported. A strided view is seen through the whole run of elements
between its first and its last, as on a device.
"""

import ctypes
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import ref

import numpy as np

from rankwise.base.errors import LocalProtocolError
from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.affine import Affine
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.descriptors import (
    DESCRIPTOR_AXES,
    DESCRIPTOR_BYTES,
    tensor_descriptor,
)
from rankwise.sim.triton.dtypes import Array, dtype
from rankwise.sim.triton.memory import Buffer
from rankwise.sim.triton.tensor import number_type, scalar, tensor, why_no_block


class TypedArray(NamedTuple):
    """An array of bits with the type that numpy has no name for: bfloat16 or an eight-bit float."""

    array: Array
    dtype: dtype

    def numpy(self) -> Array:
        """The values, as float32."""
        return self.dtype.decode(self.array)


def typed(values: Any, type_: dtype) -> TypedArray:
    """Values rounded to a type, in memory's form; for types that numpy has not."""
    rounded = type_.rounded(np.asarray(values).astype(type_.compute))
    return TypedArray(type_.encode(rounded), type_)


class WrongDescriptor(LocalProtocolError, AssertionError):
    """A descriptor that hardware does not take; an `AssertionError`, as Triton's is."""


@dataclass(eq=False, repr=False)
class TensorDescriptor:
    """A tensor seen through blocks of one shape, made on the host."""

    base: Any
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False
    """Changes nothing: fp32 is multiplied exactly."""

    def __post_init__(self) -> None:
        shape, strides, block_shape = (
            list(each) for each in (self.shape, self.strides, self.block_shape)
        )
        if not len(shape) == len(strides) == len(block_shape):
            raise WrongDescriptor(
                f"a TensorDescriptor got {len(shape)} sizes, {len(strides)} strides and "
                f"{len(block_shape)} block sizes: they must be equally many"
            )
        if not 1 <= len(shape) <= DESCRIPTOR_AXES:
            raise WrongDescriptor(f"a TensorDescriptor has 1 to 5 axes, not {len(shape)}")
        if strides[-1] != 1:
            raise WrongDescriptor(
                f"the last axis of a TensorDescriptor has stride {strides[-1]}: it must be 1"
            )
        reason = why_no_block(tuple(int(plain(each)) for each in block_shape))
        if reason is not None:
            raise WrongDescriptor(f"the block of a TensorDescriptor is {block_shape}: {reason}")
        if min(shape) <= 0:
            raise WrongDescriptor(f"a TensorDescriptor has no axis of length 0: {shape}")
        self._check_elements(strides)
        self.shape, self.strides, self.block_shape = shape, strides, block_shape

    def _check_elements(self, strides: list[int]) -> None:
        element = _element_of(self.base)
        if self.padding not in ("zero", "nan"):
            raise WrongDescriptor(f"padding={self.padding!r}: it is 'zero' or 'nan'")
        if element is None:
            return
        if self.padding == "nan" and not element.is_floating():
            raise WrongDescriptor(f"padding='nan' is for floats, not {element}")
        if self.round_f32_to_tf32 and not element.is_fp32():
            raise WrongDescriptor(f"round_f32_to_tf32 is for fp32, not {element}")
        for axis, stride in enumerate(strides[:-1]):
            if stride * element.itemsize % DESCRIPTOR_BYTES:
                raise WrongDescriptor(
                    f"axis {axis} of a TensorDescriptor has a stride of "
                    f"{stride * element.itemsize} bytes: it must be a multiple of 16",
                    hint="pad the rows",
                )
        address = getattr(self.base, "data_ptr", None)
        if address is not None and address() % DESCRIPTOR_BYTES:
            raise WrongDescriptor(
                f"the base of a TensorDescriptor is at {address():#x}: it must be a multiple of 16",
                hint="take a copy: .clone()",
            )

    @staticmethod
    def from_tensor(
        tensor: Any,
        block_shape: list[int],
        padding: str = "zero",
        round_f32_to_tf32: bool = False,
    ) -> "TensorDescriptor":
        """Describe a whole tensor."""
        strides = tensor.stride() if hasattr(tensor, "stride") else _element_strides(tensor)
        return TensorDescriptor(
            tensor, list(tensor.shape), list(strides), block_shape, padding, round_f32_to_tf32
        )


def _element_of(base: Any) -> dtype | None:
    """The type of an array's elements; None of what has none that kernels know."""
    type_ = getattr(base, "dtype", None)
    if isinstance(type_, dtype):
        return type_
    try:
        return t.dtype_named(str(type_))
    except TypeError:
        return None


def _element_strides(array: Array) -> list[int]:
    return [stride // array.itemsize for stride in np.asarray(array).strides]


class HostMachine(Protocol):
    """A simulated machine that takes the launches of a program which knows nothing of it."""

    @property
    def now(self) -> int:
        """Its time, in picoseconds."""
        ...

    def launch(self, kernel: Any, grid: Any, *args: Any, **meta: Any) -> Any:
        """Launch a kernel with arguments of the host; returns what compiling would have given."""
        ...


HOST_MACHINE: ContextVar[HostMachine | None] = ContextVar("host_machine", default=None)
"""Where kernels are launched whose arguments lie on no machine; None is the emulator."""


class Others(Protocol):
    """Those beside this thread who use the same memory, while its launches run."""

    def wait(self, awaited: str) -> None:
        """Let them run until one has changed memory; `awaited` says what the kernel waits for."""
        ...

    def notify(self) -> None:
        """Tell them that a kernel may have changed memory."""
        ...


OTHERS: ContextVar[Others | None] = ContextVar("others", default=None)
"""The launches that a kernel may wait for that waits for none of its own programs."""


def launcher_among(values: Iterable[Any]) -> Callable[..., Any] | None:
    """How to launch a kernel where the first of `values` that is on a simulated machine does.

    Such a value has a method `launch_kernel(kernel, grid, *args, **meta)`.
    """
    for value in values:
        if isinstance(value, (tuple, list)):
            found = launcher_among(value)
            if found is not None:
                return found
            continue
        owner = value.base if isinstance(value, TensorDescriptor) else value
        if hasattr(type(owner), "launch_kernel"):
            launch: Callable[..., Any] = owner.launch_kernel
            return launch
    return None


class Arguments:
    """Turns a launch's arguments into what the kernel sees; keeps the buffers they brought."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def adapted(self, name: str, value: Any) -> Any:
        """An argument as the kernel sees it."""
        value = plain(value)
        if value is None or isinstance(value, (str, dtype, tensor)):
            return value
        if isinstance(value, (bool, int, float, np.number, np.bool_)):
            return _number(value)
        if isinstance(value, TensorDescriptor):
            return self._descriptor(name, value)
        if isinstance(value, (tuple, list)) and not isinstance(value, TypedArray):
            parts = [self.adapted(f"{name}[{at}]", each) for at, each in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        buffer = self.buffer(name, value)
        if buffer is None:
            if callable(value):
                return value
            raise LocalProtocolError(
                f"argument {name!r} of a kernel is a {type(value).__name__}: it has to be an array "
                "(numpy, torch on the CPU, __array_interface__), a number, a string or None"
            )
        return self.pointer_to(buffer)

    def pointer_to(self, buffer: Buffer) -> tensor:
        """A pointer to where a buffer's array begins."""
        self.buffers.append(buffer)
        start = Affine(np.array([buffer.first], np.int64), ())
        type_ = t.pointer_type(buffer.dtype)
        return tensor(start.base, type_, (), affine=start, buffer=buffer)

    def _descriptor(self, name: str, value: TensorDescriptor) -> Any:
        buffer = self.buffer(name, value.base)
        if buffer is None:
            raise LocalProtocolError(f"the base of descriptor {name!r} is not an array")
        sizes = [scalar(size, t.int64) for size in value.shape]
        strides = [scalar(stride, t.int64) for stride in value.strides]
        return tensor_descriptor(
            self.pointer_to(buffer), sizes, strides, tuple(value.block_shape), value.padding
        )

    def buffer(self, name: str, value: Any) -> Buffer | None:
        """The elements of an array, as a kernel sees them; None if it is none."""
        if isinstance(value, Buffer):
            return value
        kernel_buffer = getattr(value, "kernel_buffer", None)
        if kernel_buffer is not None:
            found = kernel_buffer()
            assert isinstance(found, Buffer)
            found.name = found.name or name
            return found
        if isinstance(value, TypedArray):
            return _array_buffer(name, value.array, value.dtype)
        if isinstance(value, np.ndarray):
            return _array_buffer(name, value, _type_of(name, value))
        if launcher_among((value,)) is not None:
            # A copy of its values would be taken, and what the kernel stores would be lost.
            raise LocalProtocolError(
                f"argument {name!r} is on a simulated machine",
                hint="launch the kernel there: kernel[grid](…) with it as an argument, or launch()",
            )
        if hasattr(value, "data_ptr"):
            return _torch_buffer(name, value)
        if hasattr(value, "__array_interface__"):
            array = np.asarray(value)
            return _array_buffer(name, array, _type_of(name, array))
        return None


def tensor_around(address: int) -> Buffer | None:
    """The elements of a tensor of torch, somewhere in this process, that an address lies in.

    Kernels find such addresses in memory, in a table of pointers.
    """
    found = _tensor_at(address)
    return None if found is None else _buffer_of(found)


def storage_around(address: int) -> Array | None:
    """All bytes of the storage of that tensor, which others may be views of."""
    found = _tensor_at(address)
    if found is None:
        return None
    storage = found.untyped_storage()
    run = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    run.owner = storage
    return np.frombuffer(run, np.uint8)


def _tensor_at(address: int) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    for reference in _found_lately:
        known = reference()
        if known is not None and _lies_in(address, known):
            return known
    for candidate in gc.get_objects():
        if type(candidate) is not torch.Tensor or candidate.layout is not torch.strided:
            continue
        if candidate.device.type == "cpu" and _lies_in(address, candidate):
            _found_lately.appendleft(ref(candidate))
            return candidate
    return None


_found_lately: deque[Any] = deque(maxlen=64)
"""References to tensors: to look through all objects takes a tenth of a second."""


def _buffer_of(found: Any) -> Buffer | None:
    return Arguments().buffer(getattr(found, NAME_IN_KERNELS, "tensor"), found)


def _lies_in(address: int, candidate: Any) -> bool:
    storage = candidate.untyped_storage()
    if not 0 <= address - storage.data_ptr() < storage.nbytes():
        return False  # it may have a type that kernels do not know
    buffer = _buffer_of(candidate)
    return buffer is not None and 0 <= address - buffer.address < buffer.size_bytes


NAME_IN_KERNELS = "name_in_kernels"
"""An attribute of tensors: how messages call those that kernels find by their addresses."""


def _number(value: Any) -> tensor:
    if isinstance(value, np.generic):
        value = value.item()
    type_ = number_type(value)
    if type_ is t.uint32:
        type_ = t.int64
    if type_ is t.float64:
        type_ = t.float32
    return scalar(value, type_)


def _type_of(name: str, array: Array) -> dtype:
    try:
        return t.dtype_of_numpy(array.dtype)
    except TypeError:
        raise LocalProtocolError(
            f"argument {name!r} is an array of {array.dtype}, which kernels cannot use"
        ) from None


def _array_buffer(name: str, array: Array, type_: dtype) -> Buffer:
    """All that lies between the first and the last byte of an array."""
    before, after = _reach(array.shape, array.strides)
    if array.flags.c_contiguous:
        flat = array.reshape(-1)
    else:
        length = (before + after) // array.itemsize + 1 if array.size else 0
        flat = np.lib.stride_tricks.as_strided(
            array[tuple(slice(None, None, -1 if step < 0 else 1) for step in array.strides)],
            (length,), (array.itemsize,), writeable=array.flags.writeable,
        )  # fmt: skip
    address = int(array.__array_interface__["data"][0]) - before
    return Buffer(name, flat, type_, address, first=before // array.itemsize)


def _torch_buffer(name: str, value: Any) -> Buffer:
    """A torch tensor on the CPU, or what another library's class says of such memory.

    Its `numpy()` is not asked: storage that numpy has seen can never be resized, which FSDP does.
    """
    device = getattr(getattr(value, "device", None), "type", "cpu")
    if device != "cpu":
        raise LocalProtocolError(
            f"argument {name!r} is a tensor on {device!r}: kernels are emulated on the CPU",
            hint="move it with .cpu()",
        )
    type_ = t.dtype_named(str(value.dtype))
    sizes, steps = list(value.shape), list(value.stride())
    if 0 in steps and 0 not in sizes and hasattr(value, "storage_offset"):
        # An axis that is repeated says nothing of how far the kernel goes along it.
        sizes = [value.untyped_storage().nbytes() // type_.itemsize - value.storage_offset()]
        steps = [1]
    return _array_buffer(name, _at_address(value, sizes, steps, type_), type_)


def _at_address(value: Any, sizes: list[int], steps: list[int], type_: dtype) -> Array:
    """What lies at `data_ptr()`, as an array, which keeps its owner alive."""
    if 0 in sizes:
        return np.empty(sizes, type_.storage)
    steps = [step * type_.itemsize for step in steps]
    before, after = _reach(sizes, steps)
    run = (ctypes.c_uint8 * (before + after + type_.itemsize)).from_address(
        value.data_ptr() - before
    )
    run.owner = value
    return np.ndarray(sizes, type_.storage, buffer=run, offset=before, strides=steps)


def _reach(sizes: Sequence[int], steps: Sequence[int]) -> tuple[int, int]:
    """How far an array reaches before and after its first element, in the unit of its steps."""
    if 0 in sizes:
        return 0, 0
    reach = [(size - 1) * step for size, step in zip(sizes, steps, strict=True)]
    return -sum(min(each, 0) for each in reach), sum(max(each, 0) for each in reach)
