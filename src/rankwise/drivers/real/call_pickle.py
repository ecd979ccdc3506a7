"""Which part of a call does not pickle, in words; for functions on ranks and in pools alike."""

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from rankwise.drivers.real.interrupts import came_from_handler

UNSENDABLE_HINT = "create it inside the function, or pass what it can be made from"


def name_of(fn: Callable[..., Any]) -> str:
    """How reports call a function."""
    while isinstance(fn, partial):
        fn = fn.func
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def find_culprit(
    fn: Any,
    arguments: Iterator[tuple[str, Any]],
    pickled: Callable[[Any], object],
) -> tuple[str, Exception] | None:
    """The part of a call that does not pickle, and the reason.

    Args:
        fn: the function.
        arguments: their names, such as `argument 0`, and values.
        pickled: pickles a part, or raises.
    """
    name = name_of(fn)
    parts: list[tuple[str, Any]] = [(f"the function {name}", fn)]
    if isinstance(fn, MethodType):
        owner = fn.__self__
        parts.insert(0, (f"the {type(owner).__qualname__} whose method {name} is", owner))
    if isinstance(fn, partial):
        named = ((f"argument {keyword!r}", argument) for keyword, argument in fn.keywords.items())
        parts = [*_described(named, name), *parts]
    for description, part in (*parts, *_described(arguments, name)):
        try:
            pickled(part)
        except Exception as error:  # whatever a foreign `__reduce__` may raise
            if came_from_handler(error):
                raise
            return description, error
    return None


def _described(arguments: Iterator[tuple[str, Any]], name: str) -> Iterator[tuple[str, Any]]:
    for which, argument in arguments:
        yield f"{which} of {name} (a {type(argument).__qualname__})", argument
