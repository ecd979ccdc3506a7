"""Which bytes an access of a kernel touches: what memory moves for it follows from that."""

from functools import lru_cache

import numpy as np

from rankwise.sim.hardware.footprint import Footprint
from rankwise.sim.triton.dtypes import Array
from rankwise.sim.triton.memory import Access, AccessTarget, Scattered


def footprint_of(target: AccessTarget, access: Access) -> tuple[int, Footprint]:
    """The lowest byte that an access touches, and what it touches from there on."""
    flat, address = target.buffer.elements(target.element), target.buffer.address
    if isinstance(access, Scattered):
        elements = access.elements
        if access.mask is not None:
            elements = elements[np.broadcast_to(access.mask, elements.shape)]
        firsts = np.unique(elements) * flat.itemsize
        return _from_lowest(address, firsts, flat.itemsize)
    begin = _address_of(flat)
    found = [(_address_of(view) - begin, *_runs(view)) for _, view in access.pieces]
    if len(found) == 1:
        ((offset, lowest, run, loops),) = found
        return address + offset + lowest, _looped(run, loops)
    # Of several programs at once: element by element, so that all runs are equally long.
    firsts = np.concatenate([
        (offset + _starts(_loops_of(view))).reshape(-1)
        for (offset, *_), (_, view) in zip(found, access.pieces, strict=True)
    ])  # fmt: skip
    return _from_lowest(address, np.unique(firsts), flat.itemsize)


def _address_of(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _from_lowest(address: int, firsts: Array, run: int) -> tuple[int, Footprint]:
    """A footprint from the offsets of elements, in ascending order."""
    lowest = int(firsts[0])
    return address + lowest, Footprint(run, firsts - lowest)


Loops = tuple[tuple[int, int], ...]
"""Strides in bytes, and how many there are of each."""


def _loops_of(view: Array) -> Loops:
    return tuple(
        (stride, size)
        for size, stride in zip(view.shape, view.strides, strict=True)
        if size > 1 and stride
    )


def _runs(view: Array) -> tuple[int, int, Loops]:
    """Where a view begins, counted from its first element; its runs' length, and their places."""
    run, lowest = view.itemsize, 0
    loops: list[tuple[int, int]] = []
    for stride, size in sorted(_loops_of(view), key=lambda loop: abs(loop[0])):
        lowest += min(0, stride * (size - 1))
        if not loops and abs(stride) <= run:
            run += abs(stride) * (size - 1)
        else:
            loops.append((abs(stride), size))
    return lowest, run, tuple(loops)


@lru_cache(maxsize=4_096)
def _looped(run: int, loops: Loops) -> Footprint:
    """Equal ones are the same object: most accesses of a kernel are alike."""
    return Footprint(run, np.unique(_starts(loops)) if len(loops) > 1 else _starts(loops))


def _starts(loops: Loops) -> Array:
    starts: Array = np.zeros(1, np.int64)
    for stride, size in loops:
        starts = (starts[None, :] + stride * np.arange(size)[:, None]).reshape(-1)
    return starts
