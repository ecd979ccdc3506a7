"""Tensors as they are named between processes: an address, a shape and a type, no bytes.

A `ContinuousTensor` is dense and row-major, and owns nothing. On the wire it takes 40 bytes, in the
layout that programs of this kind already know:

    u64 data, u32 shape[5], u32 ndims, u8 dtype, u8 child_memory, 6 bytes of padding
"""

import math
import operator
import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

from rankwise.base.errors import MailboxCorrupt, TreeValueError

CONTINUOUS_TENSOR_MAX_DIMS = 5
TENSOR_BYTES = 40
ADDRESS_END = 1 << 64
_LENGTH_END = 1 << 32
_WIRE = struct.Struct("=Q5IIBB6x")
_WIRE_OF = tuple(
    struct.Struct(f"=Q{ndims}I{4 * (CONTINUOUS_TENSOR_MAX_DIMS - ndims)}xIBB6x")
    for ndims in range(CONTINUOUS_TENSOR_MAX_DIMS + 1)
)
"""The same for tensors of so many dimensions; the lengths that are missing are 0."""
_PADDING = (0,) * CONTINUOUS_TENSOR_MAX_DIMS


class DataType(IntEnum):
    """What an element is; the number is what stands on the wire.

    Programs of this kind know the numbers up to 11. Those from 64 on are ours, so that theirs may
    grow.
    """

    __hash__ = int.__hash__  # an enumeration's own is Python's, and each tensor is looked up thrice

    FLOAT32 = 0
    FLOAT16 = 1
    INT32 = 2
    INT16 = 3
    INT8 = 4
    UINT8 = 5
    BFLOAT16 = 6
    INT64 = 7
    UINT64 = 8
    UINT16 = 9
    UINT32 = 10
    BOOL = 11
    FLOAT64 = 64
    COMPLEX64 = 65
    COMPLEX128 = 66


_ELEMENT_BYTES = {
    DataType.FLOAT32: 4, DataType.FLOAT16: 2, DataType.INT32: 4, DataType.INT16: 2,
    DataType.INT8: 1, DataType.UINT8: 1, DataType.BFLOAT16: 2, DataType.INT64: 8,
    DataType.UINT64: 8, DataType.UINT16: 2, DataType.UINT32: 4, DataType.BOOL: 1,
    DataType.FLOAT64: 8, DataType.COMPLEX64: 8, DataType.COMPLEX128: 16,
}  # fmt: skip


_BY_NUMBER = {int(each): each for each in DataType}
_SHORT_NAMES = {
    "f4": DataType.FLOAT32, "f2": DataType.FLOAT16, "i4": DataType.INT32, "i2": DataType.INT16,
    "i1": DataType.INT8, "u1": DataType.UINT8, "i8": DataType.INT64, "u8": DataType.UINT64,
    "u2": DataType.UINT16, "u4": DataType.UINT32, "?": DataType.BOOL, "b1": DataType.BOOL,
    "f8": DataType.FLOAT64, "c8": DataType.COMPLEX64, "c16": DataType.COMPLEX128,
    "int": DataType.INT64, "float": DataType.FLOAT64, "complex": DataType.COMPLEX128,
}  # fmt: skip


def data_type(named: Any) -> DataType:
    """The `DataType` of a number, of a name, or of what has the name of one.

    A name is `float32` in any case, or `f4` as numpy has it; numpy's types and `float` have one.

    Raises:
        ConfigError: there is none; the message lists what there is.
    """
    try:
        if isinstance(named, int):
            return DataType(named)
        name = named if isinstance(named, str) else getattr(named, "name", None) or named.__name__
        return _SHORT_NAMES[name] if name in _SHORT_NAMES else DataType[name.upper()]
    except (KeyError, ValueError, TypeError, AttributeError):
        raise TreeValueError(
            f"there is no data type {named!r}",
            hint=f"there are {', '.join(each.name for each in DataType)}",
        ) from None


def get_element_size(dtype: DataType | int | str) -> int:
    """How many bytes one element takes."""
    return _ELEMENT_BYTES[data_type(dtype)]


def get_dtype_name(dtype: DataType | int | str) -> str:
    """The name of a data type: `FLOAT32`."""
    return data_type(dtype).name


