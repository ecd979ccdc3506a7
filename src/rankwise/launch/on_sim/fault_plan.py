"""Reads the faults of simulated ranks and nodes: `kill:rank=3@collective=9`, or a file of them.

The language is that of `rankwise sim cluster --faults`: a list of `happenings`, each with its kind
in `what`, and durations with their unit. The short form is one of them in a word. What names a node
instead of a rank is the node's: `kill:node=1@collective=9`. What names a part of a chip is for the
machine that ranks are predicted on: `slow:link=sip0-sip1,times=4`.
"""

import os
from collections.abc import Iterable, Sequence
from signal import Signals
from typing import Any, get_args

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.suggestions import hint_on_name
from rankwise.base.units import parse_duration
from rankwise.base.wording import kinds_in_words
from rankwise.drivers.sim.cluster.plan_file import read_tree
from rankwise.sim.rehearsal.faults import Fault, FaultOfNode, FaultOfRank, LateNode

_OF_RANKS: dict[str, Any] = {kind.__struct_config__.tag: kind for kind in get_args(FaultOfRank)}
_OF_NODES: dict[str, Any] = {kind.__struct_config__.tag: kind for kind in get_args(FaultOfNode)}
_NODE = "-node"
"""What the tags of faults of nodes end with; users write `node=` instead."""
_STRIKE_NODES = [tag.removesuffix(_NODE) for tag in _OF_NODES]
_EXAMPLE = "kill:rank=3@collective=9"
_EXAMPLES = {"rank": "1", "node": "1", "by": "5s", "bit": "0"}
_DURATIONS = ("by", "at", "back_after")
_OF_CHIPS = frozenset({"link", "pe", "times", "percent"})
Happening = tuple[str, dict[str, Any]]
"""What errors call it, and its fields."""


def read_faults(
    words: Sequence[str], size: int, label: str = "--faults", *, node_count: int = 1
) -> tuple[Fault, ...]:
    """Read all faults of ranks and nodes, each in the short form or as the name of a file.

    Args:
        words: as the user gives them.
        size: how many ranks there are.
        label: what the user calls the words.
        node_count: how many nodes there are.

    Raises:
        ConfigError: a word or a file cannot be read, or names a rank or a node that there is not;
            or one node is late twice.
    """
    late: set[int] = set()
    faults = tuple(
        _converted(called, happening)
        for called, happening in read_happenings(words, _OF_RANKS, _EXAMPLE, label)
        if not _is_of_chip(happening)
    )
    for fault in faults:
        if isinstance(fault, FaultOfNode):
            what, number, count = "node", fault.node, node_count
        else:
            what, number, count = "rank", fault.rank, size
        if not 0 <= number < count:
            raise ConfigError(f"{label} names {what} {number}, and {_told(what, count)}")
        if isinstance(fault, LateNode):
            if fault.node in late:
                raise ConfigError(f"{label} lets node {fault.node} be late twice, expected once")
            late.add(fault.node)
    return faults


def _told(what: str, count: int) -> str:
    return f"there are {what}s 0 to {count - 1}" if count > 1 else f"there is {what} 0 alone"


def read_chip_happenings(
    words: Sequence[str], label: str = "--faults", *, has_machine: bool
) -> list[Happening]:
    """What else the same words tell of: the faults of the machine of the ranks.

    Raises:
        ConfigError: a word or a file cannot be read; there is no machine, or none of the ranks'
            times depends on such a part.
    """
    chips = [
        each for each in read_happenings(words, _OF_RANKS, _EXAMPLE, label) if _is_of_chip(each[1])
    ]
    for called, happening in chips:
        if not has_machine:
            raise ConfigError(
                f"{called}: this is a fault of a chip, and these ranks have no machine",
                hint="--on sim:MACHINE has one, and so have rankwise sim run and sim bench",
            )
        if "host" in str(happening.get("link", "")):
            raise ConfigError(
                f"{called}: copies between host and device take no time with --on sim:MACHINE",
                hint="they do with rankwise sim run and rankwise sim bench",
            )
    return chips


def read_happenings(
    words: Sequence[str], kinds: Iterable[str], example: str, label: str = "--faults"
) -> list[Happening]:
    """What the words tell of, unchecked but for durations.

    Args:
        words: as the user gives them.
        kinds: what there is, for errors.
        example: one of them in the short form, likewise.
        label: what the user calls the words.

    Raises:
        ConfigError: a word or a file cannot be read.
    """
    found = []
    for word in words:
        is_file = os.path.exists(word) or word.endswith((".yaml", ".yml"))
        if is_file:
            tree = read_tree(word)
        else:
            tree = {"happenings": [_from_short_form(word, label, kinds, example)]}
        unknown = [key for key in tree if key != "happenings"]
        happenings = tree.get("happenings")
        if unknown or not isinstance(happenings, list):
            raise ConfigError(
                f"{label} {word}: expected a list of happenings"
                + (f", found {unknown[0]!r}" if unknown else "")
            )
        for number, happening in enumerate(happenings):
            called = f"{label} {word}" + (f": happenings[{number}]" if is_file else "")
            if not isinstance(happening, dict):
                raise ConfigError(f"{called}: {happening!r} is no fault: it has no what")
            _convert_durations(called, happening)
            found.append((called, happening))
    return found


