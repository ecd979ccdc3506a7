"""Arrays that a worker shares with its children, and their memory when the program lets go of them.

An array ends when nothing refers to it any more: no view, no arguments, no function. Tasks of a run
that is going on may still use its memory, so it is given back when no run is; the kernel has the
pages back at once, and the addresses are given out again by the thread that uses the worker.
"""

import math
import os
import weakref
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankwise.base.errors import TreeValueError
from rankwise.drivers.real.interrupts import without_handlers
from rankwise.drivers.real.tree.arena import Arena
from rankwise.workers.numbers import checked_shape
from rankwise.workers.runs import Runs


class SharedArrays:
    """The arrays of one initialised worker."""

    def __init__(self, arena: Arena, runs: Runs) -> None:
        self._arena: Arena | None = arena
        self._runs = runs
        self._pid = os.getpid()
        self._living: dict[int, weakref.ref[NDArray[Any]]] = {}
        """What tells of the end of an array, by its offset."""
        self._ended: deque[int] = deque()

    def make(self, shape: Iterable[int] | int, dtype: Any) -> NDArray[Any]:
        """An array of zeros; see `Worker.share`."""
        assert self._arena is not None, "the worker is initialised"
        shape, kind = checked_shape(shape), _checked_kind(dtype)
        self.take_back()
        count = math.prod(shape)
        offset = self._arena.allocate(count * kind.itemsize)
        # All views refer to this one, views of views too.
        whole = np.frombuffer(self._arena.memory, kind, count, offset)

        self._living[offset] = weakref.ref(whole, partial(self._on_end, offset))
        return whole.reshape(shape)

    @without_handlers
    def _on_end(self, offset: int, _: object) -> None:
        """Called in any thread, and in copies of this process, which share the memory."""
        if self._arena is None or os.getpid() != self._pid:
            return
        del self._living[offset]
        if not self._runs.is_running:
            self._arena.discard_all_of(offset)
        self._ended.append(offset)

    def take_back(self) -> None:
        """Give back what has ended, unless a run is going on."""
        if not self._ended or self._runs.is_running or os.getpid() != self._pid:
            return
        assert self._arena is not None, "nothing ends when the worker is closed"
        while self._ended:
            self._arena.release(self._ended.popleft())

    def close(self) -> None:
        """The children are gone: what is left lives as long as the arrays in it."""
        self._arena = None
        self._ended.clear()
        self._living.clear()


def _checked_kind(dtype: Any) -> "np.dtype[Any]":
    try:
        kind: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        raise TreeValueError(
            f"there is no dtype {dtype!r}", hint="give one of numpy's: 'f4', 'int64', …"
        ) from None
    if kind.hasobject:
        raise TreeValueError("objects of Python cannot be shared", hint="share numbers")
    return kind
