"""Two runs side by side, and where the difference between them comes from.

A comparison is computed once, as a value; text, JSON and the page only show it. Times are exact
fractions of picoseconds, per step where both runs have steps. A row is a cause, a kind and a phase;
its times are means over the ranks of each run. Since the parts of each rank add up to the whole,
the rows add up to the difference. A row of one run alone is zero in the other one.

Ranks are aligned by their numbers. If the worlds differ in size, or ranks are known of one run
alone, the table has those that both have, and a note says what is missing.
"""

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, NamedTuple

from rankwise.base.wording import counted, ranks_in_words
from rankwise.sim.hardware.quantities import format_picoseconds
from rankwise.sim.reporting.breakdown import (
    BUBBLE,
    EXPOSED,
    HOST,
    IDLE,
    IMBALANCE,
    WAITING,
    Breakdown,
    causes_in_order,
)

_NOTABLE = 0.005
"""A row that changes the time by less than this share is left out of the headline."""
_NAMED = 4
"""So many rows the headline has at most."""


class ComparisonRow(NamedTuple):
    """What one thing takes in both runs, in picoseconds; means over the ranks."""

    cause: str
    kind: str
    phase: str
    first: Fraction
    second: Fraction

    @property
    def difference(self) -> Fraction:
        """What the second run takes more."""
        return self.second - self.first


class RankRow(NamedTuple):
    """One rank in both runs: its time by cause."""

    rank: int
    first: dict[str, Fraction]
    second: dict[str, Fraction]


class Comparison(NamedTuple):
    """Two runs.

    Attributes:
        names: what the user calls them.
        rows: what the time of both went into, in order; they add up.
        ranks: of ranks that are known in both.
        notes: what does not fit together.
    """

    names: tuple[str, str]
    first: Breakdown
    second: Breakdown
    rows: tuple[ComparisonRow, ...]
    ranks: tuple[RankRow, ...]
    notes: tuple[str, ...]

    @property
    def times(self) -> tuple[Fraction, Fraction]:
        """Of a step, or the run, in picoseconds."""
        return self.first.time, self.second.time

    @property
    def difference(self) -> Fraction:
        """What the second run takes more, in picoseconds."""
        return self.second.time - self.first.time

    def share(self, difference: Fraction) -> float:
        """A difference as a share of the first run's time."""
        return float(difference / self.first.time)

    def by_cause(self) -> list[ComparisonRow]:
        """The rows of each cause together."""
        return _sums(self.rows, lambda row: (row.cause, "", ""))

    def by_kind(self) -> list[ComparisonRow]:
        """The rows of each kind together, over its phases."""
        return _sums(self.rows, lambda row: (row.cause, row.kind, ""))

    @property
    def causes(self) -> list[str]:
        """The causes of any row, in order."""
        return causes_in_order(row.cause for row in self.rows)

    def headline(self) -> str:
        """One sentence: which run is faster, by how much, and what makes the difference."""
        name, share = self.names[1], self.share(self.difference)
        if abs(share) < _NOTABLE / 5:
            begin = f"{name} is as fast as {self.names[0]}"
        elif share > 1:
            begin = f"{name} takes {share + 1:.3g} times as long"
        else:
            begin = f"{name} is {percent(abs(share))} {'slower' if share > 0 else 'faster'}"
        changed = sorted(self.by_kind(), key=lambda row: -abs(row.difference))
        told = [row for row in changed if abs(self.share(row.difference)) >= _NOTABLE][:_NAMED]
        whats = [
            f"{self._amount(row.difference, is_percent=share <= 1)} "
            f"{'more' if row.difference > 0 else 'less'} {kind_in_words(row.cause, row.kind)}"
            for row in told
        ]
        return f"{begin}{': ' if whats else ''}{', '.join(whats)}"

    def _amount(self, difference: Fraction, *, is_percent: bool) -> str:
        """As a share of the first run, as the whole is told; a time where shares are over one."""
        if is_percent:
            return percent(abs(self.share(difference)))
        return format_picoseconds(round(abs(difference)))

    def as_document(self) -> dict[str, Any]:
        """The comparison for other programs; times in seconds."""
        return {
            "headline": self.headline(),
            "runs": [
                {
                    "name": name,
                    "program": run.program,
                    "machine": run.machine,
                    "ranks": run.size,
                    "steps": run.steps,
                    "time_s": seconds(run.time),
                    "peak_memory_bytes": run.peak_memory or None,
                    "remarks": list(run.remarks),
                }
                for name, run in zip(self.names, (self.first, self.second), strict=True)
            ],
            "difference_s": seconds(self.difference),
            "share": self.share(self.difference),
            "parts": [
                {
                    "cause": row.cause,
                    "kind": row.kind,
                    "phase": row.phase,
                    "first_s": seconds(row.first),
                    "second_s": seconds(row.second),
                    "difference_s": seconds(row.difference),
                    "share": self.share(row.difference),
                }
                for row in self.rows
            ],
            "ranks": [
                {
                    "rank": row.rank,
                    "first_s": {cause: seconds(time) for cause, time in row.first.items()},
                    "second_s": {cause: seconds(time) for cause, time in row.second.items()},
                }
                for row in self.ranks
            ],
            "notes": list(self.notes),
        }

    def _repr_html_(self) -> str:
        from rankwise.sim.reporting.comparison_page import in_notebook  # noqa: PLC0415  # it draws

        return in_notebook(self)


