"""Index arithmetic that is known without its values: affine blocks and box masks.

Nearly every address in a real kernel is `base + i*stride + j*stride`, and nearly every mask says
`index < bound`. A block that is known in this form costs a few numbers per program instead of one
per element; a load of it becomes a copy of a strided region instead of a gather. A block that does
not stay in the form is turned into plain values, so that nothing depends on it but speed.

All arrays here have one entry per program of the group, or a single one that counts for all.
"""

from typing import NamedTuple

import numpy as np

from rankwise.sim.triton.dtypes import Array


class Affine(NamedTuple):
    """`base[program] + sum(strides[d] * index_d)`."""

    base: Array
    strides: tuple[int, ...]

    def values(self, shape: tuple[int, ...]) -> Array:
        """The plain values, of shape `(programs, *shape)`; read-only where they repeat."""
        rank = len(shape)
        total = self.base.reshape(-1, *(1,) * rank)
        for axis, (size, stride) in enumerate(zip(shape, self.strides, strict=True)):
            if stride and size > 1:
                steps = np.arange(0, size * stride, stride, dtype=np.int64)
                total = total + steps.reshape(size, *(1,) * (rank - axis - 1))
        return np.broadcast_to(total, (len(self.base), *shape))

    def span(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """How far below and above its base a block of this shape reaches."""
        reaches = [
            stride * (size - 1) for size, stride in zip(shape, self.strides, strict=True) if size
        ]
        return sum(reach for reach in reaches if reach < 0), sum(
            reach for reach in reaches if reach > 0
        )

    def plus(self, other: "Affine", sign: int = 1) -> "Affine":
        """The sum, or with `sign=-1` the difference; both have the same rank."""
        if sign == 1:
            base = self.base + other.base
            return Affine(base, tuple(map(sum, zip(self.strides, other.strides, strict=True))))
        return Affine(
            self.base - other.base,
            tuple(mine - theirs for mine, theirs in zip(self.strides, other.strides, strict=True)),
        )

    def times(self, factor: int) -> "Affine":
        """Every value times a number."""
        return Affine(self.base * factor, tuple(stride * factor for stride in self.strides))

    def padded(self, rank: int) -> "Affine":
        """The same with axes of size one in front, up to this rank."""
        return Affine(self.base, (0,) * (rank - len(self.strides)) + self.strides)

    @property
    def is_constant(self) -> bool:
        """Whether all elements of a program's block are equal."""
        return not any(self.strides)

    def sole_axis(self) -> int | None:
        """The only axis along which values change; None when there is none, or more than one."""
        moving = [axis for axis, stride in enumerate(self.strides) if stride]
        return moving[0] if len(moving) == 1 else None

    def wrapped_by(self, divisor: int, shape: tuple[int, ...]) -> "Affine | None":
        """The values modulo a number, if no program's block crosses one of its multiples."""
        turns = self._quotients(divisor, shape)
        return None if turns is None else Affine(self.base - turns * divisor, self.strides)

    def divided_by(self, divisor: int, shape: tuple[int, ...]) -> "Affine | None":
        """The quotients, if all of a program's are the same."""
        turns = self._quotients(divisor, shape)
        return None if turns is None else Affine(turns, (0,) * len(shape))

    def _quotients(self, divisor: int, shape: tuple[int, ...]) -> Array | None:
        """The quotient of each program's block, if it is one for all of its elements."""
        low, high = self.span(shape)
        if divisor <= 0 or (self.base + low).min() < 0:
            return None
        turns: Array = (self.base + low) // divisor
        return None if (turns != (self.base + high) // divisor).any() else turns


class Box(NamedTuple):
    """A mask that holds inside `low[d] <= index_d < high[d]`; None along an axis is no bound."""

    bounds: tuple[tuple[Array, Array] | None, ...]

    def values(self, shape: tuple[int, ...]) -> Array:
        """The plain truth values."""
        rank = len(shape)
        total: Array = np.ones((1,) * (rank + 1), dtype=np.bool_)
        for axis, bound in enumerate(self.bounds):
            if bound is None:
                continue
            index = np.arange(shape[axis]).reshape(shape[axis], *(1,) * (rank - axis - 1))
            low, high = (edge.reshape(-1, *(1,) * rank) for edge in bound)
            total = total & ((index >= low) & (index < high))
        return np.broadcast_to(total, (total.shape[0], *shape))

    def both(self, other: "Box") -> "Box":
        """Where both hold."""
        return Box(
            tuple(
                theirs
                if mine is None
                else mine
                if theirs is None
                else (np.maximum(mine[0], theirs[0]), np.minimum(mine[1], theirs[1]))
                for mine, theirs in zip(self.bounds, other.bounds, strict=True)
            )
        )

    def padded(self, rank: int) -> "Box":
        """The same with unbounded axes in front."""
        return Box((None,) * (rank - len(self.bounds)) + self.bounds)

    def is_full(self, shape: tuple[int, ...]) -> bool:
        """Whether it holds everywhere, for all programs."""
        return all(
            bound is None or (bound[0].max() <= 0 and bound[1].min() >= size)
            for size, bound in zip(shape, self.bounds, strict=True)
        )

    def extent(self, shape: tuple[int, ...]) -> tuple[list[tuple[Array, Array]], bool]:
        """Bounds along each axis, clipped to the shape; whether they are the same everywhere."""
        edges = []
        same = True
        for size, bound in zip(shape, self.bounds, strict=True):
            if bound is None:
                edges.append((np.zeros(1, np.int64), np.full(1, size)))
                continue
            low, high = np.clip(bound[0], 0, size), np.clip(bound[1], 0, size)
            high = np.maximum(low, high)
            if len(low) > 1 and (low == low[0]).all():
                low = low[:1]
            if len(high) > 1 and (high == high[0]).all():
                high = high[:1]
            same = same and len(low) == len(high) == 1
            edges.append((low, high))
        return edges, same


def box_where(index: Affine, shape: tuple[int, ...], comparison: str, bound: Array) -> Box | None:
    """Where `index <comparison> bound`, if that is a box.

    Args:
        index: the left side.
        shape: its shape.
        comparison: `<`, `<=`, `>` or `>=`.
        bound: the right side, one number per program.
    """
    axis = index.sole_axis()
    if axis is None or shape[axis] < 1:
        return None
    stride = index.strides[axis]
    if stride < 0:
        return None
    size = shape[axis]
    # base + stride*i < bound  holds for  i < ceil((bound - base) / stride)
    distance = bound.astype(np.int64) - index.base
    if comparison in ("<=", ">"):
        distance = distance + 1
    edge = np.clip(-(-distance // stride), 0, size)
    whole = np.full(1, size, dtype=np.int64)
    nothing = np.zeros(1, dtype=np.int64)
    bounds: list[tuple[Array, Array] | None] = [None] * len(shape)
    bounds[axis] = (nothing, edge) if comparison in ("<", "<=") else (edge, whole)
    return Box(tuple(bounds))
