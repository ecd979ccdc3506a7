"""The types of the kernel language, and how numpy holds them.

A type has two numpy forms. In memory (`storage`) a value has the bits that the accelerator would
store. In a kernel (`compute`) it lies in the numpy type that calculates fastest and exactly enough:
floating-point types narrower than 32 bits are float32 arrays whose every element is representable
in the narrow type. Rounding a float32 result to 11 or 8 bits of mantissa after each operation gives
the correctly rounded narrow result for +, -, *, / and square root, because 24 bits are at least
twice as many plus two.

The eight-bit floats saturate when a value is too large, as the conversion instructions do.
"""

from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rankwise.sim.triton import formats

if TYPE_CHECKING:
    from collections.abc import Callable

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""A numpy array of whatever type; the kernel language keeps the types itself."""


class NumberKind(Enum):
    """What kind of number it is, in the order in which kinds absorb each other."""

    BOOLEAN = 0
    INTEGRAL = 1
    FLOATING = 2


class dtype:
    """A scalar type; two are equal when their names are."""

    SIGNEDNESS = Enum("SIGNEDNESS", ["SIGNED", "UNSIGNED"])
    KIND = NumberKind
    SINT_TYPES = ("int8", "int16", "int32", "int64")
    UINT_TYPES = ("int1", "uint8", "uint16", "uint32", "uint64")
    STANDARD_FP_TYPES = ("fp16", "bf16", "fp32", "fp64")
    FP_TYPES = ("fp8e4nv", "fp8e5", *STANDARD_FP_TYPES)
    OTHER_TYPES = ("void",)

    def __init__(
        self,
        name: str,
        letter: str = "",
        bitwidth: int = 0,
        storage: Any = None,
        compute: Any = None,
        mantissa_bits: int = 0,
    ) -> None:
        if not letter:  # a kernel asks for one that there is
            vars(self).update(vars(dtype_named(name)))
            return
        self.name = name
        self.letter = letter
        self.primitive_bitwidth = bitwidth
        self.storage: np.dtype[Any] = np.dtype(storage)
        self.compute: np.dtype[Any] = np.dtype(storage if compute is None else compute)
        self.fp_mantissa_width = mantissa_bits
        self.itemsize = self.storage.itemsize
        self._round: Callable[[Array], Array] | None = None
        self._decode: Callable[[Array], Array] | None = None
        self._encode: Callable[[Array], Array] | None = None

    @property
    def exponent_bias(self) -> int:
        """What is added to the exponents of a floating-point type."""
        return (1 << (self.primitive_bitwidth - self.fp_mantissa_width - 2)) - 1

    @property
    def int_bitwidth(self) -> int:
        """Bits of an integer type."""
        return self.primitive_bitwidth

    @property
    def int_signedness(self) -> Any:
        """Whether an integer type has a sign."""
        return self.SIGNEDNESS.SIGNED if self.letter == "i" else self.SIGNEDNESS.UNSIGNED

    @property
    def scalar(self) -> "dtype":
        """The type of one element."""
        return self

    @property
    def cache_key_part(self) -> str:
        """What tells this type from others in a key."""
        return self.name

    def kind(self) -> NumberKind:
        """Boolean, integral or floating."""
        if self.letter == "b":
            return NumberKind.BOOLEAN
        return NumberKind.FLOATING if self.letter == "f" else NumberKind.INTEGRAL

    def is_ptr(self) -> bool:
        """Whether values are addresses."""
        return False

    def is_block(self) -> bool:
        """Whether it is the type of a block rather than of one element."""
        return False

    def is_const(self) -> bool:
        """Whether it points to what may not be written; never here."""
        return False

    def is_void(self) -> bool:
        """Whether there are no values at all."""
        return self.letter == "v"

    def is_bool(self) -> bool:
        """Whether it is `int1`."""
        return self.letter == "b"

    is_int1 = is_bool

    def is_int(self) -> bool:
        """Whether it is an integer type, `int1` included."""
        return self.letter in "bui"

    def is_int_signed(self) -> bool:
        """Whether it is an integer type with a sign."""
        return self.letter == "i"

    def is_int_unsigned(self) -> bool:
        """Whether it is an integer type without a sign."""
        return self.letter in "bu"

    def is_floating(self) -> bool:
        """Whether it is a floating-point type."""
        return self.letter == "f"

    def is_fp8(self) -> bool:
        """Whether it is one of the eight-bit floats."""
        return self.letter == "f" and self.primitive_bitwidth == 8

    def is_fp16(self) -> bool:
        """Whether it is IEEE half precision."""
        return self.name == "fp16"

    def is_bf16(self) -> bool:
        """Whether it is bfloat16."""
        return self.name == "bf16"

    def is_fp32(self) -> bool:
        """Whether it is single precision."""
        return self.name == "fp32"

    def is_fp64(self) -> bool:
        """Whether it is double precision."""
        return self.name == "fp64"

    def is_standard_floating(self) -> bool:
        """Whether it is a float of 16, 32 or 64 bits."""
        return self.letter == "f" and self.primitive_bitwidth > 8

    def to(self, other: "dtype") -> "dtype":
        """The other type; there so that generic code may cast types as it casts values."""
        return other

    @property
    def is_narrow(self) -> bool:
        """Whether a float32 result has to be rounded to be a value of this type."""
        return self._round is not None

    def rounded(self, values: Array) -> Array:
        """Values of the compute type, rounded to what this type can represent."""
        return values if self._round is None else self._round(values)

    def decode(self, stored: Array, *, may_keep: bool = False) -> Array:
        """Memory's form to the kernel's; a copy, unless the array may be kept and is the same."""
        if self._decode is not None:
            return self._decode(stored)
        return stored.astype(self.compute, copy=not may_keep)

    def encode(self, values: Array) -> Array:
        """The kernel's form to memory's; values have to be representable already."""
        if self._encode is not None:
            return self._encode(values)
        return values if values.dtype == self.storage else values.astype(self.storage)

    def limits(self) -> tuple[int, int]:
        """The smallest and the greatest value of an integer type."""
        if self.letter == "b":
            return 0, 1
        bounds = np.iinfo(self.storage)
        return int(bounds.min), int(bounds.max)

    def __eq__(self, other: object) -> bool:
        other = getattr(other, "value", other)  # a constexpr holds it
        return isinstance(other, dtype) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"triton.language.{_LONG_NAMES.get(self.name, self.name)}"


class pointer_type(dtype):
    """The type of addresses of elements of one type."""

    def __init__(
        self, element_ty: dtype, address_space: int | str = "global", const: bool = False
    ) -> None:
        element_ty = getattr(element_ty, "value", element_ty)
        if not isinstance(element_ty, dtype):
            raise TypeError(f"pointer_type takes a type, not {element_ty!r}")
        super().__init__(f"pointer<{element_ty.name}>", "p", 64, np.int64)
        self.element_ty = element_ty
        self.address_space = address_space
        self.const = const

    def is_ptr(self) -> bool:
        """Whether values are addresses."""
        return True

    def __repr__(self) -> str:
        return f"pointer<{self.element_ty!r}>"


class block_type(dtype):
    """The type of a block: the type of its elements, and its shape."""

    def __init__(self, element_ty: dtype, shape: tuple[int, ...]) -> None:
        super().__init__(
            f"<{list(shape)}, {element_ty.name}>",
            element_ty.letter,
            element_ty.primitive_bitwidth,
            element_ty.storage,
            element_ty.compute,
        )
        self.element_ty = element_ty
        self.shape = tuple(shape)
        self.numel = int(np.prod(shape, dtype=np.int64))

    @property
    def scalar(self) -> dtype:
        """The type of one element."""
        return self.element_ty

    def is_ptr(self) -> bool:
        """Whether values are addresses; a block of pointers is no pointer."""
        return False

    def is_block(self) -> bool:
        """Whether it is the type of a block rather than of one element."""
        return True

    def get_block_shapes(self) -> tuple[int, ...]:
        """The shape."""
        return self.shape


void = dtype("void", "v", 0, np.int8)
int1 = dtype("int1", "b", 1, np.bool_)
int8 = dtype("int8", "i", 8, np.int8)
int16 = dtype("int16", "i", 16, np.int16)
int32 = dtype("int32", "i", 32, np.int32)
int64 = dtype("int64", "i", 64, np.int64)
uint8 = dtype("uint8", "u", 8, np.uint8)
uint16 = dtype("uint16", "u", 16, np.uint16)
uint32 = dtype("uint32", "u", 32, np.uint32)
uint64 = dtype("uint64", "u", 64, np.uint64)
float8e5 = dtype("fp8e5", "f", 8, np.uint8, np.float32, 2)
float8e4nv = dtype("fp8e4nv", "f", 8, np.uint8, np.float32, 3)
float16 = dtype("fp16", "f", 16, np.float16, np.float32, 10)
bfloat16 = dtype("bf16", "f", 16, np.uint16, np.float32, 7)
float32 = dtype("fp32", "f", 32, np.float32, mantissa_bits=23)
float64 = dtype("fp64", "f", 64, np.float64, mantissa_bits=52)
pi32_t = pointer_type(int32)

SCALAR_TYPES = (
    int1, int8, int16, int32, int64, uint8, uint16, uint32, uint64,
    float8e5, float8e4nv, float16, bfloat16, float32, float64,
)  # fmt: skip
"""All types whose values can be stored."""

_LONG_NAMES = {
    "fp8e5": "float8e5", "fp8e4nv": "float8e4nv", "fp16": "float16", "bf16": "bfloat16",
    "fp32": "float32", "fp64": "float64",
}  # fmt: skip

SHORT_NAMES = {
    "fp64": "f64", "fp32": "f32", "fp16": "f16", "bf16": "bf16", "fp8e5": "f8e5", "fp8e4nv": "f8e4",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8",
    "uint64": "u64", "uint32": "u32", "uint16": "u16", "uint8": "u8", "int1": "bool",
}  # fmt: skip
"""What the runtime and the machine call each type."""

_BY_NAME = {
    spelling: each
    for each in SCALAR_TYPES
    for spelling in (each.name, _LONG_NAMES.get(each.name, each.name), SHORT_NAMES[each.name])
} | {
    "half": float16, "float": float32, "double": float64, "i1": int1, "long": int64, "int": int32,
    "float8_e5m2": float8e5, "float8_e4m3fn": float8e4nv,
}  # fmt: skip


def dtype_named(name: str) -> dtype:
    """The type that is called so, in Triton's, torch's, numpy's or the runtime's spelling."""
    try:
        return _BY_NAME[name.rpartition(".")[2]]
    except KeyError:
        raise TypeError(
            f"no type of the kernel language is called {name!r}: there are "
            + ", ".join(each.name for each in SCALAR_TYPES)
        ) from None


def _is_named(name: str) -> "Callable[[dtype], bool]":
    return lambda self: self.name == name


for _each in SCALAR_TYPES:  # Triton's is_int8, is_uint64, is_fp8e5, …
    if not hasattr(dtype, f"is_{_each.name}"):
        setattr(dtype, f"is_{_each.name}", _is_named(_each.name))


@cache  # numpy makes the name anew each time, and imports a module for that
def dtype_of_numpy(numpy_type: np.dtype[Any]) -> dtype:
    """The type whose memory form this numpy type is."""
    return dtype_named(numpy_type.name)


def _install_narrow_formats() -> None:
    for narrow, form in (
        (float16, formats.HALF),
        (bfloat16, formats.BRAIN),
        (float8e5, formats.E5M2),
        (float8e4nv, formats.E4M3),
    ):
        narrow._round = form.rounded  # noqa: SLF001 (the types of this module are made here)
        narrow._decode = form.decode  # noqa: SLF001
        narrow._encode = form.encode  # noqa: SLF001


_install_narrow_formats()


__all__ = [
    "bfloat16", "block_type", "dtype", "float8e4nv", "float8e5", "float16", "float32", "float64",
    "int1", "int8", "int16", "int32", "int64", "pi32_t", "pointer_type", "uint8", "uint16",
    "uint32", "uint64", "void",
]  # fmt: skip