class TensorArgType(IntEnum):
    """What a task does with a tensor, from which the order of tasks is inferred."""

    __hash__ = int.__hash__  # as above

    INPUT = 0
    """It reads."""
    OUTPUT = 1
    """It writes all of it; memory is found for an address of 0."""
    INOUT = 2
    """It reads and writes."""
    OUTPUT_EXISTING = 3
    """It writes all of it, into memory that is there already."""
    NO_DEP = 4
    """It does what the caller has ordered by other means."""


class ContinuousTensor:
    """A dense, row-major tensor somewhere in memory; it does not own that memory.

    Attributes:
        data: the address of its first byte; 0 means that it has none yet.
        dtype: what its elements are.
        child_memory: whether the address is a pointer of a chip, and means nothing on the host.
    """

    __slots__ = ("_data", "_dtype", "_shapes", "child_memory")

    def __init__(
        self,
        data: int = 0,
        shapes: Iterable[int] = (),
        dtype: DataType | int | str = DataType.FLOAT32,
        child_memory: bool = False,
    ) -> None:
        self.data = data
        self.shapes = shapes
        self.dtype = dtype
        self.child_memory = bool(child_memory)

    @classmethod
    def known(
        cls, data: int, shapes: tuple[int, ...], dtype: DataType, child_memory: bool = False
    ) -> "ContinuousTensor":
        """Make one of values that have been checked: every tensor of every task comes by here."""
        tensor = cls.__new__(cls)
        tensor._data = data  # noqa: SLF001 (its own class)
        tensor._shapes = shapes  # noqa: SLF001
        tensor._dtype = dtype  # noqa: SLF001
        tensor.child_memory = child_memory
        return tensor

    @classmethod
    def make(
        cls,
        data: int,
        shapes: Iterable[int],
        dtype: DataType | int | str,
        child_memory: bool = False,
    ) -> "ContinuousTensor":
        """Describe a tensor.

        Raises:
            ConfigError: more than 5 dimensions, or a length, an address or a type that no tensor
                can have; it is a `ValueError`.
        """
        return cls(data, shapes, dtype, child_memory)

    @property
    def data(self) -> int:
        """The address of the first byte."""
        return self._data

    @data.setter
    def data(self, address: int) -> None:
        number = operator.index(address)
        if not 0 <= number < ADDRESS_END:
            raise TreeValueError(f"the address of a tensor is {address}, expected 0 to 2**64 - 1")
        self._data = number

    @property
    def shapes(self) -> tuple[int, ...]:
        """The length of each dimension."""
        return self._shapes

    @shapes.setter
    def shapes(self, lengths: Iterable[int]) -> None:
        self._shapes = _checked_shape(lengths)

    @property
    def ndims(self) -> int:
        """How many dimensions it has; setting it drops the last, or adds some of length 0."""
        return len(self._shapes)

    @ndims.setter
    def ndims(self, count: int) -> None:
        if not 0 <= operator.index(count) <= CONTINUOUS_TENSOR_MAX_DIMS:
            raise TreeValueError(
                f"a tensor has {count} dimensions, expected 0 to {CONTINUOUS_TENSOR_MAX_DIMS}"
            )
        self._shapes = (self._shapes + _PADDING)[:count]

    @property
    def dtype(self) -> DataType:
        """What the elements are."""
        return self._dtype

    @dtype.setter
    def dtype(self, named: DataType | int | str) -> None:
        self._dtype = named if type(named) is DataType else data_type(named)

    def nbytes(self) -> int:
        """How many bytes it takes; one element if it has no dimensions."""
        return _ELEMENT_BYTES[self._dtype] * math.prod(self._shapes)

    def pack(self) -> bytes:
        """Its 40 bytes."""
        shape = self._shapes
        ndims = len(shape)
        return _WIRE_OF[ndims].pack(self._data, *shape, ndims, self._dtype, self.child_memory)

    @classmethod
    def unpack(cls, blob: "bytes | bytearray | memoryview", offset: int = 0) -> "ContinuousTensor":
        """Read 40 bytes back.

        Raises:
            MailboxCorrupt: they are no tensor; the message says which field and why.
        """
        if len(blob) - offset < TENSOR_BYTES:
            raise MailboxCorrupt(
                f"a tensor takes {TENSOR_BYTES} bytes, but the message ends after "
                f"{max(len(blob) - offset, 0)} of them"
            )
        return cls._of_fields(*_WIRE.unpack_from(blob, offset))

    @classmethod
    def _of_fields(cls, data: int, *shape_and_rest: int) -> "ContinuousTensor":
        *shape, ndims, dtype, child_memory = shape_and_rest
        if ndims > CONTINUOUS_TENSOR_MAX_DIMS:
            raise MailboxCorrupt(
                f"a tensor in a message has {ndims} dimensions, expected 0 to "
                f"{CONTINUOUS_TENSOR_MAX_DIMS}"
            )
        kind = _BY_NUMBER.get(dtype)
        if kind is None:
            raise MailboxCorrupt(f"a tensor in a message has data type {dtype}, unknown here")
        if child_memory > 1:
            raise MailboxCorrupt(
                f"a tensor in a message says {child_memory} for child_memory, expected 0 or 1"
            )
        # Each word fits its field, having come from one: what the setters check holds already.
        return cls.known(data, tuple(shape[:ndims]), kind, child_memory == 1)

    @classmethod
    def unpack_all(cls, blob: "bytes | bytearray | memoryview") -> "list[ContinuousTensor]":
        """Read one tensor after the other, all that a blob consists of; see `unpack`."""
        tensors = []
        for data, a, b, c, d, e, ndims, dtype, child_memory in _WIRE.iter_unpack(blob):
            kind = _BY_NUMBER.get(dtype)
            if kind is None or ndims > CONTINUOUS_TENSOR_MAX_DIMS or child_memory > 1:
                cls._of_fields(data, a, b, c, d, e, ndims, dtype, child_memory)  # says which
            tensor = cls.__new__(cls)
            tensor._data = data  # noqa: SLF001 (its own class)
            tensor._shapes = (a, b, c, d, e)[:ndims]  # noqa: SLF001
            tensor._dtype = kind  # type: ignore[assignment]  # noqa: SLF001  # refused above
            tensor.child_memory = child_memory == 1
            tensors.append(tensor)
        return tensors

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ContinuousTensor) and self._key() == other._key()

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def _key(self) -> tuple[int, tuple[int, ...], DataType, bool]:
        return self._data, self._shapes, self._dtype, self.child_memory

    def __copy__(self) -> "ContinuousTensor":
        return ContinuousTensor(*self._key())

    def __repr__(self) -> str:
        where = ", child_memory=True" if self.child_memory else ""
        return (
            f"ContinuousTensor(data={self._data:#x}, shapes={self._shapes}, "
            f"dtype={self._dtype.name}{where})"
        )


