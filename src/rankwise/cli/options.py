"""Options that know their group in the help, their environment variables and torchrun.

Every option can be given by `PET_<NAME>` too; the command line wins, and an empty variable counts
as unset. The environment is read once, by `values_from`, into click's `default_map`: parsing then
depends on nothing but its arguments, and each value's origin is known for messages.
"""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from rankwise.base.units import DURATION_MAX, Duration, parse_duration
from rankwise.cli.spelling import Flag

if TYPE_CHECKING:
    from rankwise.launch.options import Option

_SECONDS = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*")
_SIZE_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"\s*(\d{1,40})\s*([KMGT]?)(?:I?B)?\s*")
_SIZE_MIN = 4 << 10
_SIZE_MAX = 1 << 50
"""What a file system may hold, and the kernel counts."""
_BRIEF_SPELLING_MAX = 28
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class OptionWithVariable(click.Option):
    """An option of `rankwise run`, made from its row in the table of options.

    Attributes:
        row: that row.
        variables: environment variables that give it a value, the first one set wins.
    """

    def __init__(self, row: "Option") -> None:
        attributes: dict[str, Any] = {}
        match row.kind.name:
            case "flag":
                attributes["is_flag"] = True
            case "texts":
                attributes["multiple"] = True
            case "choice":
                attributes["type"] = click.Choice(row.choices)
            case "integer" if row.least is not None:
                attributes["type"] = click.IntRange(row.least, row.most)
            case "number" if row.least is not None:
                attributes["type"] = click.FloatRange(row.least)
            case "file":
                attributes["shell_complete"] = complete_file
            case "directory":
                attributes["shell_complete"] = complete_directory
            case name:
                attributes["type"] = _TYPES[name]
        super().__init__(
            [row.short, row.flag] if row.short else [row.flag],
            help=row.help,
            metavar=row.metavar,
            default=row.initial,
            **attributes,
        )
        self.row = row
        self.variables = (f"PET_{row.name.upper()}", *row.variables)

    @property
    def flag(self) -> Flag:
        """How it may be spelled."""
        return Flag(self.row.flag, self.row.short, not self.is_flag, self.row.torchrun is not None)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """The spelling, and one sentence with default and variables."""
        default = [f"default: {self.default_in_words}"] if self.default_in_words else []
        return self.spelling(ctx), f"{self.help} [{'; '.join([*default, *self.variables])}]"

    def spelling(self, ctx: click.Context) -> str:
        """Its names, and what it takes."""
        names = ", ".join(sorted(self.opts, key=len))
        return names if self.is_flag else f"{names} {self._shown(ctx)}"

    def brief_spelling(self, ctx: click.Context) -> str:
        """The same, with the first form alone of a value that has long ones."""
        spelled = self.spelling(ctx)
        return spelled if len(spelled) <= _BRIEF_SPELLING_MAX else spelled.partition("|")[0]

    @property
    def default_in_words(self) -> str | None:
        """What happens when the option is not given; None for a flag."""
        if self.row.default_shown is not None or self.is_flag:
            return self.row.default_shown
        return "none" if self.row.default in {None, ()} else str(self.row.default)

    def variable_set(self, environ: Mapping[str, str]) -> str | None:
        """The name of the variable that gives the value, if one does."""
        return next((name for name in self.variables if environ.get(name)), None)

    def _shown(self, ctx: click.Context) -> str:
        if isinstance(self.type, click.Choice):
            return "|".join(map(str, self.type.choices))
        return self.make_metavar(ctx)