def compare(
    first: Breakdown, second: Breakdown, names: tuple[str, str], about: Iterable[str] = ()
) -> Comparison:
    """Set two runs side by side; `about` are notes that come first."""
    means = first.means(), second.means()
    keys = sorted({*means[0], *means[1]})
    nothing = Fraction(0)
    rows = [
        ComparisonRow(*key, means[0].get(key, nothing), means[1].get(key, nothing)) for key in keys
    ]
    places = {
        cause: place for place, cause in enumerate(causes_in_order(row.cause for row in rows))
    }
    rows.sort(key=lambda row: (places[row.cause], -max(row.first, row.second), row.kind, row.phase))
    mine, its = ({each.rank: each for each in run.ranks} for run in (first, second))
    return Comparison(
        names,
        first,
        second,
        tuple(rows),
        tuple(
            RankRow(
                rank, _by_cause(first.of_rank(mine[rank])), _by_cause(second.of_rank(its[rank]))
            )
            for rank in sorted(mine.keys() & its.keys())
        ),
        (*about, *_notes(first, second, names)),
    )


def kind_in_words(cause: str, kind: str) -> str:
    """A kind where its cause is not beside it: `exposed all_reduce`, `waiting for all_reduce`."""
    if cause == EXPOSED:
        return f"exposed {kind}"
    if cause == WAITING:
        return kind if kind in {BUBBLE, IMBALANCE} else f"waiting for {kind}"
    if cause == IDLE:
        return "idle time"
    return kind


def percent(share: float, sign: str = "") -> str:
    """A share in words, with its sign if that is wanted (`+`)."""
    return f"{100 * share:{sign}.1f} %"


def seconds(time: Fraction) -> float:
    """Picoseconds as seconds."""
    return float(time / 10**12)


def _notes(first: Breakdown, second: Breakdown, names: tuple[str, str]) -> Iterable[str]:
    if first.program != second.program:
        yield f"the programs differ: {first.program or '?'} and {second.program or '?'}"
    if first.machine != second.machine:
        yield f"the machines differ: {first.machine} and {second.machine}"
    if first.size != second.size:
        yield f"the runs have {first.size:,} and {second.size:,} ranks; times are means over each"
    if bool(first.steps) != bool(second.steps):
        whole, steps = names if second.steps else names[::-1]
        yield f"{whole} is a whole run, {steps} is a step: the times are not of the same work"
    mine, its = ({each.rank for each in run.ranks} for run in (first, second))
    if mine != its:
        both = counted(len(mine & its))
        yield (
            f"{both} can be compared by number; {names[0]} has {ranks_in_words(mine)}, "
            f"{names[1]} {ranks_in_words(its)}"
        )
    for name, run in zip(names, (first, second), strict=True):
        for remark in run.remarks:
            yield f"{name}: {remark}"


def _by_cause(spent: dict[tuple[str, str, str], Fraction]) -> dict[str, Fraction]:
    found: dict[str, Fraction] = {}
    for (cause, _, _), time in spent.items():
        found[cause] = found.get(cause, Fraction(0)) + time
    return {cause: found[cause] for cause in causes_in_order(found)}


def _sums(
    rows: Iterable[ComparisonRow], key_of: Callable[[ComparisonRow], tuple[str, str, str]]
) -> list[ComparisonRow]:
    found: dict[tuple[str, str, str], ComparisonRow] = {}
    for row in rows:
        key = key_of(row)
        known = found.get(key) or ComparisonRow(key[0], key[1], key[2], Fraction(0), Fraction(0))
        found[key] = known._replace(first=known.first + row.first, second=known.second + row.second)
    return list(found.values())


_SHORT = {EXPOSED: "exposed", WAITING: "waiting", HOST: "host"}


def short(cause: str) -> str:
    """A cause as the head of a column."""
    return _SHORT.get(cause, cause)
