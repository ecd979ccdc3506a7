"""Tensors: values in the memory of a simulated device.

Kernels and collectives work on them in simulated time; the host sees them only through a *host
read*. A host read is a barrier: first the waits that ranks have deferred are drained, then the
bytes are fetched. The methods that read are listed in `_HOST_READ_BARRIERS`; every other way to see
a value goes through one of them.

`copy_` is a barrier for its source only. Were it one for its target, a rank that fills its buffer
would first have to see other ranks' work through, which may itself be waiting for this rank.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rankwise.base.errors import ConfigError, LocalProtocolError
from rankwise.base.suggestions import hint_on_name
from rankwise.sim.hardware.commands import Copy, MemoryRead, MemoryWrite, MmuUnmap
from rankwise.sim.hardware.op_log import Operand
from rankwise.sim.runtime.operators import Operators
from rankwise.sim.triton.dtypes import SHORT_NAMES, Array, dtype, dtype_named

if TYPE_CHECKING:
    from rankwise.sim.runtime.context import RuntimeContext
    from rankwise.sim.runtime.placement import Device, DPPolicy

_HOST_READ_BARRIERS = frozenset({"numpy", "data", "__getitem__", "__repr__"})
"""The members of `Tensor` that fetch values for the host; a test compares them with the class.
`item`, `tolist`, `bool()` and the like are said in terms of `numpy`."""

Kind: TypeAlias = dtype
"""An element type; in the class, `dtype` is its name."""


def element_type(named: Any) -> dtype:
    """The element type that a user means: a name, or a type of numpy, torch or the kernels."""
    if isinstance(named, dtype):
        return named
    # Nothing is no type; numpy takes it for f64.
    is_spelled = named is None or isinstance(named, str) or type(named).__module__ == "torch"
    try:
        name = str(named) if is_spelled else np.dtype(named).name
        return dtype_named(name)
    except TypeError:
        raise ConfigError(
            f"there is no dtype {named!r}; {hint_on_name(str(named), SHORT_NAMES.values())}"
        ) from None


def short_name(kind: dtype) -> str:
    """What the runtime and the machine call a type: `f16`, `i32`."""
    return SHORT_NAMES[kind.name]


class _Memory:
    """What tensors share that see the same memory."""

    def __init__(self) -> None:
        self.is_freed = False
        self.sips: frozenset[int] = frozenset()


class Tensor(Operators):
    """A tensor on the device of the rank that made it; made by the context's functions.

    Attributes:
        shape: its lengths.
        device: what it lies on.
        name: how messages and the op log call it.
        address: the virtual address of its first element.
        dp: the policy by which it lies there; None for an even spread.
        kind: its element type, as the kernel language has it.
    """

    def __init__(
        self,
        context: "RuntimeContext",
        shape: tuple[int, ...],
        kind: dtype,
        *,
        device: "Device",
        address: int,
        dp: "DPPolicy | None" = None,
        name: str = "tensor",
        memory: "_Memory | None" = None,
    ) -> None:
        self._context = context
        self._memory = memory or _Memory()
        self.shape = shape
        self.kind = kind
        self.device = device
        self.address = address
        self.dp = dp
        self.name = name

    if not TYPE_CHECKING:  # a type checker must still report missing names

        def __getattr__(self, name: str) -> Any:
            """What torch's tensors have beyond storage is a kernel's work here; say so."""
            hint = (
                ""
                if name.startswith("_")
                else ": launch a kernel for what the device should calculate,"
                " or take numpy() for the host"
            )
            raise AttributeError(f"a simulated tensor has no {name!r}{hint}")

    @property
    def dtype(self) -> str:
        """The element type's name: `f16`."""
        return short_name(self.kind)

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel() * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(self.kind.itemsize)

    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes of one element."""
        return int(self.kind.itemsize)

    def dim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    def size(self, dimension: int | None = None) -> Any:
        """Its shape, or the length of one dimension."""
        return self.shape if dimension is None else self.shape[dimension]

    def stride(self, dimension: int | None = None) -> Any:
        """Distances in elements between neighbours, row-major; of one dimension if given."""
        strides, step = [], 1
        for length in reversed(self.shape):
            strides.append(step)
            step *= length
        found = tuple(reversed(strides))
        return found if dimension is None else found[dimension]

    def data_ptr(self) -> int:
        """The virtual address of its first element."""
        return self.address

    def is_contiguous(self) -> bool:
        """Whether it is row-major without gaps; always."""
        return True

    def contiguous(self) -> "Tensor":
        """Itself."""
        return self

    def reshape(self, *shape: Any) -> "Tensor":
        """The same memory seen with another shape; one length may be -1."""
        return self._alias(_resolved_shape(_flat_shape(shape), self.numel()))

    view = reshape

    def flatten(self) -> "Tensor":
        """The same memory seen as a vector."""
        return self._alias((self.numel(),))

    def launch_kernel(self, kernel: Any, grid: Any, *args: Any, **meta: Any) -> Any:
        """Launch a kernel on this machine: what `kernel[grid](tensor, …)` does."""
        return self._context.launch(kernel, grid, *args, **meta)

    def kind_named(self, named: Any) -> Kind:
        """The element type that a user means; raises `ConfigError` if there is none."""
        return element_type(named)

    def sibling(self, shape: tuple[int, ...], kind: Kind) -> "Tensor":
        """A new tensor on the same device, for what is calculated from this one."""
        self.check_alive()
        return self._context.allocate(shape, kind, None, None, self.device)

    def share_with(self, sips: frozenset[int]) -> None:
        """Let kernels on these devices use its memory as their own (`symmetric_memory`)."""
        self._memory.sips = sips

    def is_within_reach_of(self, sip: int) -> bool:
        """Whether kernels on a device may use its memory."""
        return sip == self.device.sip or sip in self._memory.sips

    def seen_as(self, shape: tuple[int, ...], kind: Kind, first: int, name: str) -> "Tensor":
        """Some of the same memory, from a byte on, with another shape and type."""
        view = self._alias(shape)
        view.kind, view.address, view.name = kind, self.address + first, name
        return view

    def _alias(self, shape: tuple[int, ...]) -> "Tensor":
        return Tensor(
            self._context,
            shape,
            self.kind,
            device=self.device,
            address=self.address,
            dp=self.dp,
            name=self.name,
            memory=self._memory,
        )

    def numpy(self) -> Array:
        """Fetch the values; bf16 and narrower floats come as float32, which holds them exactly."""
        return self._fetch()

    @property
    def data(self) -> Array:
        """The values, as `numpy()` gives them."""
        return self._fetch()

    def __getitem__(self, key: Any) -> Any:
        return self._fetch()[key]

    def __repr__(self) -> str:
        about = f"shape={self.shape}, dtype={self.dtype}, device={self.device}"
        if not self._context.engine.enable_data or self._memory.is_freed:
            why = "freed" if self._memory.is_freed else "without data"
            return f"Tensor({self.name}, {about}, {why})"
        values = np.array2string(self._fetch(), threshold=20, prefix="Tensor(")
        return f"Tensor({values}, {about})"

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self.numpy().tolist()

    def item(self) -> Any:
        """The value of a tensor that has one element."""
        if self.numel() != 1:
            raise LocalProtocolError(f"item() is for one element; {self.name} has {self.numel()}")
        return self.numpy().reshape(-1)[0].item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def copy_(self, source: Any) -> "Tensor":
        """Overwrite the values with those of an array, a number, or another tensor.

        Another tensor is read first, with the barrier of a host read; this one is not waited for.
        """
        if isinstance(source, Tensor):
            return self._copy_from(source)
        values = np.asarray(source)
        if values.shape != self.shape:
            try:
                values = np.broadcast_to(values, self.shape)
            except ValueError:
                raise LocalProtocolError(
                    f"{self.name} has shape {self.shape}; values of shape {values.shape} do not fit"
                ) from None
        self.write(encoded(values, self.kind))
        return self

    def _copy_from(self, source: "Tensor") -> "Tensor":
        if source.shape != self.shape:
            raise LocalProtocolError(
                f"{self.name} has shape {self.shape}, {source.name} has {source.shape}"
            )
        self.check_alive()
        context = self._context
        source.check_usable(context)
        context.drain_for_host_read()
        if source.kind != self.kind:
            if context.engine.enable_data:
                return self.copy_(source.numpy())
            self.write(None)
        elif self.nbytes:
            handle = context.submit(
                Copy(
                    sip=source.device.sip,
                    address=source.address,
                    destination_sip=self.device.sip,
                    destination=self.address,
                    size=self.nbytes,
                    name=f"copy {source.name} to {self.name}",
                    stream=context.stream_number(),
                    after=context.before_host_access(source.device, self.device),
                )
            )
            for device in (source.device, self.device):
                context.touch(device, handle)
            context.wait(handle)
        return self

    def fill_(self, value: float) -> "Tensor":
        """Set every element to `value`."""
        return self.copy_(value)

    def zero_(self) -> "Tensor":
        """Set every element to zero."""
        return self.fill_(0)

    def clone(self) -> "Tensor":
        """A copy with memory of its own, on the same device."""
        twin = self._context.allocate(self.shape, self.kind, self.dp, self.name, self.device)
        return twin.copy_(self)

    def free(self) -> None:
        """Give its memory back, after all that has been submitted.

        Neither it nor what sees the same memory (`reshape`) may be used again. Symmetric memory is
        shared no longer, and the signal pad of this rank goes with it.
        """
        if self._memory.is_freed:
            return
        self._memory.is_freed = True
        if self.nbytes:
            context = self._context
            context.engine.peers.forget(self.address)
            context.distributed._symmetric_memory.forget(self)  # noqa: SLF001  # torch's name
            context.submit(
                MmuUnmap(
                    sip=self.device.sip,
                    address=self.address,
                    name=f"free {self.name}",
                    stream=context.stream_number(),
                    after=context.submitted_to(self.device),
                )
            )

    def stored(self) -> Array:
        """A copy of its bytes at this instant of simulated time; for what runs in it."""
        space = self._context.engine.space(self.device.sip)
        return space.read(self.address, self.nbytes).view(self.kind.storage)

    def store(self, elements: Array) -> None:
        """Set its bytes at this instant of simulated time; for what runs in it."""
        if self.nbytes:
            self._context.engine.space(self.device.sip).write(self.address, elements)

    def operand(self) -> Operand:
        """How the op log names it."""
        return Operand("hbm", f"sip{self.device.sip}", self.address, self.nbytes)

    def write(self, stored: Array | None) -> None:
        """Write its bytes from the host, and wait for it; without data, only take the time.

        Words that programs wait for are kept even where the engine keeps no data.

        In the order of the current stream: what other streams do with it is not waited for.
        """
        self.check_alive()
        if self.nbytes:
            context = self._context
            handle = context.submit(
                MemoryWrite(
                    sip=self.device.sip,
                    address=self.address,
                    data=stored,
                    size=self.nbytes,
                    name=f"write {self.name}",
                    stream=context.stream_number(),
                )
            )
            context.wait(handle)

    def _fetch(self) -> Array:
        """Read the values, after all waits that ranks have deferred."""
        self.check_alive()
        context = self._context
        if not context.engine.enable_data:
            raise LocalProtocolError(
                f"{self.name} has no values: this engine simulates time alone",
                hint="GraphEngine(topology, enable_data=True) keeps data",
            )
        context.drain_for_host_read()
        if not self.nbytes:
            return np.zeros(self.shape, self._numpy_type())
        handle = context.submit(
            MemoryRead(
                sip=self.device.sip,
                address=self.address,
                size=self.nbytes,
                name=f"read {self.name}",
                stream=context.stream_number(),
                after=context.before_host_access(self.device),
            )
        )
        context.wait(handle)
        stored: Array = handle.value.view(self.kind.storage).reshape(self.shape)
        if stored.dtype == self._numpy_type():
            return stored.copy()
        return self.kind.decode(stored)

    def _numpy_type(self) -> np.dtype[Any]:
        narrow = self.kind.is_narrow and self.kind.name != "fp16"
        return self.kind.compute if narrow else self.kind.storage

    def check_usable(self, context: "RuntimeContext") -> None:
        """Raise if its memory has been given back, or is another machine's than the context's."""
        self.check_alive()
        # An address means something else on every machine.
        if self._context.engine is not context.engine:
            raise LocalProtocolError(
                f"{self.name} is on the machine of another context",
                hint="take its values with numpy(), and make a tensor of them here",
            )

    def check_alive(self) -> None:
        """Raise if its memory has been given back."""
        if self._memory.is_freed:
            raise LocalProtocolError(f"{self.name} was used after it was freed")


def encoded(values: Array, kind: dtype) -> Array:
    """Values of any numpy type in the form in which memory holds them, rounded to the type."""
    with np.errstate(over="ignore", invalid="ignore"):
        if kind.is_narrow and kind.name != "fp16":
            rounded = kind.rounded(np.ascontiguousarray(values, dtype=kind.compute))
            return kind.encode(rounded)
        return np.ascontiguousarray(values, dtype=kind.storage)


def _flat_shape(shape: Sequence[Any]) -> tuple[int, ...]:
    if len(shape) == 1 and not isinstance(shape[0], int | np.integer):
        shape = shape[0]
    return tuple(int(length) for length in shape)


def _resolved_shape(shape: tuple[int, ...], elements: int) -> tuple[int, ...]:
    known = math.prod(length for length in shape if length >= 0)
    resolved = tuple(elements // max(known, 1) if length < 0 else length for length in shape)
    if math.prod(resolved) != elements or sum(length < 0 for length in shape) > 1:
        raise LocalProtocolError(f"{elements} elements cannot be seen with shape {shape}")
    return resolved
