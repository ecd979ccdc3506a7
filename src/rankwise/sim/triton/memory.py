"""Where kernels load from and store to: buffers, and which of their elements an access touches.

An access is resolved before anything is moved: its addresses are checked against the buffer, and it
becomes either *strided* (views of regions, one for all programs or one for each) or *scattered*
(one index per element). An access outside its buffer is an error here, not garbage later.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rankwise.sim.triton.affine import Affine, Box
from rankwise.sim.triton.dtypes import Array, dtype
from rankwise.sim.triton.execution import KernelError, OutOfBounds, place, program_text
from rankwise.sim.triton.wait_addresses import LastWriters

_ROW_WORTH_A_VIEW = 512
"""Elements per program from which on a view per program is cheaper than an index per element."""


class Buffer:
    """A run of elements in some memory.

    Attributes:
        name: how messages call it.
        flat: its elements in memory's form, one-dimensional.
        dtype: their type.
        address: its first byte.
        space: the memory it lies in, for a model of time.
        region: the same number for all buffers of a launch that share bytes.
        first: the element that an argument points to; not 0 where strides are negative.
    """

    def __init__(
        self,
        name: str,
        flat: Array,
        type_: dtype,
        address: int,
        space: str = "hbm",
        first: int = 0,
    ) -> None:
        if flat.dtype != type_.storage:
            flat = flat.view(type_.storage)
        self.name = name
        self.flat = flat
        self.dtype = type_
        self.address = address
        self.space = space
        self.region = 0
        self.first = first
        self._views: dict[str, Array] = {type_.storage.char: flat}

    @property
    def size_bytes(self) -> int:
        """How many bytes it has."""
        return int(self.flat.nbytes)

    def elements(self, type_: dtype) -> Array:
        """Its bytes as elements of a type; what does not fill an element is left out."""
        found = self._views.get(type_.storage.char)
        if found is None:
            whole = self.flat.nbytes // type_.itemsize * type_.itemsize
            found = self.flat.view(np.uint8)[:whole].view(type_.storage)
            self._views[type_.storage.char] = found
        return found

    def bytes_at(self, address: int, size: int) -> Array:
        """So many of its bytes, from an address on."""
        start = address - self.address
        view: Array = self.flat.view(np.uint8)[start : start + size]
        return view

    def __repr__(self) -> str:
        return f'"{self.name}" ({self.flat.size} elements of {self.dtype})'


class LaunchMemory:
    """The buffers that a launch may touch.

    Args:
        buffers: those of its arguments.
        elsewhere: finds one by an address in it.
        setters: who has set which word last, also before this launch; None: not recorded.

    Attributes:
        changes: counts stores and atomics that changed something, so that who waits for a change
            can be told from who waits in vain.
        setters: who has set which word last.
        elsewhere: finds a buffer by an address in it.
    """

    def __init__(
        self,
        buffers: list[Buffer],
        elsewhere: Callable[[int], Buffer | None] | None = None,
        setters: LastWriters | None = None,
    ) -> None:
        self.elsewhere = elsewhere
        self.changes = 0
        self.setters = LastWriters() if setters is None else setters
        self._take(buffers)

    def _take(self, buffers: list[Buffer]) -> None:
        self._buffers = sorted(buffers, key=lambda buffer: buffer.address)
        self._starts = [buffer.address for buffer in self._buffers]
        region, end = 0, 0
        for buffer in self._buffers:
            if buffer.address >= end:
                region += 1
            buffer.region = region
            end = max(end, buffer.address + buffer.size_bytes)

    def buffer_at(self, address: int) -> Buffer | None:
        """The buffer that an address lies in, even if only a pointer in memory tells of it."""
        at = bisect_right(self._starts, address) - 1
        if at >= 0:
            buffer = self._buffers[at]
            if address < buffer.address + buffer.size_bytes:
                return buffer
        found = self.elsewhere(address) if self.elsewhere is not None else None
        if found is not None:
            self._take([*self._buffers, found])
        return found


class AccessTarget(NamedTuple):
    """What an access is aimed at, before it is resolved."""

    action: str
    """`load`, `store`, or the atomic operation."""
    buffer: Buffer
    element: dtype
    shape: tuple[int, ...]


class Strided(NamedTuple):
    """Views of the buffer, and the part of the block that each of them is.

    A view has the program axis in front; `rows` is the length of that axis over all of them.
    """

    rows: int
    pieces: list[tuple[tuple[slice, ...], Array]]
    touched: int
    """Elements touched by all programs together."""
    first: int
    """The lowest element touched."""


class Scattered(NamedTuple):
    """An index per element, `(rows, *shape)`, and the mask that says which of them count."""

    elements: Array
    mask: Array | None
    touched: int
    first: int


Access: TypeAlias = Strided | Scattered


def resolve_pattern(target: AccessTarget, pattern: Affine, box: Box | None) -> Access | None:
    """A symbolic access, checked; None if it is better done element by element."""
    shape = target.shape
    box = box if box is not None else Box((None,) * len(shape))
    edges, same = box.extent(shape)
    lowest = _check_corners(target, pattern, edges)
    flat = target.buffer.elements(target.element)
    size = flat.itemsize
    strides = tuple(stride * size for stride in pattern.strides)
    if same:
        base = pattern.base
        low = [int(edge[0][0]) for edge in edges]
        extent = tuple(int(edge[1][0]) - start for edge, start in zip(edges, low, strict=True))
        within = tuple(slice(start, start + size) for start, size in zip(low, extent, strict=True))
        count = len(base) * math.prod(extent)
        if count == 0:
            return Strided(len(base), [], 0, 0)
        step = int(base[1] - base[0]) if len(base) > 1 else 0
        if len(base) <= 2 or (base[1:] - base[:-1] == step).all():
            offset = int(base[0]) + sum(
                start * stride for start, stride in zip(low, pattern.strides, strict=True)
            )
            view: Array = np.ndarray(
                (len(base), *extent), flat.dtype, flat, offset * size, (step * size, *strides)
            )
            return Strided(len(base), [((slice(None), *within), view)], count, max(lowest, 0))
    if math.prod(shape) < _ROW_WORTH_A_VIEW:
        return None
    return _view_per_program(pattern, edges, flat, strides)._replace(first=max(lowest, 0))


def _view_per_program(
    pattern: Affine, edges: list[tuple[Array, Array]], flat: Array, strides: tuple[int, ...]
) -> Strided:
    rows = max([len(pattern.base)] + [len(edge) for both in edges for edge in both])
    bases = np.broadcast_to(pattern.base, rows).tolist()
    lows = [np.broadcast_to(low, rows).tolist() for low, _high in edges]
    highs = [np.broadcast_to(high, rows).tolist() for _low, high in edges]
    pieces: list[tuple[tuple[slice, ...], Array]] = []
    count = 0
    size = flat.itemsize
    for row, base in enumerate(bases):
        within = [slice(row, row + 1)]
        extent = [1]
        offset = base * size
        elements = 1
        for low, high, stride in zip(lows, highs, strides, strict=True):
            start, stop = low[row], high[row]
            within.append(slice(start, stop))
            extent.append(stop - start)
            offset += start * stride
            elements *= stop - start
        if elements:
            view: Array = np.ndarray(tuple(extent), flat.dtype, flat, offset, (0, *strides))
            pieces.append((tuple(within), view))
            count += elements
    return Strided(rows, pieces, count, 0)


def _check_corners(target: AccessTarget, pattern: Affine, edges: list[tuple[Array, Array]]) -> int:
    """The lowest element of a symbolic access; refused if that or the highest is outside."""
    lowest: Array = pattern.base
    highest: Array = pattern.base
    used: Any = True
    for (low, high), stride in zip(edges, pattern.strides, strict=True):
        used = used & (high > low)
        if stride >= 0:
            lowest, highest = lowest + low * stride, highest + (high - 1) * stride
        else:
            lowest, highest = lowest + (high - 1) * stride, highest + low * stride
    limit = target.buffer.elements(target.element).size
    first = int(lowest.min())
    if first >= 0 and highest.max() < limit:
        return first
    wrong = used & ((lowest < 0) | (highest >= limit))
    wrong, lowest, highest = np.broadcast_arrays(wrong, lowest, highest)
    if not wrong.any():
        return first
    row = int(np.flatnonzero(wrong)[0])
    index = pattern._replace(
        base=pattern.base[row : row + 1] if len(pattern.base) > 1 else pattern.base
    )
    values = index.values(target.shape)[0]
    inside = np.ones(target.shape, np.bool_)
    for axis, (low, high) in enumerate(edges):
        at = np.arange(target.shape[axis])
        start, stop = (int(edge[row if len(edge) > 1 else 0]) for edge in (low, high))
        keep = (at >= start) & (at < stop)
        inside &= keep.reshape(-1, *(1,) * (len(target.shape) - axis - 1))
    bad = np.argwhere(inside & ((values < 0) | (values >= limit)))[0]
    raise _refusal(target, row, int(values[tuple(bad)]), tuple(bad))


def resolve_scattered(target: AccessTarget, index: Array, mask: Array | None) -> Scattered:
    """An access element by element, checked; masked elements get the index 0."""
    limit = target.buffer.elements(target.element).size
    if mask is not None:
        rows = max(len(index), len(mask))
        if len(index) < rows:
            index = np.broadcast_to(index, (rows, *index.shape[1:]))
        index = index * mask
        count = int(np.count_nonzero(mask)) * (rows // len(mask))
    else:
        count = index.size
    if index.size and count and (index.min() < 0 or index.max() >= limit):
        wrong = (index < 0) | (index >= limit)
        bad = np.argwhere(wrong)[0]
        raise _refusal(target, int(bad[0]), int(index[tuple(bad)]), tuple(bad[1:]))
    first = 0
    if count:
        first = (
            int(index.min())
            if mask is None
            else int(index[np.broadcast_to(mask, index.shape)].min())
        )
    return Scattered(index, mask, count, first)


def _refusal(target: AccessTarget, row: int, element: int, at: tuple[int, ...]) -> OutOfBounds:
    buffer = target.buffer
    within = f", at {list(map(int, at))} of the block," if at else ""
    limit = buffer.elements(target.element).size
    return OutOfBounds(
        f"{place()}, {program_text(row)}: {target.action} of element {element}{within} is outside "
        f'of buffer "{buffer.name}", which has {limit} elements of {target.element}',
        hint="mask the elements beyond the end, or check the strides",
    )


def bits_of(stored: Any) -> Array:
    """Values in memory's form, as unsigned integers."""
    values = np.asarray(stored)
    bits: Array = values.view(f"u{values.itemsize}")
    return bits


