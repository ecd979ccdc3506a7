"""What a chip can be asked to run: a kernel or a function, with a signature.

In place of machine code stands a kernel of the `tl` language (decorated with `jit`), or a Python
function over numpy arrays. Both are wrapped together with what they expect, so that wrong arguments
are refused by name before anything runs.

A callable with *children* is a program: its function gets the chip first, and launches children on
it by their numbers.
"""

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import msgspec

from rankwise.base.errors import TreeValueError
from rankwise.core.tasks.tensors import ContinuousTensor, DataType, data_type
from rankwise.workers.arguments import TaskArgs, is_read_only
from rankwise.workers.callable_table import check_call_runs
from rankwise.workers.errors import BadArguments, IndexOutOfRange

CHILD_ALIGNMENT = 64


class ArgDirection(IntEnum):
    """What a callable does with one argument."""

    SCALAR = 0
    IN = 1
    OUT = 2
    INOUT = 3


def arg_direction_name(direction: ArgDirection | int) -> str:
    """The name of a direction: `INOUT`.

    Raises:
        ConfigError: there is none of that number.
    """
    return _direction(direction).name


def _direction(direction: object) -> ArgDirection:
    try:
        return ArgDirection(direction)  # type: ignore[arg-type]  # that is what is found out
    except ValueError:
        names = ", ".join(f"{each.name} ({each.value})" for each in ArgDirection)
        raise TreeValueError(
            f"there is no argument direction {direction!r}", hint=f"there are {names}"
        ) from None


