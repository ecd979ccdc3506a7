"""Pickling callables for children that run already.

The captured values of a function are copied. Arrays in the arena are not: they travel as the place
where they lie, so that parent and children go on sharing them.
"""

import ctypes
import io
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankwise.base.value_pickle import ValuePickler
from rankwise.drivers.real.tree.arena import Arena


class _Pickler(ValuePickler):
    def __init__(self, file: io.BytesIO, arena: Arena) -> None:
        super().__init__(file)
        self._arena = arena

    def reducer_override(self, thing: Any) -> Any:
        """Arrays of the arena as places, everything else by value where needed."""
        if type(thing) is np.ndarray and not thing.dtype.hasobject:
            place = thing.__array_interface__["data"][0]
            steps = [(n - 1) * step for n, step in zip(thing.shape, thing.strides, strict=True)]
            low = place + sum(step for step in steps if step < 0)
            high = place + sum(step for step in steps if step > 0) + thing.itemsize
            if thing.size and self._arena.contains(low, high - low):
                return _array_at, ((low, high), place, thing.shape, thing.strides, thing.dtype.str)
        return super().reducer_override(thing)


def pickled(callable_: Any, arena: Arena) -> bytes:
    """A callable as bytes, for children that share this arena.

    Two pickles: the sources of its code that are in no file, for tracebacks, and the callable.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, arena)
    pickler.dump(callable_)
    return pickle.dumps(pickler.sources_in_memory()) + file.getvalue()


def _array_at(
    span: tuple[int, int],
    place: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
) -> NDArray[Any]:
    """The array that lies there; the arena, and so the memory, lives as long as the process."""
    low, high = span
    memory = memoryview((ctypes.c_ubyte * (high - low)).from_address(low))
    return np.ndarray(shape, np.dtype(dtype), memory.cast("B"), place - low, strides)