class PreparedStore:
    """A store, checked and ready: values for places of arrays."""

    def __init__(self, buffer: Buffer, pieces: list[tuple[Array, Any, Array]]) -> None:
        self.buffer = buffer
        self._pieces = pieces

    def changes(self) -> bool:
        """Whether memory will hold other bits afterwards: a NaN is itself, and -0.0 is not 0.0."""
        return any(
            (bits_of(array[where]) != bits_of(values)).any()
            for array, where, values in self._pieces
        )

    def make(self) -> None:
        """Write; of several values for one element, the last program's stays."""
        for array, where, values in self._pieces:
            array[where] = values

    def make_and_remember(self) -> Callable[[], None]:
        """Write, and return what takes it back."""
        before = [(array, where, array[where].copy()) for array, where, _values in self._pieces]
        self.make()

        def take_back() -> None:
            for array, where, old in reversed(before):
                array[where] = old

        return take_back


def strided_store(buffer: Buffer, access: Strided, values: Array) -> PreparedStore:
    """A store to views."""
    pieces = [(view, ..., _matching(values, within, view)) for within, view in access.pieces]
    return PreparedStore(buffer, pieces)


def _matching(values: Array, within: tuple[slice, ...], view: Array) -> Array:
    if len(values) == 1:
        return values[(slice(None), *within[1:])]
    part = values[within]
    # All programs store to one place: the last of them has the last word.
    return part if len(part) == len(view) else part[-1:]


