"""Block pointers and tensor descriptors: a window onto a tensor, and where it stands.

Both become ordinary pointers and masks when they are used, so that bounds, lockstep and timing are
those of `access`.
"""

from collections.abc import Sequence
from typing import Any

from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.access import element_of, load_block, store_block
from rankwise.sim.triton.arithmetic import add, bit_and, compare, in_type, mul
from rankwise.sim.triton.atomics import atomic
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.creation import arange
from rankwise.sim.triton.execution import KernelTypeError, KernelValueError, deciding, place
from rankwise.sim.triton.tensor import broadcast_to, shape_of_block, tensor, to_tensor

DESCRIPTOR_BYTES, DESCRIPTOR_AXES = 16, 5
"""What the addresses that a descriptor holds are multiples of, and how many axes it has at most."""


def _numbers(values: Any) -> list[tensor]:
    return [in_type(to_tensor(value), t.int64) for value in plain(values)]


def _window(
    base: tensor, strides: list[tensor], offsets: list[tensor], block: tuple[int, ...]
) -> tuple[tensor, list[tensor]]:
    """Pointers to the elements of a block, and their index along each axis."""
    rank = len(block)
    indices = []
    pointers = base
    for axis, (size, stride, offset) in enumerate(zip(block, strides, offsets, strict=True)):
        steps = in_type(arange(0, size), t.int64)
        index = add(_along_axis(steps, axis, rank), offset)
        indices.append(index)
        pointers = add(pointers, mul(index, stride))
    return broadcast_to(pointers, block), indices


def _along_axis(steps: tensor, axis: int, rank: int) -> tensor:
    """A row of numbers along one axis of a block."""
    keys: list[Any] = [None] * rank
    keys[axis] = slice(None)
    return steps[tuple(keys)]


def _inside(
    indices: list[tensor], sizes: list[tensor], axes: Sequence[int], block: tuple[int, ...]
) -> tensor | None:
    mask: tensor | None = None
    for axis in axes:
        index = broadcast_to(indices[axis], block)
        for each in (compare("<", index, sizes[axis]), compare(">=", index, 0)):
            mask = each if mask is None else bit_and(mask, each)
    return mask


class BlockPointer:
    """A window of fixed size onto a tensor; made by `make_block_ptr`, moved by `advance`."""

    def __init__(
        self,
        base: tensor,
        shape: list[tensor],
        strides: list[tensor],
        offsets: list[tensor],
        block_shape: tuple[int, ...],
    ) -> None:
        self.base = base
        self.tensor_shape = shape
        self.strides = strides
        self.offsets = offsets
        self.shape = block_shape
        self.dtype = t.pointer_type(element_of(base))

    @property
    def type(self) -> t.dtype:
        """Pointer to a block."""
        return t.pointer_type(self.dtype.element_ty)

    def advanced(self, offsets: Any) -> "BlockPointer":
        """The window moved by so many elements along each axis."""
        steps = _numbers(offsets)
        if len(steps) != len(self.offsets):
            raise KernelValueError(
                f"{place()}: a block pointer of {len(self.offsets)} axes is moved along "
                f"{len(steps)}"
            )
        moved = [add(old, step) for old, step in zip(self.offsets, steps, strict=True)]
        return BlockPointer(self.base, self.tensor_shape, self.strides, moved, self.shape)

    def aimed(self, boundary_check: Any) -> tuple[tensor, tensor | None]:
        """Pointers and mask of an access, bounded along the axes that are to be checked."""
        pointers, indices = _window(self.base, self.strides, self.offsets, self.shape)
        axes = plain(boundary_check)
        axes = (axes,) if isinstance(axes, int) else tuple(map(plain, axes or ()))
        return pointers, _inside(indices, self.tensor_shape, axes, self.shape)


def make_block_ptr(
    base: tensor, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any
) -> BlockPointer:
    """A window of `block_shape` at `offsets` of a tensor."""
    del order  # how the accelerator lays the block out changes nothing here
    parts = [_numbers(each) for each in (shape, strides, offsets)]
    block = shape_of_block((plain(block_shape),))
    if any(len(part) != len(block) for part in parts):
        raise KernelValueError(
            f"{place()}: shape, strides, offsets and block_shape have {len(parts[0])}, "
            f"{len(parts[1])}, {len(parts[2])} and {len(block)} axes; they must have the same"
        )
    return BlockPointer(base, parts[0], parts[1], parts[2], block)


def advance(base: BlockPointer, offsets: Any) -> BlockPointer:
    """A block pointer moved along its axes."""
    if not isinstance(base, BlockPointer):
        raise KernelTypeError(f"{place()}: advance moves block pointers, not {base!r}")
    return base.advanced(offsets)


