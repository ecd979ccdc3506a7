"""The arguments of a task: tensors with their tags, then scalars, which are numbers.

A scalar arrives as the number that was given. For code that wants 64-bit words, `to_blob` and
`ChipStorageTaskArgs` write what `scalar_to_uint64` makes of it.

Tensors are named by address, so they must lie in memory that the worker sees: what `alloc` or
`malloc` gave, a communicator's window, or a numpy array in memory that is shared with the worker.
An array that is given itself is kept alive by its `TaskArgs`.
"""

import operator
import struct
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from rankwise.base.errors import ConfigError, LocalProtocolError, TreeValueError
from rankwise.core.tasks.tensors import (
    TENSOR_BYTES,
    ContinuousTensor,
    TensorArgType,
    argument_counts,
    decode_arguments,
    encode_arguments,
    encoded_arguments_bytes,
)
from rankwise.workers.errors import IndexOutOfRange

_WORD_MASK = (1 << 64) - 1
_LEAST = -(1 << 63)
CHIP_TENSORS_MAX = 128
CHIP_SCALARS_MAX = 128


class TaskArgs:
    """The arguments of one task; as many as you like."""

    __slots__ = ("_given", "_owners", "_scalars", "_tags", "_tensors")

    def __init__(self) -> None:
        self._tensors: list[ContinuousTensor] = []
        self._tags: list[TensorArgType] = []
        self._scalars: list[int | float] = []
        self._given: dict[int, Any] = {}
        """Numbers of ctypes and numpy, by place: their bits may be others than a float's."""
        self._owners: dict[int, Any] = {}

    def add_tensor(self, tensor: Any, tag: TensorArgType = TensorArgType.INPUT) -> None:
        """Append a tensor: a `ContinuousTensor`, a numpy array, or a torch tensor on the CPU.

        Raises:
            LocalProtocolError: there is a scalar already; it is a `RuntimeError`.
            ConfigError: the array is not dense, no data type is like its own, or it is read-only
                and the task writes it.
        """
        if self._scalars:
            raise LocalProtocolError(
                f"a tensor was added after {len(self._scalars)} scalars",
                hint="add all tensors before the first scalar",
            )
        if type(tag) is not TensorArgType:
            tag = _tag(tag)
        if not isinstance(tensor, ContinuousTensor):
            owner, tensor = tensor, as_continuous(tensor)
            if tag in _WRITING:
                _check_writable(owner, tag)
            self._owners[len(self._tensors)] = owner
        self._tensors.append(tensor)
        self._tags.append(tag)

    def add_scalar(self, value: Any) -> None:
        """Append a scalar: an integer or a float of Python, ctypes or numpy.

        Raises:
            ConfigError: it is no number, or an integer that has no place in 64 bits.
        """
        number = _number(value)
        if number is not value:
            self._given[len(self._scalars)] = value
        self._scalars.append(number)

    def tensor(self, index: int) -> ContinuousTensor:
        """The tensor at a place; what is changed in it is changed here."""
        return self._tensors[_place(index, self._tensors, "tensor")]

    def scalar(self, index: int) -> Any:
        """The scalar at a place: an integer or a float, as it was given."""
        return self._scalars[_place(index, self._scalars, "scalar")]

    def tag(self, index: int) -> TensorArgType:
        """What the task does with the tensor at a place."""
        return self._tags[_place(index, self._tags, "tensor")]

    def set_tag(self, index: int, tag: TensorArgType) -> None:
        """Say what the task does with the tensor at a place."""
        place, tag = _place(index, self._tags, "tensor"), _tag(tag)
        _check_writable(self._owners.get(place), tag)
        self._tags[place] = tag

    def owner(self, index: int) -> Any:
        """The array that was given for the tensor at a place; None if only its address was."""
        return self._owners.get(_place(index, self._tensors, "tensor"))

    @property
    def owners(self) -> list[Any]:
        """All arrays that were given."""
        return list(self._owners.values())

    def tensor_count(self) -> int:
        """How many tensors there are."""
        return len(self._tensors)

    def scalar_count(self) -> int:
        """How many scalars there are."""
        return len(self._scalars)

    @property
    def tensors(self) -> tuple[ContinuousTensor, ...]:
        """All tensors."""
        return tuple(self._tensors)

    @property
    def tags(self) -> tuple[TensorArgType, ...]:
        """What the task does with each tensor."""
        return tuple(self._tags)

    @property
    def scalars(self) -> tuple[int | float, ...]:
        """All scalars."""
        return tuple(self._scalars)

    @property
    def words(self) -> list[int]:
        """The 64 bits of all scalars, as `scalar_to_uint64` makes them.

        Raises:
            ConfigError: a float of Python is one that no float32 can hold.
        """
        return [
            scalar_to_uint64(self._given.get(place, number))
            for place, number in enumerate(self._scalars)
        ]

    def accesses(self) -> list[tuple[int, int, TensorArgType, bool]]:
        """Which memory the task touches, and how: address, bytes, tag, whether it is a chip's."""
        return [
            (tensor.data, tensor.nbytes(), tag, tensor.child_memory)
            for tensor, tag in zip(self._tensors, self._tags, strict=True)
        ]

    def set_address(self, index: int, address: int) -> None:
        """Give the tensor at a place an address: that of memory that was found for it."""
        self.tensor(index).data = address

    def clear(self) -> None:
        """Take everything out."""
        self._tensors.clear()
        self._tags.clear()
        self._scalars.clear()
        self._given.clear()
        self._owners.clear()

    def to_blob(self) -> bytes:
        """Tensors and the words of scalars in one blob, in the layout that other programs know.

        Tags are not in it, and neither is what a word means.
        """
        return encode_arguments(self._tensors, self.words)

    @classmethod
    def from_blob(cls, blob: bytes | bytearray | memoryview) -> "TaskArgs":
        """Read `to_blob` back; every tag is INPUT, and every scalar the integer of its bits.

        Raises:
            MailboxCorrupt: the blob was cut, or holds something else.
        """
        tensors, words = decode_arguments(blob)
        return cls.of(tensors, [*words])

    @classmethod
    def of(
        cls,
        tensors: list[ContinuousTensor],
        scalars: list[int | float],
        tags: list[TensorArgType] | None = None,
    ) -> "TaskArgs":
        """Take over tensors, scalars and tags; without these, every tag is INPUT."""
        args = cls()
        args._tensors = tensors
        args._scalars = scalars
        args._tags = [TensorArgType.INPUT] * len(tensors) if tags is None else tags
        return args

    def __len__(self) -> int:
        return len(self._tensors) + len(self._scalars)

    def __repr__(self) -> str:
        parts = [
            f"{tag.name} {tensor!r}" for tag, tensor in zip(self._tags, self._tensors, strict=True)
        ]
        return f"TaskArgs({', '.join([*parts, *map(str, self._scalars)])})"