def _is_of_chip(happening: dict[str, Any]) -> bool:
    return happening.get("what") == "jitter" or bool(happening.keys() & _OF_CHIPS)


def _converted(called: str, happening: dict[str, Any]) -> Fault:
    if "node" in happening and f"{happening.get('what')}{_NODE}" in _OF_NODES:
        happening["what"] += _NODE
    _convert_signal(called, happening)
    _check(called, happening)
    try:
        fault: Fault = msgspec.convert(happening, Fault, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{called}: {kinds_in_words(str(error))}", hint="docs/howto/faults.md lists the faults"
        ) from None
    return fault


def _from_short_form(word: str, label: str, kinds: Iterable[str], example: str) -> dict[str, Any]:
    """`late:rank=1,by=5s@collective=2` as the fields of a happening."""
    if not word.strip():
        raise ConfigError(f"{label} is empty, expected a fault, as in {example}")
    what, colon, rest = word.partition(":")
    fields: dict[str, Any] = {"what": what}
    rest, _, group = rest.replace("@", ",").partition("group=")  # the names of groups have commas
    if group:
        fields["group"] = group
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"{label} {word}: {part!r} is not a field, expected NAME=VALUE")
        if name in fields:
            raise ConfigError(f"{label} {word}: {name} is given twice", hint="give two faults")
        fields[name] = value
    if not colon:
        raise ConfigError(
            f"{label} {word}: there is no such file, nor is it a fault: expected one of"
            f" {', '.join(kinds)}, as in {example}"
        )
    if word.endswith("@"):
        raise ConfigError(f"{label} {word}: nothing follows @, expected @collective=N")
    return fields


def _check(called: str, fields: dict[str, Any]) -> None:
    """Refuse what is no fault in words that fit the short form."""
    what = str(fields.get("what", ""))
    kind = _OF_RANKS.get(what) or _OF_NODES.get(what)
    if kind is None:
        raise ConfigError(
            f"{called}: there is no fault {what!r}", hint=hint_on_name(what, _OF_RANKS)
        )
    if what in _OF_NODES:
        what = f"{what.removesuffix(_NODE)} of a node"
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    of_node = _OF_NODES.get(f"{what}{_NODE}")
    if of_node is not None and not fields.keys() & {"rank", "node"}:
        known |= {field.name: field for field in msgspec.structs.fields(of_node)}
    for name, value in fields.items():
        if name == "what":
            continue
        if name not in known:
            hint = f"only {' and '.join(_STRIKE_NODES)} strike nodes" if name == "node" else None
            raise ConfigError(
                f"{called}: {what} has no {name!r}", hint=hint or hint_on_name(name, known)
            )
        is_number = known[name].type in (int, int | None)
        if is_number and not str(value).lstrip("-").isdecimal():
            raise ConfigError(f"{called}: {name} is {value!r}, expected a whole number")
    missing = [name for name, field in known.items() if field.required and name not in fields]
    if {"rank", "node"} <= set(missing):
        missing = ["rank", *(name for name in missing if name not in ("rank", "node"))]
        needed = ["rank or node", *missing[1:]]
    else:
        needed = missing
    if missing:
        place = "node" if fields["what"] in _OF_NODES else "rank"
        example = ",".join(f"{name}={_EXAMPLES[name]}" for name in dict.fromkeys([place, *missing]))
        raise ConfigError(
            f"{called}: {what} needs {' and '.join(needed)}",
            hint=f"as in {fields['what'].removesuffix(_NODE)}:{example}",
        )


def _convert_signal(called: str, happening: dict[str, Any]) -> None:
    name = happening.get("signal")
    if not isinstance(name, str) or name.isdecimal():
        return
    try:
        happening["signal"] = int(Signals[name])
    except KeyError:
        raise ConfigError(
            f"{called}: signal is {name!r}, expected a number, or a name such as SIGTERM"
        ) from None


def _convert_durations(called: str, happening: dict[str, Any]) -> None:
    for name in _DURATIONS:
        if name not in happening:
            continue
        duration = parse_duration(str(happening[name]))
        if duration is None:
            is_negative = parse_duration(str(happening[name]).strip().removeprefix("-")) is not None
            expected = "0 s or more" if is_negative else "a duration with its unit, as 5s or 200ms"
            raise ConfigError(f"{called}: {name} is {happening[name]!r}, expected {expected}")
        happening[name] = duration
