"""How much a memory moves for an access: it gives and takes whole bursts.

A contiguous block costs what it has, but for its edges. A column of a matrix costs a burst per
element: with bursts of 64 bytes, sixteen times as much as a row of as many f32. A burst that
several elements of an access share is moved once.
"""

import numpy as np

from rankwise.sim.triton.dtypes import Array
from rankwise.sim.triton.memory import Access, Scattered, Target


def moved_bytes(target: Target, access: Access, burst: int) -> int:
    """Bytes of all bursts that an access touches.

    Args:
        target: what it is aimed at.
        access: the elements.
        burst: bytes of a burst, whose addresses are multiples of it.
    """
    flat, address = target.buffer.elements(target.element), target.buffer.address
    if isinstance(access, Scattered):
        return burst * _scattered(address, flat.itemsize, access, burst)
    begin = _address_of(flat)
    return burst * sum(
        _strided(address + _address_of(view) - begin, view, burst) for _, view in access.pieces
    )


def _address_of(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _scattered(address: int, itemsize: int, access: Scattered, burst: int) -> int:
    """Bursts of single elements."""
    elements = access.elements
    if access.mask is not None:
        elements = elements[np.broadcast_to(access.mask, elements.shape)]
    first = address + elements.reshape(-1) * itemsize
    return int(np.unique(np.concatenate([first, first + itemsize - 1]) // burst).size)


def _strided(start: int, view: Array, burst: int) -> int:
    """Bursts of a view: of equally long runs, in each of which no burst is left out."""
    run = view.itemsize
    starts = np.array([start])
    sizes = [
        (abs(stride), size, stride)
        for size, stride in zip(view.shape, view.strides, strict=True)
        if size > 1 and stride
    ]
    for distance, size, stride in sorted(sizes):
        lowest = min(0, stride * (size - 1))
        if len(starts) == 1 and distance <= max(run, burst):
            run += distance * (size - 1)
            starts = starts + lowest
        else:
            steps = lowest + distance * np.arange(size)
            starts = (starts[None, :] + steps[:, None]).reshape(-1)
    if len(starts) == 1:
        return int((starts[0] + run - 1) // burst - starts[0] // burst) + 1
    starts.sort()
    first, last = starts // burst, (starts + run - 1) // burst
    # Both rise from run to run, so what a run shares it shares with the one before it.
    shared = np.maximum(0, last[:-1] - first[1:] + 1)
    return int((last - first + 1).sum() - shared.sum())
