"""The value that kernels calculate with: a block of one type, for all programs of a group.

Its array has the group's programs as first axis; the length of that axis is one where all programs
have the same value. Blocks of indices, addresses and masks stay symbolic for as long as they follow
a pattern (see `affine`); their array is made when it is first read. Values never change.

A pointer is an element offset into its buffer. It is a bare byte address, with no buffer, only
where it was made from an integer or chosen from different buffers.

The operators are in `arithmetic`, which enters them when it is imported, since the class and its
operators need each other. `language` makes methods of those functions that may be written so.
"""

import math
import operator
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.affine import Affine, Box
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.dtypes import Array, block_type, dtype
from rankwise.sim.triton.execution import KernelTypeError, KernelValueError, active, deciding, place

if TYPE_CHECKING:
    from rankwise.sim.triton.memory import Buffer

_FLOAT32_SMALLEST, _FLOAT32_LARGEST = (
    float(each) for each in (np.finfo(np.float32).tiny, np.finfo(np.float32).max)
)


class tensor:
    """A block of values, or a single one (shape `()`)."""

    __slots__ = ("__weakref__", "_data", "affine", "box", "buffer", "dtype", "shape", "token")
    __array_ufunc__ = None  # numpy's numbers leave the operators to us

    def __init__(
        self,
        data: Array | None,
        type_: dtype,
        shape: tuple[int, ...],
        *,
        affine: Affine | None = None,
        box: Box | None = None,
        buffer: "Buffer | None" = None,
        token: Any = None,
    ) -> None:
        self._data = data
        self.dtype = type_
        self.shape = shape
        self.affine = affine
        self.box = box
        self.buffer = buffer
        self.token = token

    @property
    def data(self) -> Array:
        """The plain values, of shape `(programs or 1, *shape)`; not to be written."""
        if self._data is None:
            if self.affine is not None:
                self._data = self.affine.values(self.shape).astype(self.dtype.compute, copy=False)
            else:
                assert self.box is not None, "a block has values, a pattern, or is a box"
                self._data = self.box.values(self.shape)
        return self._data

    def as_affine(self) -> Affine | None:
        """The pattern of its values if they are integers or addresses that follow one."""
        if self.affine is None and self.shape == () and self.dtype.letter in "iup":
            self.affine = Affine(deciding(self.data).astype(np.int64), ())
        return self.affine

    @property
    def numel(self) -> int:
        """How many elements a program's block has."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """How many axes a program's block has."""
        return len(self.shape)

    @property
    def type(self) -> dtype:
        """The type of the whole: of the block if it is one, else of the number."""
        return block_type(self.dtype, self.shape) if self.shape else self.dtype

    def numpy(self) -> Array:
        """The values with the program axis in front, for debugging; a copy."""
        return np.array(deciding(self.data))

    if TYPE_CHECKING:  # `arithmetic` enters its operators, which need this class

        def _operator(self, other: Any) -> "tensor": ...

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _operator
        __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _operator
        __mod__ = __rmod__ = __and__ = __rand__ = __or__ = __ror__ = _operator
        __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _operator
        __lt__ = __le__ = __gt__ = __ge__ = _operator

        def __eq__(self, other: object) -> "tensor": ...  # type: ignore[override]

        def __ne__(self, other: object) -> "tensor": ...  # type: ignore[override]

        def __neg__(self) -> "tensor": ...

        def __invert__(self) -> "tensor": ...

        def __getitem__(self, keys: Any) -> "tensor": ...

    __hash__ = object.__hash__

    def __pos__(self) -> "tensor":
        raise KernelTypeError(f"{place()}: Triton has no unary + of blocks")

    def item(self) -> "tensor":
        """The one element of a block, as a number."""
        if self.numel != 1:
            raise KernelTypeError(f"{place()}: item() takes a block of one element, not {self!r}")
        element: tensor = self.reshape(())
        return element

    def __bool__(self) -> bool:
        return bool(self._single("the truth of a block decides nothing: reduce it, or use where"))

    def __index__(self) -> int:
        if not self.dtype.is_int():
            raise KernelTypeError(f"{place()}: {self!r} is used as an integer")
        return operator.index(self._single("a block cannot be used as one integer").item())

    def __int__(self) -> int:
        return int(self._single("a block cannot be used as one number"))

    def __float__(self) -> float:
        return float(self._single("a block cannot be used as one number"))

    def _single(self, complaint: str) -> Any:
        if self.numel != 1:
            raise KernelTypeError(f"{place()}: {complaint}: {self!r}")
        execution = active()
        if execution.observer is not None and self.token is not None:
            execution.observer.settle()
        return execution.decide(self.data.reshape(-1))

    def __repr__(self) -> str:
        return f"tensor(shape={list(self.shape)}, dtype={self.dtype})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{place()}: a tensor has no attribute {name!r} in the emulated kernel language"
        )


def scalar(value: Any, type_: dtype) -> tensor:
    """One number, the same for all programs."""
    return tensor(np.array([value], dtype=type_.compute), type_, ())


