"""Reads of tensors that an operation in flight fills.

A read leaves no trace in memory, so operations of torch are looked at while such an operation is in
flight: by a dispatch mode of the thread that has begun it, and in methods that read memory without
an operation. Modes nest, and programs leave theirs in the order in which they entered them: ours
lies below all others, so that it is never left in the place of another one.
"""

import threading
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rankwise.simranks.torch.loads import FAKE_TENSOR, is_readable, tensors_in
from rankwise.simranks.torch.unseen_mode import MOVES_NOTHING, NOT_OF_DEVICES, PLAIN, UnseenMode
from rankwise.simranks.world.places import CallSite, place_here

_READS = frozenset({"_local_scalar_dense"})
"""What moves nothing on a device, and hands numbers to the program."""
_METHODS = ("tolist", "numpy")
_stack_length = torch._C._len_torch_dispatch_stack  # noqa: SLF001  # torch has no public way
_pop = torch._C._pop_torch_dispatch_stack  # noqa: SLF001  # the same
_push = torch._C._push_on_torch_dispatch_stack  # noqa: SLF001  # the same


class Flight(Protocol):
    """An operation under way."""

    def note_read(self, tensor: Tensor, place: CallSite | None) -> None:
        """A tensor that it fills was read there."""
        ...


class Filled:
    """The memory of the tensors that one operation fills."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        readable = [each for each in tensors if is_readable(each)]
        self._ranges = [span for each in readable if (span := _span_of(each)) is not None]

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def overlaps(self, tensor: Tensor) -> bool:
        """Whether a tensor has numbers there."""
        if not tensor.numel():
            return False
        size, begin = tensor.element_size(), tensor.data_ptr()
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        axes = [(extent, stride * size) for extent, stride in pairs if extent > 1 and stride]
        axes.sort(key=lambda axis: axis[1], reverse=True)
        return any(_touches(begin, axes, size, filled) for filled in self._ranges)


def _span_of(tensor: Tensor) -> tuple[int, int] | None:
    """The addresses from its first number to its last one; None if it has no memory."""
    if not tensor.numel() or not tensor.untyped_storage().nbytes():
        return None
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((extent - 1) * stride for extent, stride in pairs)
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _touches(begin: int, axes: list[tuple[int, int]], size: int, filled: tuple[int, int]) -> bool:
    """Whether one of these numbers lies in a range of memory.

    Args:
        begin: the address of the first one.
        axes: extents and strides in bytes, the largest stride first.
        size: of a number.
        filled: the range.
    """
    low, high = filled
    if not axes:
        return begin < high and begin + size > low
    (extent, stride), *rest = axes
    span = size + sum((count - 1) * step for count, step in rest)
    first = max(0, (low - begin - span) // stride + 1)
    last = min(extent - 1, (high - 1 - begin) // stride)
    return any(
        _touches(begin + index * stride, rest, size, filled) for index in range(first, last + 1)
    )


class _Looking(UnseenMode):
    """Looks at the operations of one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.flights: WeakKeyDictionary[Flight, Filled] = WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry an operation out, after a look at what it reads."""
        kwargs = kwargs or {}
        if types and not PLAIN.issuperset(types):
            if any(each.__name__ == FAKE_TENSOR for each in types):
                return func(*args, **kwargs)
            return NotImplemented  # of a subclass, such as DTensor: what it calls comes by here
        if self.flights and (left_out := _not_read(func)) is not None:
            self.look(
                value
                for name, value in _arguments_by_name(func, args, kwargs)
                if name not in left_out
            )
        return func(*args, **kwargs)

    def look(self, values: Iterable[Any]) -> None:
        """Tell the operations whose tensors are read."""
        tensors = [each for each in tensors_in(list(values)) if is_readable(each)]
        for flight, filled in [*self.flights.items()]:
            for tensor in tensors:
                if filled.overlaps(tensor):
                    flight.note_read(tensor, place_here())
                    self.forget(flight)
                    break

    def forget(self, flight: Flight) -> None:
        """It has been waited for, or has been told of a read."""
        self.flights.pop(flight, None)


class _OfThread(threading.local):
    """The mode of the calling thread."""

    mode: _Looking | None = None


_of_thread = _OfThread()


def look_for(flight: Flight, filled: Filled) -> None:
    """Tell an operation of the first read, by this thread, of the memory that it fills."""
    mode = _of_thread.mode
    if mode is None:
        mode = _of_thread.mode = _Looking()
    mode.flights[flight] = filled
    _put_below(mode)


def forget(flight: Flight) -> None:
    """It has been waited for, by whichever thread."""
    mode = _of_thread.mode
    if mode is None:
        return
    mode.forget(flight)
    if not mode.flights:
        _put_below(None, mode)


def _put_below(mode: _Looking | None, removed: _Looking | None = None) -> None:
    """Put a mode below all others of the calling thread, unless it is there, or remove it."""
    popped = [_pop(None) for _ in range(_stack_length())]
    if mode is not None and mode not in popped:
        _push(mode)
    for each in reversed(popped):
        if each is not removed:
            _push(each)


@cache
def _not_read(func: Any) -> frozenset[str] | None:
    """The arguments that an operation does not read; None if it reads none."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.is_view:
        return None
    library, _, operation = str(func.overloadpacket).partition(".")
    if library in NOT_OF_DEVICES or (operation in MOVES_NOTHING and operation not in _READS):
        return None
    return frozenset(
        argument.name
        for argument in schema.arguments
        # A write is told of by itself.
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _arguments_by_name(func: Any, args: Any, kwargs: Any) -> Iterable[tuple[str, Any]]:
    names = (argument.name for argument in func._schema.arguments)  # noqa: SLF001  # no public way
    yield from zip(names, args, strict=False)
    yield from kwargs.items()


def watch_methods() -> Callable[[], None]:
    """Look at methods that read memory without an operation, too; returns what undoes it."""
    for name in _METHODS:
        setattr(Tensor, name, _seen(getattr(Tensor, name)))

    def undo() -> None:
        for name in _METHODS:
            delattr(Tensor, name)  # those of the class in C++ come back

    return undo


def _seen(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        mode = _of_thread.mode
        if mode is not None and mode.flights:
            mode.look([tensor])
        return original(tensor, *args, **kwargs)

    return method