class Parameter(msgspec.Struct, frozen=True):
    """One argument of a signature, when more is to be said of it than its direction.

    Attributes:
        direction: what is done with it.
        name: how messages call it.
        dtype: the type that it must have; of a scalar that is given as an integer, what its 64
            bits mean. None takes any, and gives a scalar as it was given.
        shape: the lengths that it must have; None, whole or for one length, takes any.
    """

    direction: ArgDirection
    name: str = ""
    dtype: DataType | None = None
    shape: tuple[int | None, ...] | None = None

    @classmethod
    def of(
        cls, direction: ArgDirection, name: str = "", dtype: Any = None, shape: Any = None
    ) -> "Parameter":
        """Make one from a type's name or number and any sequence of lengths."""
        return cls(
            _direction(direction),
            name,
            None if dtype is None else data_type(dtype),
            None if shape is None else tuple(shape),
        )

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor."""
        return self.direction is not ArgDirection.SCALAR

    @property
    def is_read(self) -> bool:
        """Whether the callable looks at what it holds before."""
        return self.direction in (ArgDirection.IN, ArgDirection.INOUT)

    @property
    def is_written(self) -> bool:
        """Whether the callable changes it."""
        return self.direction in (ArgDirection.OUT, ArgDirection.INOUT)


Signature = tuple[Parameter, ...]


class CoreCallable:
    """A kernel or a function, with its signature; made with `build`.

    Attributes:
        binary: the kernel, or the function.
        parameters: the signature; None takes any arguments.
        grid: over how many programs a kernel is launched: a number, up to three of them, a function
            of the kernel's parameters by name, or None for as many as the call's `block_dim`.
        meta: further arguments by name: a kernel's compile-time parameters.
    """

    def __init__(
        self,
        parameters: Signature | None,
        binary: Callable[..., Any],
        *,
        grid: Any = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.parameters = parameters
        self.binary = binary
        self.grid = grid
        self.meta = dict(meta or {})
        self._buffer: Any = None

    @classmethod
    def build(
        cls,
        signature: Iterable[object] | None,
        binary: Callable[..., Any],
        *,
        grid: Any = None,
        meta: Mapping[str, Any] | None = None,
    ) -> "CoreCallable":
        """Wrap a kernel or a function.

        Raises:
            ConfigError: the signature or the binary is none.
        """
        return cls(_checked(signature), _runnable(binary), grid=grid, meta=meta)

    @property
    def name(self) -> str:
        """What the kernel or function calls itself."""
        return str(getattr(self.binary, "__name__", "a callable"))

    @property
    def is_kernel(self) -> bool:
        """Whether it is a kernel of the `tl` language, and not a plain function."""
        return is_kernel(self.binary)

    @property
    def sig_count(self) -> int:
        """How many arguments the signature has."""
        return len(self.parameters or ())

    def sig(self, index: int) -> ArgDirection:
        """What is done with the argument at a place."""
        return self.parameter(index).direction

    def parameter(self, index: int) -> Parameter:
        """All that the signature says of the argument at a place."""
        if not 0 <= index < self.sig_count:
            raise IndexOutOfRange(
                f"{self.name} has no argument {index}: its signature has {self.sig_count}"
            )
        assert self.parameters is not None, "it has arguments"
        return self.parameters[index]

    @property
    def binary_size(self) -> int:
        """How many bytes the kernel or function takes when it travels."""
        return len(self._payload())

    def buffer_ptr(self) -> int:
        """Where a copy of those bytes lies; valid as long as this object lives."""
        from ctypes import addressof  # noqa: PLC0415  # only who needs the pointer pays

        return addressof(self._bytes())

    def buffer_size(self) -> int:
        """How many bytes lie there."""
        return len(self._bytes())

    def _bytes(self) -> Any:
        from ctypes import c_char  # noqa: PLC0415  # as above

        if self._buffer is None:
            content = self._content()
            self._buffer = (c_char * len(content)).from_buffer_copy(content)
        return self._buffer

    def _content(self) -> bytes:
        return self._payload()

    def _payload(self) -> bytes:
        # Takes its time, and most callables are inherited.
        from rankwise.base.value_pickle import dumps_by_value  # noqa: PLC0415

        return dumps_by_value(self.binary)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_buffer": None}

    def __repr__(self) -> str:
        kind = "kernel" if self.is_kernel else "function"
        return f"<{type(self).__name__} {self.name}: a {kind} of {self.sig_count} arguments>"

    def values(self, args: TaskArgs) -> list[tuple[Parameter, ContinuousTensor | int | float]]:
        """The arguments of a task in the order of the signature; scalars as their types say.

        Raises:
            BadArguments: too many or too few, or one of another type or shape; names it.
        """
        parameters = self.parameters
        if parameters is None:
            parameters = _ANY_TENSOR * args.tensor_count() + _ANY_SCALAR * args.scalar_count()
        self._check_counts(args, parameters)
        tensors, scalars = enumerate(args.tensors), iter(args.scalars)
        values: list[tuple[Parameter, ContinuousTensor | int | float]] = []
        for place, parameter in enumerate(parameters):
            if parameter.is_tensor:
                number, tensor = next(tensors)
                self._check_tensor(place, parameter, tensor)
                is_output = self.parameters is not None and parameter.is_written
                if is_output and is_read_only(args.owner(number)):
                    raise BadArguments(
                        f"{self.argument_name(place, parameter)} is {parameter.direction.name}, "
                        "but a read-only array was given for it"
                    )
                values.append((parameter, tensor))
            else:
                values.append((parameter, self._scalar(place, parameter, next(scalars))))
        return values

    def argument_name(self, place: int, parameter: Parameter) -> str:
        """How messages call an argument."""
        name = f" ({parameter.name!r})" if parameter.name else ""
        return f"argument {place}{name} of {self.name}"

    def _scalar(self, place: int, parameter: Parameter, given: Any) -> Any:
        kind = parameter.dtype
        if kind is None:
            return given
        if kind in _COMPLEX:
            raise BadArguments(
                f"{self.argument_name(place, parameter)} is a scalar of {kind.name}, which no "
                "scalar can be",
                hint="give a tensor of one element",
            )
        if isinstance(given, float):
            if kind not in _FLOATS:
                raise BadArguments(
                    f"{self.argument_name(place, parameter)} is {given}, expected {kind.name}"
                )
            return rounded(given, kind)
        return scalar_value(given & _WORD_MASK, kind)

    def _check_counts(self, args: TaskArgs, parameters: Signature) -> None:
        tensors = sum(parameter.is_tensor for parameter in parameters)
        scalars = len(parameters) - tensors
        if (tensors, scalars) != (args.tensor_count(), args.scalar_count()):
            raise BadArguments(
                f"{self.name} was given {args.tensor_count()} tensors and {args.scalar_count()} "
                f"scalars, expected {tensors} and {scalars}"
            )

    def _check_tensor(self, place: int, parameter: Parameter, tensor: ContinuousTensor) -> None:
        what = self.argument_name(place, parameter)
        if parameter.dtype is not None and tensor.dtype is not parameter.dtype:
            raise BadArguments(
                f"{what} has dtype {tensor.dtype.name}, expected {parameter.dtype.name}"
            )
        if parameter.shape is not None and not _fits(tensor.shapes, parameter.shape):
            wanted = ", ".join("any" if each is None else str(each) for each in parameter.shape)
            raise BadArguments(f"{what} has shape {tensor.shapes}, expected ({wanted})")
        if tensor.data == 0 and tensor.nbytes():
            raise BadArguments(
                f"{what} has no memory: its address is 0",
                hint="an OUTPUT of a submitted task gets memory; elsewhere use alloc or malloc",
            )


_ANY_TENSOR: Signature = (Parameter(ArgDirection.INOUT),)
_ANY_SCALAR: Signature = (Parameter(ArgDirection.SCALAR),)


class ChipCallable(CoreCallable):
    """What a task runs on a chip: a kernel, a function, or a program over children."""

    def __init__(
        self,
        parameters: Signature | None,
        func_name: str,
        binary: Callable[..., Any],
        children: Sequence[tuple[int, CoreCallable]],
        config_name: str,
        *,
        grid: Any = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(parameters, binary, grid=grid, meta=meta)
        self.func_name = func_name
        self.config_name = config_name
        self.children = tuple(children)
        self._by_id = dict(self.children)

    @classmethod
    def build(  # type: ignore[override]  # its children are more than a core callable has
        cls,
        signature: Iterable[object] | None,
        func_name: str,
        binary: Callable[..., Any],
        children: Iterable[tuple[int, CoreCallable]] = (),
        config_name: str = "",
        *,
        grid: Any = None,
        meta: Mapping[str, Any] | None = None,
    ) -> "ChipCallable":
        """Wrap a kernel or a function; with `children`, a program that launches them.

        A program's function gets the chip before its arguments, and calls
        `chip.launch(func_id, *arguments, grid=…)`.

        Raises:
            ConfigError: the signature, the binary or a child is none, a number is given to two
                children, or a kernel is given children, which it could not launch.
        """
        listed = list(children)
        runnable = _runnable(binary)
        ids = [func_id for func_id, _child in listed]
        for func_id, child in listed:
            if not isinstance(child, CoreCallable):
                raise TreeValueError(
                    f"child {func_id} of {func_name} is {child!r}, expected a CoreCallable"
                )
            if ids.count(func_id) > 1:
                raise TreeValueError(f"{func_name} has two children with number {func_id}")
        if listed and is_kernel(runnable):
            raise TreeValueError(
                f"{func_name} is a kernel and has {len(listed)} children, which it cannot launch",
                hint="give a function over the chip that launches them",
            )
        if not func_name:
            raise TreeValueError("func_name is empty, expected the name by which messages call it")
        return cls(
            _checked(signature), func_name, runnable, listed, config_name, grid=grid, meta=meta
        )

    @property
    def name(self) -> str:
        """How messages call it."""
        return self.func_name

    @property
    def child_count(self) -> int:
        """How many children there are."""
        return len(self.children)

    def child(self, index: int) -> CoreCallable:
        """The child at a place."""
        return self._child(index)[1]

    def child_func_id(self, index: int) -> int:
        """The number of the child at a place."""
        return self._child(index)[0]

    def child_offset(self, index: int) -> int:
        """Where the child's bytes begin in the buffer, a multiple of 64."""
        self._child(index)
        offset = _aligned(len(self._payload()))
        for _func_id, child in self.children[:index]:
            offset += _aligned(child.binary_size)
        return offset

    def child_of(self, func_id: int) -> CoreCallable:
        """The child of a number.

        Raises:
            IndexOutOfRange: there is none.
        """
        if func_id not in self._by_id:
            known = ", ".join(map(str, self._by_id)) or "none"
            raise IndexOutOfRange(f"{self.name} has no child {func_id}: there are {known}")
        return self._by_id[func_id]

    def _child(self, index: int) -> tuple[int, CoreCallable]:
        if not 0 <= index < self.child_count:
            raise IndexOutOfRange(f"{self.name} has {self.child_count} children, no child {index}")
        return self.children[index]

    def _content(self) -> bytes:
        parts = [self._payload(), *(child._payload() for _, child in self.children)]  # noqa: SLF001  # children are of this module's class
        return b"".join(part.ljust(_aligned(len(part)), b"\0") for part in parts)


