"""Reads faults: `kill:rank=3@collective=9`, or a file with a list of them.

One language for all simulations. A fault is its word in `what` and its fields; in the short form
they are written in a line. Durations have their unit. The target of a fault shows in the part that
it names: `kill:rank=3`, `kill:node=1`, `kill:link=sip0-sip1`. Each simulation takes some of them:

=================================== =============================================================
`rankwise run --on sim`             those of ranks and nodes
`rankwise run --on sim:MACHINE`     those of chips too
`rankwise sim run`, `sim bench`     those of chips
`rankwise sim cluster`              those of clusters; nodes are killed and late by the same words
=================================== =============================================================

All others are refused with what takes them.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from signal import Signals
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.suggestions import hint_on_name
from rankwise.base.units import Duration, Instant, parse_duration
from rankwise.sim.faults.vocabulary import (
    FAULTS,
    Fault,
    FaultOfChip,
    FaultOfNode,
    FaultOfRank,
    LateNode,
    Target,
)

RANKS_AND_NODES = (Target.RANK, Target.NODE)
CHIPS = (Target.CHIP,)
CLUSTER = (Target.CLUSTER,)

_WORDS_SHOWN_MAX = 8  # so that the message has two lines

_TAKEN_BY = {
    Target.RANK: "rankwise run --on sim takes it",
    Target.NODE: "rankwise run --on sim takes it",
    Target.CHIP: "--on sim:MACHINE has one, and so have rankwise sim run and sim bench",
    Target.CLUSTER: "rankwise sim cluster takes it",
}
_NAMES = {
    Target.CHIP: {"link", "pe", "times", "percent"},
    Target.NODE: {"node"},
    Target.RANK: {"rank"},
}
"""What a fault names, and so strikes."""
_EXAMPLES = {
    Target.RANK: "kill:rank=3@collective=9",
    Target.NODE: "kill:node=1@collective=9",
    Target.CHIP: "slow:link=sip0-sip1,times=4",
    Target.CLUSTER: "kill:node=1,at=15s",
}
_VALUES = {
    "nodes": "0+1",
    "at": "10s",
    "by": "5s",
    "lasts": "5s",
    "takes": "100ms",
    "bit": "0",
}
"""Of fields that a fault may need, for examples."""
_TIMES = (Duration, Instant)
_LISTS = ("faults", "happenings")
"""What a file calls its list of faults; the second is the older word."""


Named = tuple[str, Fault]
"""What errors call it, and a fault."""


class FaultsOfRun(NamedTuple):
    """The faults of `rankwise run --on sim`.

    Attributes:
        faults: of ranks and nodes.
        of_chips: of the machine, which checks them.
    """

    faults: tuple[FaultOfRank | FaultOfNode, ...]
    of_chips: tuple[tuple[str, FaultOfChip], ...]


def read_faults(
    words: Sequence[str], taken: Sequence[Target], label: str = "--faults"
) -> list[Named]:
    """Read faults, each in the short form or as the name of a file.

    Args:
        words: as the user gives them.
        taken: what can be struck.
        label: what the user calls the words.

    Raises:
        ConfigError: a word or a file cannot be read, or names a fault that is not taken here.
    """
    found = []
    for word in words:
        if is_file(word):
            from rankwise.sim.files import read_fields  # noqa: PLC0415  # which needs YAML

            tree = read_fields(word, "the plan")
            unknown = [key for key in tree if key not in _LISTS]
            if unknown or not tree:
                raise ConfigError(
                    f"{label} {word}: expected a list of faults"
                    + (f", found {unknown[0]!r}" if unknown else "")
                )
            found += listed_faults(tree, f"{label} {word}", taken)
        else:
            fields = _from_short_form(word, label, taken)
            found.append(_read(f"{label} {word}", fields, taken))
    return found


def is_file(word: str) -> bool:
    """Whether a word is the name of a file, be it there or not."""
    exists = os.path.exists(word)  # noqa: PTH110  # launching does without pathlib
    return exists or word.endswith((".yaml", ".yml"))


def listed_faults(tree: dict[str, Any], called: str, taken: Sequence[Target]) -> list[Named]:
    """Take the list of faults out of what a file says, and read it.

    Raises:
        ConfigError: it is none.
    """
    given = [name for name in _LISTS if name in tree]
    if len(given) > 1:
        raise ConfigError(f"{called}: faults and happenings are two words for one list")
    if not given:
        return []
    name = given[0]
    faults = tree.pop(name)
    if not isinstance(faults, list):
        raise ConfigError(f"{called}: {name} is {faults!r}, expected a list of faults")
    found = []
    for number, fields in enumerate(faults):
        place = f"{called}: {name}[{number}]"
        if not isinstance(fields, dict):
            raise ConfigError(f"{place}: {fields!r} is not a fault: the key what is missing")
        found.append(_read(place, fields, taken))
    return found


def read_faults_of_run(
    words: Sequence[str],
    size: int,
    label: str = "--faults",
    *,
    node_count: int = 1,
    has_machine: bool = False,
) -> FaultsOfRun:
    """Read the faults of a run of simulated ranks.

    Args:
        words: as the user gives them.
        size: how many ranks there are.
        label: what the user calls the words.
        node_count: how many nodes there are.
        has_machine: whether ranks are predicted on a machine.

    Raises:
        ConfigError: see `read_faults`; or a fault names a rank or a node that there is not, or one
            node is late twice, or no time of these ranks depends on such a part.
    """
    taken = (*RANKS_AND_NODES, *CHIPS) if has_machine else RANKS_AND_NODES
    faults: list[FaultOfRank | FaultOfNode] = []
    of_chips: list[tuple[str, FaultOfChip]] = []
    for called, fault in read_faults(words, taken, label):
        if isinstance(fault, FaultOfChip):
            if "host" in str(getattr(fault, "link", "")):
                raise ConfigError(
                    f"{called}: copies between host and device take no time with --on sim:MACHINE",
                    hint="they do with rankwise sim run and rankwise sim bench",
                )
            of_chips.append((called, fault))
        elif isinstance(fault, FaultOfRank | FaultOfNode):
            faults.append(fault)
    _check_numbers(faults, size, node_count, label)
    return FaultsOfRun(tuple(faults), tuple(of_chips))


def read_chip_faults(words: Sequence[str]) -> tuple[tuple[str, FaultOfChip], ...]:
    """Read the faults of a machine, with what errors call each.

    Raises:
        ConfigError: see `read_faults`.
    """
    named = read_faults(words, CHIPS)
    return tuple((called, fault) for called, fault in named if isinstance(fault, FaultOfChip))


def _check_numbers(
    faults: Iterable[FaultOfRank | FaultOfNode], size: int, node_count: int, label: str
) -> None:
    late: set[int] = set()
    for fault in faults:
        if isinstance(fault, FaultOfNode):
            what, number, count = "node", fault.node, node_count
        else:
            what, number, count = "rank", fault.rank, size
        if not 0 <= number < count:
            there = f"are {what}s 0 to {count - 1}" if count > 1 else f"is {what} 0 alone"
            raise ConfigError(f"{label} names {what} {number}, and there {there}")
        if isinstance(fault, LateNode):
            if fault.node in late:
                raise ConfigError(f"{label} lets node {fault.node} be late twice, expected once")
            late.add(fault.node)


def _from_short_form(word: str, label: str, taken: Sequence[Target]) -> dict[str, Any]:
    """`late:rank=1,by=5s@collective=2` as the fields of a fault."""
    example = _EXAMPLES[taken[0]]
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
        fields[name] = value.split("+") if name == "nodes" else value
    if not colon:
        known = _words_of(taken)
        more = ", ..." if len(known) > _WORDS_SHOWN_MAX else ""
        raise ConfigError(
            f"{label} {word}: neither a file nor a fault; expected one of"
            f" {', '.join(known[:_WORDS_SHOWN_MAX])}{more}, as in {example}"
        )
    if word.endswith("@"):
        raise ConfigError(f"{label} {word}: nothing follows @, expected @collective=N")
    return fields


def _words_of(taken: Sequence[Target]) -> list[str]:
    return list(dict.fromkeys(what for target in taken for what in FAULTS[target]))


def _read(called: str, fields: dict[str, Any], taken: Sequence[Target]) -> Named:
    """Check the fields of a fault against what it strikes, and make it."""
    what = str(fields.get("what", ""))
    target = _target_of(what, fields, taken)
    if target is None:
        known = _words_of(taken)
        raise ConfigError(f"{called}: there is no fault {what!r}", hint=hint_on_name(what, known))
    if target not in taken:
        here = "here only " + " and ".join(f"{each}s" for each in taken) + " have faults"
        if target is Target.CHIP and Target.RANK in taken:
            here = "these ranks have no machine"
        raise ConfigError(
            f"{called}: this is a fault of a {target}, and {here}", hint=_TAKEN_BY[target]
        )
    kind = FAULTS[target][what]
    given = {name: value for name, value in fields.items() if name != "what"}
    shown = f"{what} of a {target}" if target in (Target.NODE, Target.CHIP) else what
    _check_names(called, shown, given, what, target)
    values = {
        field.name: _value(called, field.name, given[field.name], field.type)
        for field in msgspec.structs.fields(kind)
        if field.name in given
    }
    try:
        return called, msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        from rankwise.sim.config_errors import mistake_in  # noqa: PLC0415  # only for mistakes

        mistake = mistake_in(error, kind, values)
        hint = "docs/howto/faults.md lists the faults"
        raise ConfigError(f"{called}: {mistake.describe}", hint=hint) from None


def _target_of(what: str, fields: Mapping[str, Any], taken: Sequence[Target]) -> Target | None:
    """What a fault strikes: the part that it names, or else what can be struck here."""
    able = [target for target in (*taken, *Target) if what in FAULTS[target]]
    named = next((target for target, names in _NAMES.items() if fields.keys() & names), None)
    if Target.CLUSTER in taken and named is Target.NODE and Target.CLUSTER in able:
        return Target.CLUSTER
    return named if named in able else able[0] if able else None


def _check_names(
    called: str, shown: str, given: Mapping[str, Any], what: str, target: Target
) -> None:
    """Refuse fields that the fault has not, and ask for those that it needs."""
    fields = {field.name: field for field in msgspec.structs.fields(FAULTS[target][what])}
    known = set(fields)
    names_node = target is Target.RANK and what in FAULTS[Target.NODE] and "rank" not in given
    if names_node:
        known |= {field.name for field in msgspec.structs.fields(FAULTS[Target.NODE][what])}
    for name in given:
        if name not in known:
            hint = hint_on_name(str(name), sorted(known))
            if name == "node" and target is Target.RANK:
                hint = f"only {' and '.join(FAULTS[Target.NODE])} strike nodes"
            raise ConfigError(f"{called}: {shown} has no {name!r}", hint=hint)
    missing = [name for name, field in fields.items() if field.required and name not in given]
    if not missing:
        return
    needed = ["rank or node" if names_node and name == "rank" else name for name in missing]
    part = {Target.RANK: ["rank"], Target.NODE: ["node"]}.get(target, [])
    values = ",".join(f"{name}={_VALUES.get(name, 1)}" for name in dict.fromkeys([*part, *missing]))
    example = _EXAMPLES[target] if target is Target.CHIP else f"{what}:{values}"
    raise ConfigError(f"{called}: {shown} needs {' and '.join(needed)}", hint=f"as in {example}")


def _value(called: str, name: str, value: Any, kind: Any) -> Any:
    """A value of the short form or of a file as its field takes it."""
    kinds = (kind,) if get_origin(kind) is tuple else get_args(kind) or (kind,)
    if value is None and NoneType in kinds:
        return None
    if any(each in _TIMES for each in kinds):
        return _duration(called, name, value)
    return _signal(called, value) if name == "signal" else value


def _signal(called: str, value: Any) -> Any:
    if not isinstance(value, str) or value.isdecimal():
        return value
    try:
        return int(Signals[value])
    except KeyError:
        raise ConfigError(
            f"{called}: signal is {value!r}, expected a number, or a name such as SIGTERM"
        ) from None


def _duration(called: str, name: str, value: Any) -> Duration:
    duration = parse_duration(str(value))
    if duration is None:
        is_negative = parse_duration(str(value).strip().removeprefix("-")) is not None
        expected = "0 s or more" if is_negative else "a duration with its unit, as 5s or 200ms"
        raise ConfigError(f"{called}: {name} is {value!r}, expected {expected}")
    return duration