class tensor_descriptor:
    """A tensor seen through blocks of one shape; loads beyond its end give zeros."""

    def __init__(
        self,
        base: tensor,
        shape: list[tensor],
        strides: list[tensor],
        block_shape: tuple[int, ...],
        padding: str = "zero",
    ) -> None:
        self.base = base
        self.shape = shape
        self.strides = strides
        self.block_shape = block_shape
        self.dtype = element_of(base)
        self.padding = padding

    @property
    def type(self) -> t.dtype:
        """The type of a block."""
        return t.block_type(self.dtype, self.block_shape)

    def _aimed(self, offsets: Any) -> tuple[tensor, tensor | None]:
        starts = _numbers(offsets)
        if len(starts) != len(self.block_shape):
            raise KernelValueError(
                f"{place()}: a descriptor of {len(self.block_shape)} axes is used with "
                f"{len(starts)} offsets"
            )
        pointers, indices = _window(self.base, self.strides, starts, self.block_shape)
        axes = range(len(self.block_shape))
        return pointers, _inside(indices, self.shape, axes, self.block_shape)

    def load(self, offsets: Any) -> tensor:
        """The block that starts at these offsets."""
        pointers, mask = self._aimed(offsets)
        return load_block(pointers, mask, float("nan") if self.padding == "nan" else None)

    def store(self, offsets: Any, value: Any) -> None:
        """Write a block; what lies beyond the end is left out."""
        pointers, mask = self._aimed(offsets)
        store_block(pointers, value, mask)

    def _atomic(self, name: str, offsets: Any, value: Any) -> tensor:
        pointers, mask = self._aimed(offsets)
        return atomic(name, pointers, value, mask)

    def atomic_add(self, offsets: Any, value: Any) -> tensor:
        """Add a block to memory."""
        return self._atomic("add", offsets, value)

    def atomic_max(self, offsets: Any, value: Any) -> tensor:
        """Keep the greater of memory and a block."""
        return self._atomic("max", offsets, value)

    def atomic_min(self, offsets: Any, value: Any) -> tensor:
        """Keep the smaller of memory and a block."""
        return self._atomic("min", offsets, value)

    def gather(self, x_offsets: tensor, y_offset: Any) -> tensor:
        """Rows picked by a block of row numbers, from one column on."""
        pointers, mask = self._rows(x_offsets, y_offset)
        return load_block(pointers, mask, None)

    def scatter(self, value: Any, x_offsets: tensor, y_offset: Any) -> None:
        """Write rows picked by a block of row numbers, from one column on."""
        pointers, mask = self._rows(x_offsets, y_offset)
        store_block(pointers, value, mask)

    def _rows(self, x_offsets: tensor, y_offset: Any) -> tuple[tensor, tensor]:
        rows = in_type(x_offsets, t.int64)[:, None]
        columns = add(in_type(arange(0, self.block_shape[1]), t.int64), y_offset)[None, :]
        block = (x_offsets.shape[0], self.block_shape[1])
        pointers = add(add(self.base, mul(rows, self.strides[0])), mul(columns, self.strides[1]))
        mask = _inside([rows, columns], self.shape, (0, 1), block)
        assert mask is not None
        return broadcast_to(pointers, block), mask


def make_tensor_descriptor(
    base: tensor, shape: Any, strides: Any, block_shape: Any, padding_option: str = "zero"
) -> tensor_descriptor:
    """A descriptor of a tensor, for blocks of one shape."""
    sizes, steps = _numbers(shape), _numbers(strides)
    block = shape_of_block((plain(block_shape),))
    if not len(sizes) == len(steps) == len(block):
        raise KernelValueError(
            f"{place()}: shape, strides and block_shape have {len(sizes)}, {len(steps)} and "
            f"{len(block)} axes; they must have the same"
        )
    _check(base, plain(strides), steps, block, plain(padding_option))
    return tensor_descriptor(base, sizes, steps, block, plain(padding_option))


def _check(
    base: tensor, given: Any, steps: list[tensor], block: tuple[int, ...], padding: Any
) -> None:
    """Refuse what hardware does not take: its rows begin at multiples of 16 bytes."""
    element = element_of(base)
    if not 1 <= len(block) <= DESCRIPTOR_AXES:
        raise KernelValueError(f"{place()}: a tensor descriptor has 1 to 5 axes, not {len(block)}")
    if block[-1] * element.itemsize < DESCRIPTOR_BYTES:
        raise KernelValueError(
            f"{place()}: the last axis of a descriptor's block has {block[-1] * element.itemsize} "
            "bytes: it must have 16 at least"
        )
    last = plain(given[-1])
    if not isinstance(last, tensor) and last != 1:
        raise KernelValueError(
            f"{place()}: the last stride of a descriptor is {last}: it must be 1"
        )
    if padding == "nan" and element.is_int():
        raise KernelValueError(f"{place()}: padding_option='nan' is for floats, not {element}")
    for axis, step in enumerate(steps[:-1]):
        if (deciding(step.data) * element.itemsize % DESCRIPTOR_BYTES).any():
            raise KernelValueError(
                f"{place()}: axis {axis} of a descriptor has a stride of "
                f"{int(step.data.reshape(-1)[0]) * element.itemsize} bytes: it must be a multiple "
                "of 16",
                hint="pad the rows",
            )


def load_tensor_descriptor(desc: tensor_descriptor, offsets: Any) -> tensor:
    """The block that starts at these offsets."""
    return desc.load(offsets)


def store_tensor_descriptor(desc: tensor_descriptor, offsets: Any, value: Any) -> None:
    """Write a block."""
    desc.store(offsets, value)


__all__ = [
    "advance", "load_tensor_descriptor", "make_block_ptr", "make_tensor_descriptor",
    "store_tensor_descriptor", "tensor_descriptor",
]  # fmt: skip