def number_type(value: Any) -> dtype:
    """The type that a Python number has by itself."""
    if isinstance(value, (bool, np.bool_)):
        return t.int1
    if isinstance(value, (int, np.integer)):
        if -(2**31) <= value < 2**31:
            return t.int32
        if 2**31 <= value < 2**32:
            return t.uint32
        if -(2**63) <= value < 2**63:
            return t.int64
        if value < 2**64:
            return t.uint64
        raise KernelValueError(f"{place()}: the integer {value} does not fit into 64 bits")
    if isinstance(value, (float, np.floating)):
        magnitude = abs(float(value))
        if magnitude == 0 or not np.isfinite(magnitude):
            return t.float32
        is_single = _FLOAT32_SMALLEST <= magnitude <= _FLOAT32_LARGEST
        return t.float32 if is_single else t.float64
    raise KernelTypeError(
        f"{place()}: {value!r} ({type(value).__name__}) is not a value of the kernel language"
    )


def to_tensor(x: Any) -> tensor:
    """A number as a tensor of its own type; a tensor as it is."""
    value = plain(x)
    if isinstance(value, tensor):
        return value
    return scalar(value, number_type(value))


def broadcast_shape(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that two blocks have in common when axes of length one are repeated."""
    if left == right:
        return left
    rank = max(len(left), len(right))
    left = (1,) * (rank - len(left)) + left
    right = (1,) * (rank - len(right)) + right
    both = []
    for axis, (mine, theirs) in enumerate(zip(left, right, strict=True)):
        if mine != theirs and 1 not in (mine, theirs):
            raise KernelTypeError(
                f"{place()}: blocks of shapes {list(left)} and {list(right)} do not fit together: "
                f"axis {axis} is {mine} long in one and {theirs} in the other"
            )
        both.append(theirs if mine == 1 else mine)
    return tuple(both)


def padded(data: Array, rank: int) -> Array:
    """An array with block axes of length one put after the program axis, up to `rank` of them."""
    missing = rank + 1 - data.ndim
    if missing <= 0:
        return data
    return data.reshape(data.shape[0], *(1,) * missing, *data.shape[1:])


def plain_shape(shape: Sequence[Any]) -> tuple[int, ...]:
    """A shape given as one sequence or as several numbers, constexpr or not."""
    if len(shape) == 1 and not isinstance(shape[0], int):
        first = getattr(shape[0], "value", shape[0])
        if isinstance(first, Sequence):
            shape = first
    return tuple(operator.index(getattr(size, "value", size)) for size in shape)


BLOCK_ELEMENTS_MAX = 1_048_576


@cache
def why_no_block(shape: tuple[int, ...]) -> str | None:
    """Why Triton has no blocks of this shape; None if it has."""
    for axis, size in enumerate(shape):
        if size & (size - 1):
            return f"axis {axis} has {size} elements: it must be a power of two"
    elements = math.prod(shape)
    if elements > BLOCK_ELEMENTS_MAX:
        return f"it has {elements} elements: {BLOCK_ELEMENTS_MAX} are the most"
    return None


def shape_of_block(shape: Sequence[Any]) -> tuple[int, ...]:
    """A shape as `plain_shape` takes it, which a block can have."""
    found = plain_shape(shape)
    reason = why_no_block(found)
    if reason is not None:
        raise KernelValueError(
            f"{place()}: a block of shape {list(found)}: {reason}",
            hint="use triton.next_power_of_2 and mask the rest",
        )
    return found


def with_data(source: tensor, data: Array) -> tensor:
    """A block with other elements of the same memory, or other numbers of the same type."""
    return tensor(data, source.dtype, data.shape[1:], buffer=source.buffer, token=source.token)


def with_pattern(source: tensor, shape: tuple[int, ...], pattern: Affine) -> tensor:
    """The same, where the elements follow a pattern."""
    return tensor(
        None, source.dtype, shape, affine=pattern, buffer=source.buffer, token=source.token
    )


def broadcast_to(input: Any, *shape: Any) -> tensor:
    """A block repeated along its axes of length one, or a number in every place."""
    source = to_tensor(input)
    target = shape_of_block(shape)
    if source.shape == target:
        return source
    if broadcast_shape(source.shape, target) != target:
        raise KernelTypeError(
            f"{place()}: a block of shape {list(source.shape)} cannot be broadcast to "
            f"{list(target)}"
        )
    rank = len(target)
    pattern = source.as_affine()
    if pattern is not None:
        return with_pattern(source, target, _repeated(pattern, source.shape, target))
    if source.box is not None:
        box = box_in(source, target)
        if box is not None:
            return tensor(None, t.int1, target, box=box, token=source.token)
    data = padded(source.data, rank)
    return with_data(source, np.broadcast_to(data, (data.shape[0], *target)))


def _repeated(pattern: Affine, shape: tuple[int, ...], target: tuple[int, ...]) -> Affine:
    rank = len(target)
    before = (1,) * (rank - len(shape)) + shape
    strides = tuple(
        0 if size == 1 else stride
        for size, stride in zip(before, pattern.padded(rank).strides, strict=True)
    )
    return Affine(pattern.base, strides)


def box_in(mask: tensor, shape: tuple[int, ...]) -> Box | None:
    """A box as one of a greater shape; None if an axis that it bounds is repeated."""
    assert mask.box is not None
    box = mask.box.padded(len(shape))
    before = (1,) * (len(shape) - len(mask.shape)) + mask.shape
    for old, new, bound in zip(before, shape, box.bounds, strict=True):
        if old != new and bound is not None:
            return None
    return box