def is_kernel(binary: Any) -> bool:
    """Whether something is a kernel: what is launched with `kernel[grid](...)`."""
    return hasattr(binary, "arg_names") and hasattr(type(binary), "__getitem__")


def scalar_value(word: int, kind: DataType | None) -> int | float:
    """What the 64 bits of a scalar mean as a type; as an unsigned integer without one."""
    if kind is None or kind is DataType.UINT64:
        return word
    if kind in _FLOAT_FORMS:
        form, size = _FLOAT_FORMS[kind]
        value: float = struct.unpack(form, struct.pack(_WORDS[size], word & ((1 << 8 * size) - 1)))[
            0
        ]
        return value
    if kind is DataType.BFLOAT16:
        return float(struct.unpack("=f", struct.pack("=I", (word & 0xFFFF) << 16))[0])
    if kind is DataType.BOOL:
        return bool(word)
    size, is_signed = _INTEGERS[kind]
    bits = word & ((1 << size) - 1)
    return bits - (1 << size) if is_signed and bits >> (size - 1) else bits


def rounded(number: float, kind: DataType) -> float:
    """A float as the nearest that a type has; infinite where the type ends before."""
    form, _size = _FLOAT_FORMS[DataType.FLOAT32 if kind is DataType.BFLOAT16 else kind]
    try:
        value: float = struct.unpack(form, struct.pack(form, number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
    if kind is not DataType.BFLOAT16 or value != value:  # noqa: PLR0124  # NaN stays what it is
        return value
    bits: int = struct.unpack("=I", struct.pack("=f", value))[0]
    return float(scalar_value(bits + 0x7FFF + (bits >> 16 & 1) >> 16, kind))


_WORD_MASK = (1 << 64) - 1
_WORDS = {2: "=H", 4: "=I", 8: "=Q"}
_FLOAT_FORMS = {
    DataType.FLOAT64: ("=d", 8), DataType.FLOAT32: ("=f", 4), DataType.FLOAT16: ("=e", 2),
}  # fmt: skip
_FLOATS = {*_FLOAT_FORMS, DataType.BFLOAT16}
_COMPLEX = {DataType.COMPLEX64, DataType.COMPLEX128}
_INTEGERS = {
    DataType.INT8: (8, True), DataType.INT16: (16, True), DataType.INT32: (32, True),
    DataType.INT64: (64, True), DataType.UINT8: (8, False), DataType.UINT16: (16, False),
    DataType.UINT32: (32, False),
}  # fmt: skip


def _checked(signature: Iterable[object] | None) -> Signature | None:
    if signature is None:
        return None
    # Lists that mix directions and parameters are lists of objects to type checkers.
    return tuple(
        each if isinstance(each, Parameter) else Parameter(_direction(each)) for each in signature
    )


def _runnable(binary: Any) -> Callable[..., Any]:
    if not callable(binary):
        raise TreeValueError(
            f"the binary is {binary!r}, expected a kernel of the tl language or a function",
            hint="machine code cannot be run here: write the kernel in the tl language",
        )
    check_call_runs(binary, "task")
    runnable: Callable[..., Any] = binary
    return runnable


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        each is None or each == length for length, each in zip(shape, wanted, strict=True)
    )


def _aligned(size: int) -> int:
    return -(-size // CHILD_ALIGNMENT) * CHILD_ALIGNMENT
