"""Where the time of a run went, as a value: for each rank, parts that add up to the whole.

A prediction, a simulation of chips and a journal of processes are all divided in this way, so that
any two can be compared (`comparison`). The value travels inside of what runs leave: the field
`breakdown` of the file of `--prediction`, and a `<meta>` of the pages of `--report`.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from html import escape, unescape
from typing import Any

import msgspec

from rankwise.base.errors import ConfigError

COMPUTE, EXPOSED, WAITING = "compute", "exposed communication", "waiting for others"
HOST, ASLEEP, IDLE = "host", "asleep", "idle"
CAUSES = (COMPUTE, EXPOSED, WAITING, HOST, ASLEEP, IDLE)
"""In the order in which they are shown."""
NOTHING = "nothing to do"
"""What is idle time that nothing else explains: the end of a rank before that of the last one."""
MESSAGES = "messages"
IMBALANCE, BUBBLE = "imbalance of ranks", "pipeline bubble"
"""Waiting until a collective begins, and until a message between ranks does."""

_META = "rankwise-breakdown"


class BreakdownPart(msgspec.Struct, frozen=True, order=True):
    """Time of one rank that went into one thing.

    Attributes:
        cause: one of `CAUSES`.
        kind: the class of operations, the collective, or what else it was.
        phase: `forward`, `backward` or `optimizer`; empty if that is not known.
        time_ps: picoseconds, of all steps together.
    """

    cause: str
    kind: str
    phase: str
    time_ps: int


class RankParts(msgspec.Struct, frozen=True):
    """What one rank spent its time with; `weight` is for how many ranks it stands."""

    rank: int
    parts: tuple[BreakdownPart, ...]
    weight: float = 1.0


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a run went.

    Attributes:
        program: what ran.
        machine: on what.
        size: how many ranks the run had.
        whole_ps: how long it took: all steps that count, or the whole run.
        steps: how many steps these are; 0 if it is the whole run.
        ranks: of each rank that is known, parts that add up to `whole_ps`.
        peak_memory: of the fullest device, in bytes; 0 if that is not known.
        remarks: what the figures leave out.
    """

    program: str
    machine: str
    size: int
    whole_ps: int
    steps: int
    ranks: tuple[RankParts, ...]
    peak_memory: int = 0
    remarks: tuple[str, ...] = ()

    @property
    def time(self) -> Fraction:
        """Picoseconds of a step, or of the run."""
        return Fraction(self.whole_ps, max(1, self.steps))

    def of_rank(self, ranks: RankParts) -> dict[tuple[str, str, str], Fraction]:
        """What a rank spent on each cause, kind and phase, in picoseconds of a step."""
        found: dict[tuple[str, str, str], Fraction] = {}
        for part in ranks.parts:
            key = (part.cause, part.kind, part.phase)
            found[key] = found.get(key, Fraction(0)) + Fraction(part.time_ps, max(1, self.steps))
        return found

    def means(self) -> dict[tuple[str, str, str], Fraction]:
        """The same as a mean over all ranks of the run: what adds up to `time`."""
        found: dict[tuple[str, str, str], Fraction] = {}
        weights = [Fraction(each.weight) for each in self.ranks]
        for each, weight in zip(self.ranks, weights, strict=True):
            for key, time in self.of_rank(each).items():
                found[key] = found.get(key, Fraction(0)) + time * weight / sum(weights)
        return found


def parts_of(spent: Mapping[tuple[str, str, str], int], whole_ps: int) -> tuple[BreakdownPart, ...]:
    """Parts that add up to the whole: what is missing is idle.

    It is less than nothing if side streams ran on for longer at the begin than at the end.
    """
    left = whole_ps - sum(spent.values())
    filled = {**spent}
    if left:
        key = (IDLE, NOTHING, "")
        filled[key] = filled.get(key, 0) + left
    return tuple(BreakdownPart(*key, time) for key, time in sorted(filled.items()) if time)


def as_meta(breakdown: Breakdown) -> str:
    """A breakdown for the head of a page; browsers do not show it."""
    text = msgspec.json.encode(breakdown).decode()
    return f'<meta name="{_META}" content="{escape(text)}">'


def from_page(text: str, path: str) -> Breakdown:
    """The breakdown in a page of `--report`.

    Raises:
        ConfigError: it has none.
    """
    _, found, rest = text.partition(f'<meta name="{_META}" content="')
    if not found:
        raise ConfigError(
            f"{path} is an HTML page without a breakdown, expected a page of --report of a "
            "simulated run",
            hint="pages of older versions have none, and those of processes have none: give the "
            "journal",
        )
    return from_json(unescape(rest.partition('"')[0]), path)


def from_document(document: Mapping[str, Any], path: str) -> Breakdown:
    """The breakdown in a file of `--prediction`.

    Raises:
        ConfigError: it has none.
    """
    if "breakdown" not in document:
        raise ConfigError(
            f"{path} has no field 'breakdown', expected a file of --prediction",
            hint="files of older versions have none: predict again",
        )
    return from_json(msgspec.json.encode(document["breakdown"]), path)


def from_json(text: str | bytes, path: str) -> Breakdown:
    """Read a breakdown.

    Raises:
        ConfigError: it is none, or its parts do not add up.
    """
    try:
        found = msgspec.json.decode(text, type=Breakdown)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the breakdown in {path} cannot be read: {error}") from None
    for each in found.ranks:
        if sum(part.time_ps for part in each.parts) != found.whole_ps:
            raise ConfigError(
                f"the breakdown in {path} is damaged: the parts of rank {each.rank} do not add up"
            )
    if not found.ranks or found.whole_ps <= 0 or min(each.weight for each in found.ranks) <= 0:
        raise ConfigError(f"{path} tells of a run in which no rank took any time")
    return found


def causes_in_order(causes: Iterable[str]) -> list[str]:
    """Causes as they are shown; others come last."""
    known = {cause: place for place, cause in enumerate(CAUSES)}
    return sorted(set(causes), key=lambda cause: (known.get(cause, len(known)), cause))
