"""Functions that workers remember, so that each is sent to a worker once.

A function that can be imported is known by its name. One of `__main__` or of a notebook travels by
value, with the global names and closure cells that it uses: it may be remembered only as long as
these are the same. If all of them are immutable or functions, to look whether they are takes less
than a microsecond. Otherwise (a global list, a class of `__main__`) the function is pickled at each
submission, and sent again only if the pickle differs: a task always sees the values of its
submission.

Workers remember `SLOT_COUNT` functions. The one that was remembered first makes room.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count
from threading import RLock
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from rankwise.drivers.real.pool.messages import NO_SLOT, SLOT_COUNT
from rankwise.drivers.real.pool.pickles import dumps_call

_REMEMBERED_BYTES_MAX = 64 << 10
_ABSENT = object()
_MODULE = ModuleType("any")
_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), range, type(...), CodeType)


class SentFunction:
    """A function as it is sent.

    Attributes:
        slot: where workers remember it; `NO_SLOT` if it goes with each call.
        generation: tells it from others that were, or will be, in that slot.
        pickled: its pickle, with sources.
    """

    __slots__ = ("_captured", "_function", "generation", "pickled", "slot")

    def __init__(
        self, function: Any, slot: int, generation: int, pickled: bytes, captured: Any
    ) -> None:
        self.slot = slot
        self.generation = generation
        self.pickled = pickled
        self._function = function  # its `id` is not another's while we have it
        self._captured = captured

    @property
    def is_current(self) -> bool:
        """Whether what the function has captured is what it was."""
        captured = self._captured
        # Most have captured nothing, and a generator takes half a microsecond.
        return not captured or all(found() is value for found, value in captured)


WITH_CALL = SentFunction(None, NO_SLOT, 0, b"", ())
"""Stands for functions that go with each call."""


class FunctionTable:
    """Remembers functions for all workers of a pool; usable from any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, SentFunction] = OrderedDict()
        self._generations = count(1)
        self._lock = RLock()

    def sent(self, function: Callable[..., Any]) -> SentFunction:
        """How a function is sent; raises whatever its pickling raises."""
        known = self._known.get(id(function))
        if known is not None and known.is_current:
            return known
        kind = type(function)
        if kind is not FunctionType and kind is not type and kind is not BuiltinFunctionType:
            return WITH_CALL  # methods and the like carry objects, which may change
        with self._lock:
            if not isinstance(getattr(function, "__self__", _MODULE), ModuleType):
                return WITH_CALL
            if is_by_name(function):
                return self._remember(id(function), function, function, ())
            captured = _captured_by(function) if isinstance(function, FunctionType) else None
            if captured is not None:
                return self._remember(id(function), function, function, captured)
            body, buffers, sources = dumps_call(function)
            if buffers.found or len(body) > _REMEMBERED_BYTES_MAX:
                return WITH_CALL
            same = self._known.get(body)
            if same is not None:
                self._known.move_to_end(body)
                return same
            return self._remember(body, None, _Pickled(body, sources), ())

    def _remember(self, key: Any, function: Any, sent: Any, captured: Any) -> SentFunction:
        pickled = sent.pickled if isinstance(sent, _Pickled) else _pickled(sent)
        if pickled is None:
            return WITH_CALL
        old = self._known.pop(key, None)
        if old is not None:
            slot = old.slot
        elif len(self._known) < SLOT_COUNT:
            slot = len(self._known)
        else:
            slot = self._known.popitem(last=False)[1].slot
        entry = SentFunction(function, slot, next(self._generations), pickled, captured)
        self._known[key] = entry
        return entry


class _Pickled:
    def __init__(self, body: bytes, sources: dict[str, Any]) -> None:
        self.pickled = _with_sources(body, sources)


def _pickled(function: Any) -> bytes | None:
    body, buffers, sources = dumps_call(function)
    is_large = buffers.found or len(body) > _REMEMBERED_BYTES_MAX
    return None if is_large else _with_sources(body, sources)


def _with_sources(body: bytes, sources: dict[str, Any]) -> bytes:
    return pickle.dumps((body, sources))


def is_by_name(function: Any) -> bool:
    """Whether a function or class is found by its name in another process."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "<")
    return module not in (None, "__main__", "__mp_main__") and "<" not in name


def _captured_by(function: FunctionType) -> list[tuple[Callable[[], Any], Any]] | None:
    """What a function by value uses, each with a way to look it up; None if that may change."""
    captured: list[tuple[Callable[[], Any], Any]] = []
    waiting, seen = [function], {id(function)}
    while waiting:
        each = waiting.pop()
        if each.__dict__ or each.__kwdefaults__:
            return None
        captured += [(_Attribute(each, name), getattr(each, name)) for name in _FIXED]
        for look, value in _names_of(each):
            captured.append((look, value))
            if not _is_constant(value):
                if not isinstance(value, FunctionType):
                    return None
                if id(value) not in seen:
                    seen.add(id(value))
                    waiting.append(value)
        if not all(map(_is_constant, each.__defaults__ or ())):
            return None
    return captured


_FIXED = ("__code__", "__defaults__")


def _names_of(function: FunctionType) -> Iterator[tuple[Callable[[], Any], Any]]:
    for cell in function.__closure__ or ():
        look = _Cell(cell)
        yield look, look()
    names = function.__globals__
    for name in _global_names(function.__code__):
        value = names.get(name, _ABSENT)
        yield _Global(names, name), value


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _is_constant(value: Any) -> bool:
    if value is _ABSENT or isinstance(value, (ModuleType, BuiltinFunctionType)):
        return True
    if type(value) in _CONSTANTS:
        return True
    if isinstance(value, (tuple, frozenset)) and type(value) in (tuple, frozenset):
        return all(map(_is_constant, value))
    return isinstance(value, (type, FunctionType)) and is_by_name(value)


class _Attribute:
    __slots__ = ("_function", "_name")

    def __init__(self, function: FunctionType, name: str) -> None:
        self._function = function
        self._name = name

    def __call__(self) -> Any:
        return getattr(self._function, self._name)


class _Cell:
    __slots__ = ("_cell",)

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def __call__(self) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # it is empty yet
            return _ABSENT


class _Global:
    __slots__ = ("_name", "_names")

    def __init__(self, names: dict[str, Any], name: str) -> None:
        self._names = names
        self._name = name

    def __call__(self) -> Any:
        return self._names.get(self._name, _ABSENT)