def _checked_shape(lengths: Iterable[int]) -> tuple[int, ...]:
    shape = tuple(operator.index(length) for length in lengths)
    if len(shape) > CONTINUOUS_TENSOR_MAX_DIMS:
        raise TreeValueError(
            f"shape {shape} has {len(shape)} dimensions, expected at most "
            f"{CONTINUOUS_TENSOR_MAX_DIMS}",
            hint="flatten the leading ones",
        )
    if not all(0 <= length < _LENGTH_END for length in shape):
        raise TreeValueError(f"shape {shape} has a length that is not 0 to 2**32 - 1")
    return shape


_COUNTS = struct.Struct("=ii")


def encode_arguments(tensors: Sequence[ContinuousTensor], scalars: Sequence[int]) -> bytes:
    """Tensors and scalars as one blob: i32 T, i32 S, T tensors of 40 bytes, S words of 64 bits."""
    packed = [_COUNTS.pack(len(tensors), len(scalars)), *[tensor.pack() for tensor in tensors]]
    if scalars:
        packed.append(struct.pack(f"={len(scalars)}Q", *scalars))
    return b"".join(packed)


def encoded_arguments_bytes(tensor_count: int, scalar_count: int) -> int:
    """How many bytes `encode_arguments` makes of so many."""
    return _COUNTS.size + TENSOR_BYTES * tensor_count + 8 * scalar_count


def encode_numbers(
    tensors: Sequence[ContinuousTensor],
    numbers: Sequence[int | float],
    tags: Sequence[TensorArgType] = (),
) -> bytes:
    """Tensors and scalars as a blob of `encode_arguments` that also says what each of them is.

    Behind the blob stands a byte for each scalar, unless all are integers from 0 on: `Q` for such
    a one, `q` for a negative integer, `d` for a float, whose 64 bits are all kept. Unless the tag
    of each tensor is INPUT, a byte for each scalar and one for each tensor, its tag, stand there.
    """
    if any(tags):
        blob = encode_numbers(tensors, numbers)
        if len(blob) == encoded_arguments_bytes(len(tensors), len(numbers)):
            blob += b"Q" * len(numbers)
        return blob + bytes(tags)
    if not numbers:
        return encode_arguments(tensors, ())
    codes = "".join(map(_code_of, numbers))
    if not codes.strip("Q"):
        return encode_arguments(tensors, numbers)  # type: ignore[arg-type]  # all are integers
    words = struct.unpack(f"={len(codes)}Q", struct.pack("=" + codes, *numbers))
    return encode_arguments(tensors, words) + codes.encode()


