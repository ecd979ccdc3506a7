"""Which bytes of memory an access touches, and which bursts that are.

Memory gives and takes whole bursts. A contiguous block costs what it has, but for its edges; a
column of a matrix costs a burst per element. A burst that several runs share is moved once.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rankwise.sim.hardware.interleaving import Offsets

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Footprint:
    """Which bytes an access touches, from the lowest on: equally long runs.

    Attributes:
        run: bytes of each.
        offsets: where they begin, ascending; the first is 0.
    """

    __slots__ = ("offsets", "run")

    def __init__(self, run: int, offsets: Offsets) -> None:
        self.run = run
        self.offsets = offsets

    def bursts(self, address: int, burst: int) -> tuple[Offsets, Offsets]:
        """The bursts that it touches, each once: ranges of addresses, ascending.

        Args:
            address: its lowest byte.
            burst: bytes of a burst, whose addresses are multiples of it.
        """
        starts = address + self.offsets
        begins = starts // burst * burst
        ends = -((starts + self.run) // -burst) * burst
        if len(starts) > 1:
            # Both rise from run to run, so what a run shares it shares with the one before it.
            np.maximum(begins[1:], ends[:-1], out=begins[1:])
        return begins, ends


def footprint_of_elements(firsts: Offsets, size: int) -> tuple[int, Footprint]:
    """Where the lowest of elements begins, and what all of them touch from there on.

    Args:
        firsts: where they begin, in bytes.
        size: bytes of each.
    """
    offsets = np.unique(firsts)
    lowest = int(offsets[0])
    return lowest, Footprint(size, offsets - lowest)


def footprint_of_view(view: "NDArray[Any]") -> tuple[int, Footprint]:
    """Where the lowest byte of a view is, counted from its first element, and what it touches."""
    run, lowest = view.itemsize, 0
    loops: list[tuple[int, int]] = []
    for stride, size in sorted(_loops_of(view), key=lambda loop: abs(loop[0])):
        lowest += min(0, stride * (size - 1))
        if not loops and abs(stride) <= run:
            run += abs(stride) * (size - 1)
        else:
            loops.append((abs(stride), size))
    return lowest, _looped(run, tuple(loops))


def starts_of(view: "NDArray[Any]") -> Offsets:
    """Where the elements of a view begin, in bytes from its first one."""
    return _starts(_loops_of(view))


Loops: TypeAlias = tuple[tuple[int, int], ...]
"""Strides in bytes, and how many there are of each."""


def _loops_of(view: "NDArray[Any]") -> Loops:
    return tuple(
        (stride, size)
        for size, stride in zip(view.shape, view.strides, strict=True)
        if size > 1 and stride
    )


@lru_cache(maxsize=4_096)
def _looped(run: int, loops: Loops) -> Footprint:
    """Equal ones are the same object: most accesses of a kernel are alike."""
    return Footprint(run, np.unique(_starts(loops)) if len(loops) > 1 else _starts(loops))


def _starts(loops: Loops) -> Offsets:
    starts: Offsets = np.zeros(1, np.int64)
    for stride, size in loops:
        starts = (starts[None, :] + stride * np.arange(size)[:, None]).reshape(-1)
    return starts
