"""What a program can be given from outside: its parameters, and how their texts are read.

A parameter is what `run` or `worker` takes by name, with a default. Its type is that of its
annotation where that is a type that msgspec knows (`Size`, `Literal[...]`, `int | None`), and else
by the type of the default. A value that cannot be used is refused before anything runs.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.suggestions import hint_on_name

Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
"""A length of something that must not be empty."""
Tile = Literal[16, 32, 64, 128, 256]
"""A length of blocks that products are made of."""
Block = Literal[
    16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536
]  # fmt: skip
"""A length of blocks that the math engine works on."""
Float = Literal["f16", "bf16", "f32"]
"""Element types of tensors that hold fractions."""
Number = Literal["f16", "bf16", "f32", "i32", "i8"]
"""Element types of tensors that are added up."""

_SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class BenchParameter(NamedTuple):
    """Something that a program takes by name.

    Attributes:
        name: its name.
        default: what it is unless it is given.
        kind: the type of its values.
    """

    name: str
    default: Any
    kind: Any

    def read(self, text: str) -> Any:
        """The value that a text means; raises `ValueError` if it means none."""
        if self.kind is bool:
            value = _SWITCHES.get(text.lower())
            if value is None:
                raise ValueError(text)
            return value
        if get_origin(self.kind) is Literal:
            found = [choice for choice in get_args(self.kind) if str(choice) == text]
            if not found:
                raise ValueError(text)
            return found[0]
        for kind in (int, float) if self.kind is Any else (self.kind,):
            try:
                return msgspec.convert(text, kind, strict=False)
            except msgspec.ValidationError:
                if kind is self.kind:
                    raise
        return text

    @property
    def choices(self) -> tuple[Any, ...]:
        """All its values, if they can be listed."""
        if self.kind is bool:
            return ("true", "false")
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def expected(self) -> str:
        """What its values are, in words."""
        kinds = [kind for kind in _members(self.kind) if kind is not NoneType]
        return " or ".join(map(_in_words, kinds))


class Parameters:
    """All parameters of a program.

    Args:
        program: how messages call it.
        called: the function that takes them.
    """

    def __init__(self, program: str, called: Callable[..., Any]) -> None:
        self._program = program
        self._by_name = {
            each.name: BenchParameter(each.name, each.default, _kind_of(each))
            for each in signature_of(called).parameters.values()
            if each.default is not inspect.Parameter.empty
            and each.kind is not inspect.Parameter.POSITIONAL_ONLY
        }

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in the order in which they are taken."""
        return tuple(self._by_name)

    @property
    def all(self) -> tuple[BenchParameter, ...]:
        """All of them, likewise."""
        return tuple(self._by_name.values())

    def read(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """The values of the parameters that are given.

        Raises:
            ConfigError: there is no such parameter, or its text cannot be used.
        """
        self.check(texts)
        return {name: self._read(name, text) for name, text in texts.items()}

    def check(self, names: Iterable[str]) -> None:
        """Refuse names of what is no parameter; raises `ConfigError`."""
        for name in names:
            if name not in self._by_name:
                hint = hint_on_name(name, self._by_name, "its parameters are:")
                raise ConfigError(
                    f"{self._program} has no parameter {name!r}", hint=hint or "it has none"
                )

    def _read(self, name: str, text: str) -> Any:
        parameter = self._by_name[name]
        try:
            return parameter.read(text)
        except ValueError:
            raise ConfigError(
                f"parameter {name} of {self._program} is {text!r}, expected {parameter.expected}"
            ) from None


def signature_of(called: Callable[..., Any]) -> inspect.Signature:
    """A function's signature, with annotations that are evaluated if they can be."""
    try:
        return inspect.signature(called, eval_str=True)
    except Exception:  # noqa: BLE001 (evaluates the user's annotations: anything may come out)
        return inspect.signature(called)


def _kind_of(parameter: inspect.Parameter) -> Any:
    """The type of a parameter's values: as annotated, or else that of its default."""
    kind = parameter.annotation
    if kind is not inspect.Parameter.empty and not isinstance(kind, str) and _is_readable(kind):
        return kind
    if parameter.default is None:
        return Any
    kind = type(parameter.default)
    return kind if _is_readable(kind) else str


def _is_readable(kind: Any) -> bool:
    """Whether values of a type can be written as one word."""
    return all(
        member in {bool, int, float, str, NoneType} or get_origin(member) is Literal
        for member in map(_bare, _members(kind))
    )


def _members(kind: Any) -> tuple[Any, ...]:
    """The types that a union is made of; of another type, itself."""
    is_union = get_origin(kind) not in {None, Literal, Annotated}
    return get_args(kind) if is_union else (kind,)


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    metas = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    text = words.get(_bare(kind), "a text")
    for meta in metas:
        if meta.ge is not None:
            text += f" from {meta.ge}"
        if meta.le is not None:
            text += f" to {meta.le}"
    return text