class DurationType(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """A time such as `30`, `2.5`, `500ms`, `30s`, `1h30m`; without a unit it is seconds."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Duration:
        """Read the text into nanoseconds."""
        if not isinstance(value, str):
            return Duration(value)
        duration = parse_duration(f"{value}s" if _SECONDS.fullmatch(value) else value)
        if duration is None:
            self.fail(
                f"{value!r} is not a time, expected seconds or 500ms, 30s, 5m, 1h30m", param, ctx
            )
        if duration > DURATION_MAX:
            self.fail(f"{value!r} is too long, expected at most ten years (87600h)", param, ctx)
        return duration


class SizeType(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """An amount of bytes such as `500000`, `64K`, `100M`, `2G`: powers of 1024, 4K to 1024T."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the text into bytes."""
        if not isinstance(value, str):
            return int(value)
        found = _SIZE.fullmatch(value.upper())
        size = int(found[1]) << _SIZE_UNITS[found[2]] if found else 0
        if size < _SIZE_MIN:
            self.fail(
                f"{value!r} is not a size, expected 4K or more, such as 64K, 100M, 2G", param, ctx
            )
        if size > _SIZE_MAX:
            self.fail(f"{value!r} is too large, expected at most 1024T", param, ctx)
        return size


class CommaListType(click.ParamType):  # type: ignore[type-arg]  # the same
    """Words between commas; two commas stand for one that belongs to a word, as in torchrun."""

    name = "list"

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,  # noqa: ARG002  # click's signature
        ctx: click.Context | None,  # noqa: ARG002  # the same
    ) -> list[str]:
        """Split the text."""
        if not isinstance(value, str):
            return list(value)
        # A run of commas is read in pairs from the left.
        return [item.replace("\0", ",") for item in value.replace(",,", "\0").split(",")]


class ElsewhereType(click.ParamType):  # type: ignore[type-arg]  # the same
    """`ray`, `sim`, or `sim:MACHINE`."""

    name = "place"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:  # noqa: ARG002  # click's signature
        """Show the choices."""
        return "[ray|sim[:MACHINE]]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse other words."""
        kind, colon, machine = str(value).partition(":")
        if kind not in {"ray", "sim"} or (colon and (kind != "sim" or not machine)):
            self.fail(f"{value!r} is not 'ray', 'sim' or 'sim:MACHINE'", param, ctx)
        return str(value)

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002  # click's signature
        param: click.Parameter,  # noqa: ARG002  # the same
        incomplete: str,
    ) -> list[CompletionItem]:
        """The words, and `sim:` with each preset."""
        from rankwise.launch.options import MACHINES, PRESETS  # noqa: PLC0415  # only for completion

        words = [
            "ray",
            "sim",
            *(f"sim:{name}" for name in (*PRESETS, *MACHINES)),
        ]
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]


DURATION = DurationType()
ELSEWHERE = ElsewhereType()
COMMA_LIST = CommaListType()
SIZE = SizeType()
_TYPES: dict[str, Any] = {
    "text": None,
    "integer": click.INT,
    "number": click.FLOAT,
    "seconds": DURATION,
    "size": SIZE,
    "words": COMMA_LIST,
    "place": ELSEWHERE,
}
"""Kinds of values in the table of options; this module does not import the table, because commands
without it need the types."""


def values_from(
    environ: Mapping[str, str], options: Iterable[OptionWithVariable]
) -> dict[str, Any]:
    """What the environment says about the options: a map for click's `default_map`.

    An option that may be given several times is given once by its variable.

    Raises:
        click.UsageError: a variable for a flag is neither a number nor yes or no.
    """
    values: dict[str, Any] = {}
    for option in options:
        variable = option.variable_set(environ)
        if variable is None or option.name is None:
            continue
        text = environ[variable]
        if option.is_flag:
            values[option.name] = _flag_value(variable, text)
        else:
            values[option.name] = [text] if option.multiple else text
    return values


def complete_file(
    _ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete a file's name."""
    return [CompletionItem(incomplete, type="file")]


def complete_directory(
    _ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete a directory's name."""
    return [CompletionItem(incomplete, type="dir")]


def _flag_value(variable: str, text: str) -> bool:
    word = text.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        return bool(int(word))
    except ValueError:
        raise click.UsageError(
            f"{variable} is {text!r}, expected true, false, yes, no or a number (0 is false)"
        ) from None