def scattered_store(
    buffer: Buffer, element: dtype, access: Scattered, values: Array
) -> PreparedStore:
    """A store to single elements."""
    rows = max(len(access.elements), len(values))
    shape = (rows, *access.elements.shape[1:])
    index, values = np.broadcast_to(access.elements, shape), np.broadcast_to(values, shape)
    if access.mask is not None:
        mask = np.broadcast_to(access.mask, shape)
        index, values = index[mask], values[mask]
    return PreparedStore(buffer, [(buffer.elements(element), index, values)])


def buffers_behind(
    memory: LaunchMemory, addresses: Array, mask: Array | None
) -> Iterator[tuple[Buffer, Array]]:
    """The buffers that bare addresses lie in, each with the mask of those that do.

    Raises:
        KernelError: an address lies in no buffer of the launch.
    """
    rest = np.ones(addresses.shape, np.bool_) if mask is None else np.array(mask)
    rest = np.broadcast_to(rest, np.broadcast_shapes(rest.shape, addresses.shape)).copy()
    addresses = np.broadcast_to(addresses, rest.shape)
    while rest.any():
        at = tuple(np.argwhere(rest)[0])
        address = int(addresses[at])
        buffer = memory.buffer_at(address)
        if buffer is None:
            raise OutOfBounds(
                f"{place()}, {program_text(int(at[0]))}: address {address:#x} lies in no buffer of "
                "this launch",
                hint="pass every array that the kernel reaches as an argument of its own",
            )
        end = buffer.address + buffer.size_bytes
        inside = rest & (addresses >= buffer.address) & (addresses < end)
        yield buffer, inside
        rest &= ~inside


def aligned_index(buffer: Buffer, element: dtype, addresses: Array, mask: Array) -> Array:
    """Bare addresses as element indices into their buffer."""
    offsets = np.where(mask, addresses - buffer.address, 0)
    index: Array = offsets // element.itemsize
    if (index * element.itemsize != offsets).any():
        raise KernelError(f'{place()}: an address in "{buffer.name}" is not aligned to {element}')
    return index