class ChipStorageTaskArgs:
    """Arguments at a fixed place in memory, for code that takes a pointer to them.

    Layout: 128 tensors of 40 bytes, 128 words of 64 bits, i32 tensor count, i32 scalar count.
    """

    _LAYOUT_BYTES = CHIP_TENSORS_MAX * TENSOR_BYTES + CHIP_SCALARS_MAX * 8 + 8

    def __init__(self) -> None:
        from ctypes import addressof, c_char  # noqa: PLC0415  # only who needs the pointer pays

        self._memory = (c_char * self._LAYOUT_BYTES)()
        self._address = addressof(self._memory)
        self._args = TaskArgs()

    @classmethod
    def from_args(cls, args: TaskArgs) -> "ChipStorageTaskArgs":
        """Take over tensors and scalars."""
        storage = cls()
        for index, tensor in enumerate(args.tensors):
            storage.add_tensor(args.owner(index) if args.owner(index) is not None else tensor)
        for word in args.words:
            storage.add_scalar(word)
        return storage

    def add_tensor(self, tensor: Any) -> None:
        """Append a tensor, as `TaskArgs.add_tensor` does.

        Raises:
            ConfigError: there are 128 already.
        """
        count = self._args.tensor_count()
        _check_room(count, CHIP_TENSORS_MAX, "tensors")
        self._args.add_tensor(tensor)
        struct.pack_into(
            f"={TENSOR_BYTES}s", self._memory, count * TENSOR_BYTES, self._args.tensor(count).pack()
        )
        self._write_counts()

    def add_scalar(self, value: Any) -> None:
        """Append a scalar, in the 64 bits that `scalar_to_uint64` makes of it.

        Raises:
            ConfigError: there are 128 already, or it is none.
        """
        count = self._args.scalar_count()
        _check_room(count, CHIP_SCALARS_MAX, "scalars")
        _number(value)
        self._args.add_scalar(scalar_to_uint64(value))
        offset = CHIP_TENSORS_MAX * TENSOR_BYTES + 8 * count
        struct.pack_into("=Q", self._memory, offset, self._args.scalar(count))
        self._write_counts()

    def tensor(self, index: int) -> ContinuousTensor:
        """A copy of the tensor at a place, as memory holds it."""
        _place(index, self._args.tensors, "tensor")
        return ContinuousTensor.unpack(memoryview(self._memory).cast("B"), index * TENSOR_BYTES)

    def scalar(self, index: int) -> int:
        """The 64 bits of the scalar at a place."""
        word: int = self._args.scalar(index)
        return word

    def tensor_count(self) -> int:
        """How many tensors there are."""
        return self._args.tensor_count()

    def scalar_count(self) -> int:
        """How many scalars there are."""
        return self._args.scalar_count()

    def clear(self) -> None:
        """Take everything out."""
        self._args.clear()
        self._write_counts()

    def sizeof(self) -> int:
        """How many bytes it takes in memory, however many arguments there are."""
        return self._LAYOUT_BYTES

    def __ptr__(self) -> int:
        """Where it lies; valid as long as this object lives."""
        return self._address

    def __len__(self) -> int:
        return len(self._args)

    def _write_counts(self) -> None:
        struct.pack_into(
            "=ii", self._memory, self._LAYOUT_BYTES - 8,
            self._args.tensor_count(), self._args.scalar_count(),
        )  # fmt: skip


