"""What users give: counts, seconds, shapes, names, lists."""

import operator
from collections.abc import Iterable
from typing import Any

from rankwise.base.errors import TreeValueError
from rankwise.base.units import Duration, duration_from_seconds

_CENTURY_S = 3.2e9


def check_text(name: str, value: object, hint: str) -> None:
    """Refuse what is no text, or empty.

    Raises:
        ConfigError: names it and its value.
    """
    if not isinstance(value, str) or not value:
        raise TreeValueError(f"{name} is {value!r}, expected a name", hint=hint)


def check_whole(name: str, value: object, least: int, hint: str | None = None) -> None:
    """Refuse what is no whole number from `least` on.

    Raises:
        ConfigError: names it and its value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TreeValueError(
            f"{name} is {value!r}, expected a whole number from {least} on", hint=hint
        )


def checked_entries(name: str, given: Iterable[Any], expected: str) -> tuple[Any, ...]:
    """What a user has given a list of.

    Raises:
        ConfigError: it is no list.
    """
    try:
        return tuple(given)
    except TypeError:
        raise TreeValueError(f"{name} is {given!r}, expected a list: {expected}") from None


def checked_patience(name: str, seconds: float) -> Duration:
    """How long seconds are that a user is ready to wait; infinity is as good as a century.

    Raises:
        ConfigError: they are negative, or no number.
    """
    try:
        if seconds >= 0:
            return duration_from_seconds(min(float(seconds), _CENTURY_S))
    except (TypeError, ValueError):
        pass
    raise TreeValueError(f"{name} is {seconds!r}, expected a number of seconds from 0 on")


def checked_shape(shape: Iterable[int] | int) -> tuple[int, ...]:
    """The lengths of a tensor's dimensions.

    Raises:
        ConfigError: they are none.
    """
    try:
        lengths = (operator.index(shape),) if isinstance(shape, int) else tuple(shape)
        lengths = tuple(operator.index(length) for length in lengths)
        if min(lengths, default=0) >= 0:
            return lengths
    except TypeError:
        pass
    given = f"an array of shape {shape.shape}" if hasattr(shape, "shape") else repr(shape)
    raise TreeValueError(f"the shape is {given}, expected whole numbers from 0 on: (4, 8)")
