"""Reads the faults of simulated ranks: `kill:rank=3@collective=9`, or a file of them.

The language is that of `rankwise sim cluster --faults`: a list of `happenings`, each with its kind
in `what`, and durations with their unit. The short form is one of them in a word.
"""

import os
from collections.abc import Sequence
from signal import Signals
from typing import Any, get_args

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.suggestions import hint_on_name
from rankwise.drivers.sim.cluster.plan_file import parse_duration, read_tree
from rankwise.sim.rehearsal.faults import Fault

_KINDS: dict[str, Any] = {kind.__struct_config__.tag: kind for kind in get_args(Fault)}
_EXAMPLES = {"rank": "1", "by": "5s", "bit": "0"}


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in such a file."""

    happenings: tuple[Fault, ...]


def read_faults(words: Sequence[str], size: int, label: str = "--faults") -> tuple[Fault, ...]:
    """Read all faults that the words tell of, each in the short form or as the name of a file.

    Args:
        words: as the user gives them.
        size: how many ranks there are.
        label: what the user calls the words.

    Raises:
        ConfigError: a word or a file cannot be read, or names a rank that there is not.
    """
    faults = tuple(fault for word in words for fault in _read(word, label))
    for fault in faults:
        if not 0 <= fault.rank < size:
            raise ConfigError(
                f"{label} names rank {fault.rank}, and there are ranks 0 to {size - 1}"
            )
    return faults


def _read(word: str, label: str) -> tuple[Fault, ...]:
    is_file = os.path.exists(word) or word.endswith((".yaml", ".yml"))
    tree = read_tree(word) if is_file else {"happenings": [_from_short_form(word, label)]}
    for happening in tree.get("happenings") or ():
        if isinstance(happening, dict):
            _convert_durations(word, happening, label)
            _convert_signal(word, happening, label)
            if not is_file:
                _check(word, happening, label)
    try:
        return msgspec.convert(tree, FaultPlan, strict=False).happenings
    except msgspec.ValidationError as error:
        place = str(error) if is_file else str(error).replace(" - at `$.happenings[0]`", "")
        raise ConfigError(
            f"{label} {word}: {place}", hint="docs/howto/faults.md lists the faults"
        ) from None


def _from_short_form(word: str, label: str) -> dict[str, Any]:
    """`late:rank=1,by=5s@collective=2` as the fields of a happening."""
    what, colon, rest = word.partition(":")
    fields: dict[str, Any] = {"what": what}
    rest, _, group = rest.replace("@", ",").partition("group=")  # the names of groups have commas
    if group:
        fields["group"] = group
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"{label} {word}: {part!r} is not a field, expected NAME=VALUE")
        fields[name] = value
    if not colon:
        raise ConfigError(
            f"{label} {word}: there is no such file, nor is it a fault: expected one of"
            f" {', '.join(_KINDS)}, as in kill:rank=3@collective=9"
        )
    if word.endswith("@"):
        raise ConfigError(f"{label} {word}: nothing follows @, expected @collective=N")
    return fields


def _check(word: str, fields: dict[str, Any], label: str) -> None:
    """Refuse what is no fault in words that fit the short form."""
    what = fields["what"]
    kind = _KINDS.get(what)
    if kind is None:
        raise ConfigError(
            f"{label} {word}: there is no fault {what!r}", hint=hint_on_name(what, _KINDS)
        )
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    for name, value in fields.items():
        if name == "what":
            continue
        if name not in known:
            raise ConfigError(
                f"{label} {word}: {what} has no {name!r}", hint=hint_on_name(name, known)
            )
        is_number = known[name].type in (int, int | None)
        if is_number and not str(value).lstrip("-").isdecimal():
            raise ConfigError(f"{label} {word}: {name} is {value!r}, expected a whole number")
    missing = [name for name, field in known.items() if field.required and name not in fields]
    if missing:
        raise ConfigError(
            f"{label} {word}: {what} needs {' and '.join(missing)}",
            hint=f"as in {what}:{','.join(f'{name}={_EXAMPLES[name]}' for name in missing)}",
        )


def _convert_signal(word: str, happening: dict[str, Any], label: str) -> None:
    name = happening.get("signal")
    if not isinstance(name, str) or name.isdecimal():
        return
    try:
        happening["signal"] = int(Signals[name])
    except KeyError:
        raise ConfigError(
            f"{label} {word}: signal is {name!r}, expected a number, or a name such as SIGTERM"
        ) from None


def _convert_durations(word: str, happening: dict[str, Any], label: str) -> None:
    if "by" in happening:
        duration = parse_duration(str(happening["by"]))
        if duration is None:
            raise ConfigError(
                f"{label} {word}: by is {happening['by']!r}, expected a duration with its unit, "
                "as 5s or 200ms"
            )
        happening["by"] = duration