def scalar_to_uint64(value: Any) -> int:
    """The 64 bits of a scalar for code that takes words.

    An integer keeps its lowest 64 bits, a float becomes the bits of a float32, and ctypes' and
    numpy's numbers keep the bits that they have.

    Raises:
        ConfigError: it is no number, or a float that no float32 can hold.
    """
    code = getattr(value, "_type_", None)  # ctypes' way to say what it is
    if code == "d":
        return _bits("=d", value.value)
    if code == "f":
        return _bits("=f", value.value)
    if isinstance(code, str) and hasattr(value, "value"):
        value = value.value
    if isinstance(value, int):
        return value & _WORD_MASK
    if isinstance(value, float):  # numpy's float64 is one too
        return _bits("=f", value)
    if hasattr(value, "dtype") and getattr(value, "shape", None) == ():
        if value.dtype.kind == "f":
            return int.from_bytes(value.tobytes(), _byte_order())
        value = value.item()
    try:
        return operator.index(value) & _WORD_MASK
    except TypeError:
        raise _no_number(value) from None


def _number(value: Any) -> int | float:
    """The integer or float that a scalar is.

    Raises:
        ConfigError: it is none, or an integer that has no place in 64 bits.
    """
    number = value.value if isinstance(getattr(value, "_type_", None), str) else value
    if hasattr(number, "dtype") and getattr(number, "shape", None) == ():
        number = number.item()
    if isinstance(number, float):
        return number
    try:
        number = operator.index(number)
    except TypeError:
        raise _no_number(value) from None
    if not _LEAST <= number <= _WORD_MASK:
        raise TreeValueError(
            f"a scalar is {number}, expected -2**63 to 2**64 - 1",
            hint="it travels in 64 bits; give a float, or a tensor",
        )
    return number


