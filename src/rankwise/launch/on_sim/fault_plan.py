"""Reads the faults of simulated ranks: `kill:rank=3@collective=9`, or a file of such things.

The language is that of `rankwise sim cluster --faults`: a list of `happenings`, each with its kind
in `what`, and durations with their unit. The short form is one of them in a word.
"""

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.drivers.sim.cluster.plan_file import parse_duration, read_tree
from rankwise.sim.rehearsal.faults import Fault

_KINDS = "kill, raise, late, slow or flip"


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in such a file."""

    happenings: tuple[Fault, ...]


def read_faults(words: Sequence[str], size: int) -> tuple[Fault, ...]:
    """Read all faults that the words tell of, each in the short form or as the name of a file.

    Raises:
        ConfigError: a word or a file cannot be read, or names a rank that there is not.
    """
    faults = tuple(fault for word in words for fault in _read(word))
    for fault in faults:
        if not 0 <= fault.rank < size:
            raise ConfigError(
                f"--faults names rank {fault.rank}, and there are ranks 0 to {size - 1}"
            )
    return faults


def _read(word: str) -> tuple[Fault, ...]:
    if os.path.exists(word) or word.endswith((".yaml", ".yml")):
        tree = read_tree(word)
    else:
        tree = {"happenings": [_from_short_form(word)]}
    for happening in tree.get("happenings") or ():
        _convert_durations(word, happening)
    try:
        return msgspec.convert(tree, FaultPlan, strict=False).happenings
    except msgspec.ValidationError as error:
        place = str(error).replace(" - at `$.happenings[0]`", "") if ":" in word else str(error)
        raise ConfigError(
            f"--faults {word}: {place}", hint="docs/howto/faults.md lists the faults"
        ) from error


def _from_short_form(word: str) -> dict[str, Any]:
    """`late:rank=1,by=5s@collective=2` as the fields of a happening."""
    what, colon, rest = word.partition(":")
    fields: dict[str, Any] = {"what": what}
    rest, _, group = rest.replace("@", ",").partition("group=")  # the names of groups have commas
    if group:
        fields["group"] = group
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--faults {word}: {part!r} is not a field, expected NAME=VALUE")
        fields[name] = value
    if not colon:
        raise ConfigError(
            f"--faults {word}: there is no such file, nor is it a fault: expected {_KINDS}, as in "
            "kill:rank=3@collective=9"
        )
    return fields


def _convert_durations(word: str, happening: Any) -> None:
    if isinstance(happening, dict) and "by" in happening:
        duration = parse_duration(str(happening["by"]))
        if duration is None:
            raise ConfigError(
                f"--faults {word}: by is {happening['by']!r}, expected a duration with its unit, "
                "as 5s or 200ms"
            )
        happening["by"] = duration
