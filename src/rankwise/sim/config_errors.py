"""What does not fit into its type, told for people: where it is, what is there, what was expected.

msgspec names the place and the types; names that were probably meant are added here.
"""

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from rankwise.base.suggestions import hint_behind
from rankwise.base.wording import kinds_in_words

_AT = re.compile(r"(.*) - at (?:`(key)` in )?`\$(.*)`$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_NO_CHOICE = re.compile(r"Invalid (?:enum )?value '(.*)'")


class Mistake(NamedTuple):
    """Where a value does not fit, and why.

    Attributes:
        keys: the way to it from the outermost field; of a list the number.
        expected: one phrase, or all of it where there is no value to show.
        found: the value, where it is shown.
        name: of a field or a choice that there is not, that one; else empty.
    """

    keys: list[str]
    expected: str
    found: str = ""
    name: str = ""

    @property
    def field(self) -> str:
        """The way as users write it: `workers.lives[0].after`; empty for the whole."""
        steps = (f"[{key}]" if key.isdecimal() else f".{key}" for key in self.keys)
        return "".join(steps).lstrip(".")

    @property
    def describe(self) -> str:
        """All in one phrase: `rank is 'x', expected a whole number`."""
        if not self.keys:
            return self.problem
        if self.found:
            return f"{self.field} is {self.found}, {self.expected}"
        return f"{self.field}: {self.problem}"

    @property
    def problem(self) -> str:
        """The same in one phrase without the place."""
        return f"{self.expected}, found {self.found}" if self.found else self.expected


def mistake_in(error: msgspec.ValidationError, kind: Any, tree: Any) -> Mistake:
    """What msgspec has refused.

    Args:
        error: what it says.
        kind: the type that was asked for.
        tree: what did not fit into it.
    """
    matched = _AT.match(str(error))
    problem, is_key, path = matched.groups() if matched else (str(error), None, "")
    keys = [key or index for key, index in _STEP.findall(path)]
    types, value = _at(kind, keys, tree)
    if unknown := _UNKNOWN.fullmatch(problem):
        name = unknown[1]
        hint = hint_behind(name, (field for each in types for field in _fields(each)))
        return Mistake([*keys, name], f"there is no such field{hint}", name=name)
    if no_choice := _NO_CHOICE.fullmatch(problem):
        name = no_choice[1]
        return Mistake(keys, f"there is no {name!r}{hint_behind(name, _choices(types))}", name=name)
    if is_key and problem.startswith("Expected `str`"):
        return Mistake(keys, "a name in it is not text: put quotes around it")
    if problem.startswith("Object missing"):
        problem = problem[:1].lower() + problem[1:]
    elif problem.startswith("Expected "):
        problem = problem[:1].lower() + problem[1:]
        if not isinstance(value, Mapping | list | None) and not is_key:
            # msgspec names a type; the value tells more.
            return Mistake(keys, kinds_in_words(problem.partition(", got ")[0]), repr(value))
        problem = kinds_in_words(problem)
    return Mistake(keys, problem)


def _at(kind: Any, keys: list[str], tree: Any) -> tuple[list[Any], Any]:
    """The types that may be at a place, and what is there."""
    types, value = list(_alternatives(kind)), tree
    for key in keys:
        found = [inner for each in types for inner in _inner(each, key)]
        types = [each for inner in found for each in _alternatives(inner)]
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list | tuple) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            value = None
    return types, value


def _alternatives(kind: Any) -> Iterator[Any]:
    if get_origin(kind) in (Union, UnionType):
        yield from get_args(kind)
    else:
        yield kind


def _inner(kind: Any, key: str) -> Iterator[Any]:
    origin = get_origin(kind)
    if _is_mapping(origin):
        yield get_args(kind)[1]
    elif origin in (list, tuple):
        yield get_args(kind)[0]
    elif _is_struct(kind) and kind.__struct_config__.tag_field == key:
        yield str(kind.__struct_config__.tag)
    elif key in _fields(kind):
        yield _fields(kind)[key]


def _is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _fields(kind: Any) -> dict[str, Any]:
    if not _is_struct(kind):
        return {}
    return {each.encode_name: each.type for each in msgspec.structs.fields(kind)}


def _choices(types: list[Any]) -> Iterator[str]:
    """What a value, or a key of a mapping, may be."""
    for kind in types:
        origin = get_origin(kind)
        if isinstance(kind, str):
            yield kind
        elif origin is Literal:
            yield from map(str, get_args(kind))
        elif _is_mapping(origin):
            yield from _choices([get_args(kind)[0]])
        elif isinstance(kind, type) and issubclass(kind, Enum):
            yield from (str(each.value) for each in kind)