def _no_number(value: Any) -> ConfigError:
    return TreeValueError(
        f"a scalar is {value!r}, expected a number", hint="arrays are given with add_tensor"
    )


def _bits(form: str, number: float) -> int:
    try:
        return int.from_bytes(struct.pack(form, number), _byte_order())
    except OverflowError:
        raise TreeValueError(
            f"the scalar {number!r} does not fit into a float32",
            hint="ctypes.c_double(...) keeps all 64 bits",
        ) from None


def _byte_order() -> Any:
    return "little" if struct.pack("=H", 1) == b"\x01\x00" else "big"


def read_args_from_blob(blob: "int | bytes | bytearray | memoryview") -> TaskArgs:
    """Rebuild arguments from their wire form: its bytes, or the address at which they lie.

    An address is trusted to hold as many bytes as the counts at its beginning say. Tags do not
    travel, so every tag is INPUT; `child_memory` does.

    Raises:
        MailboxCorrupt: the bytes were cut, or hold something else.
    """
    if isinstance(blob, int):
        from ctypes import string_at  # noqa: PLC0415  # only who has a bare address pays for it

        counts = argument_counts(string_at(blob, 8))
        blob = string_at(blob, encoded_arguments_bytes(*counts))
    return TaskArgs.from_blob(blob)


def as_continuous(array: Any) -> ContinuousTensor:
    """Describe an array: numpy's, or torch's on the CPU. It stays the owner of its memory.

    Raises:
        ConfigError: it is no array, not dense, or of a type that has no `DataType`.
    """
    describe = _describers.get(type(array))
    if describe is None:
        describe = _describers[type(array)] = _describer_of(type(array))
    return describe(array)


_describers: "WeakKeyDictionary[type, Callable[[Any], ContinuousTensor]]" = WeakKeyDictionary()


def _describer_of(kind: type) -> Callable[[Any], ContinuousTensor]:
    if any(each.__module__.partition(".")[0] == "torch" for each in kind.__mro__):
        from rankwise.workers.torch_bridge import make_tensor_arg  # noqa: PLC0415  # only for torch

        return make_tensor_arg
    from rankwise.workers.arrays import describe_array  # noqa: PLC0415  # numpy takes its time

    return describe_array


_WRITING = frozenset({TensorArgType.OUTPUT, TensorArgType.INOUT, TensorArgType.OUTPUT_EXISTING})


def is_read_only(owner: Any) -> bool:
    """Whether an array that was given for a tensor says that it must not be written."""
    return not getattr(getattr(owner, "flags", None), "writeable", True)


def _check_writable(owner: Any, tag: TensorArgType) -> None:
    if tag in _WRITING and is_read_only(owner):
        raise TreeValueError(
            f"a read-only array of shape {owner.shape} is {tag.name}: the task would write it",
            hint="give a copy, or INPUT if it is only read",
        )


def _tag(value: Any) -> TensorArgType:
    try:
        return TensorArgType(value)
    except ValueError:
        raise TreeValueError(
            f"a tensor's tag is {value!r}, expected a TensorArgType",
            hint=f"they are {', '.join(f'{tag.name} ({tag.value})' for tag in TensorArgType)}",
        ) from None


def _place(index: int, things: Any, what: str) -> int:
    count = len(things)
    if not 0 <= operator.index(index) < count:
        raise IndexOutOfRange(f"there is no {what} {index}: the arguments have {count}")
    return index


def _check_room(count: int, room: int, what: str) -> None:
    if count >= room:
        raise TreeValueError(
            f"ChipStorageTaskArgs holds {room} {what} at most",
            hint="TaskArgs has no such limit",
        )