def _code_of(number: Any) -> str:
    if isinstance(number, float):
        return "d"
    return "q" if number < 0 else "Q"


def decode_numbers(
    blob: "bytes | bytearray | memoryview",
) -> tuple[list[ContinuousTensor], list[int | float]]:
    """Read a blob of `encode_numbers` back.

    Raises:
        MailboxCorrupt: it was cut, or holds something else.
    """
    counts = tensor_count, scalar_count = argument_counts(blob)
    end = encoded_arguments_bytes(tensor_count, scalar_count)
    if tensor_count and len(blob) == end + scalar_count + tensor_count:
        blob = blob[:-tensor_count]  # see `decode_tags`
    if not scalar_count and len(blob) == end:  # most tasks have tensors only
        return ContinuousTensor.unpack_all(blob[_COUNTS.size :]), []
    if len(blob) != end + scalar_count:
        return _decode(blob, *counts)  # type: ignore[return-value]  # integers are numbers
    tensors, words = _decode(blob[:end], *counts)
    codes = bytes(blob[end:]).decode("latin-1")
    if codes.strip("Qqd"):
        raise MailboxCorrupt(
            f"a message says {codes!r} of its scalars, expected Q, q or d for each"
        )
    numbers = struct.unpack("=" + codes, struct.pack(f"={scalar_count}Q", *words))
    return tensors, list(numbers)


def decode_tags(blob: "bytes | bytearray | memoryview") -> list[TensorArgType]:
    """The tags in a blob of `encode_numbers`, of which `decode_numbers` reads the rest.

    Raises:
        MailboxCorrupt: one is the number of no tag.
    """
    tensor_count, scalar_count = argument_counts(blob)
    with_tags = encoded_arguments_bytes(tensor_count, scalar_count) + scalar_count + tensor_count
    if not tensor_count or len(blob) != with_tags:
        return [TensorArgType.INPUT] * tensor_count
    try:
        return [_TAGS[number] for number in bytes(blob[-tensor_count:])]
    except IndexError:
        raise MailboxCorrupt(
            f"a message says {bytes(blob[-tensor_count:])!r} of its tensors, expected a byte from "
            f"0 to {len(_TAGS) - 1} for each"
        ) from None


_TAGS = tuple(TensorArgType)


def decode_arguments(
    blob: "bytes | bytearray | memoryview",
) -> tuple[list[ContinuousTensor], list[int]]:
    """Read a blob of `encode_arguments` back; what follows it is an error too.

    Raises:
        MailboxCorrupt: it was cut, has something behind its end, or holds no arguments.
    """
    return _decode(blob, *argument_counts(blob))


def _decode(
    blob: "bytes | bytearray | memoryview", tensor_count: int, scalar_count: int
) -> tuple[list[ContinuousTensor], list[int]]:
    wanted = encoded_arguments_bytes(tensor_count, scalar_count)
    if len(blob) != wanted:
        raise MailboxCorrupt(
            f"a message with {tensor_count} tensors and {scalar_count} scalars has "
            f"{len(blob)} bytes of arguments, expected {wanted}"
        )
    end = _COUNTS.size + TENSOR_BYTES * tensor_count
    tensors = ContinuousTensor.unpack_all(blob[_COUNTS.size : end])
    if not scalar_count:
        return tensors, []
    return tensors, list(struct.unpack_from(f"={scalar_count}Q", blob, end))


def argument_counts(blob: "bytes | bytearray | memoryview") -> tuple[int, int]:
    """How many tensors and scalars a blob says that it has."""
    if len(blob) < _COUNTS.size:
        raise MailboxCorrupt(
            f"a message has {len(blob)} bytes of arguments, expected at least {_COUNTS.size}"
        )
    tensor_count, scalar_count = _COUNTS.unpack_from(blob)
    if tensor_count < 0 or scalar_count < 0:
        raise MailboxCorrupt(
            f"a message says that it has {tensor_count} tensors and {scalar_count} scalars"
        )
    return tensor_count, scalar_count
