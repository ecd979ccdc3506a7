"""Functions whose call runs nothing, but makes an object that other code has to run."""

from functools import partial
from typing import Any, NamedTuple

_GENERATOR_FLAG = 0x20
_ASYNC_FLAGS = 0x80 | 0x200
"""Of code objects: coroutines and async generators. `inspect` has them too, and takes 10 ms."""


class EmptyCall(NamedTuple):
    """What a function is whose call runs nothing, what the call makes, and what would run that."""

    kind: str
    makes: str
    runner: str


def empty_call(function: Any) -> EmptyCall | None:
    """Say why a call of this would run nothing; None if it would run."""
    while isinstance(function, partial):
        function = function.func
    if not hasattr(function, "__code__"):
        function = getattr(function, "__call__", function)  # noqa: B004  # of an object
    flags = getattr(getattr(function, "__code__", None), "co_flags", 0)
    if flags & _ASYNC_FLAGS:
        return EmptyCall("an async function", "a coroutine", "asyncio.run")
    if flags & _GENERATOR_FLAG:
        return EmptyCall("a generator", "an iterator", "list")
    return None
