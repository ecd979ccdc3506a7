"""A comparison of two runs for a terminal."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from textwrap import wrap

from rankwise.base.units import format_bytes
from rankwise.base.wording import aligned
from rankwise.sim.hardware.quantities import format_picoseconds
from rankwise.sim.reporting.comparison import Comparison, ComparisonRow, percent, short

RANKS_SHOWN = 16
_LEAST = 0.0005
"""Rows below this share of the time in both runs are told together."""
_NOTABLE = 0.005
_LEAST_SHOWN = Fraction(1)
"""Of a picosecond: means over ranks may differ by less."""
_INDENT = "  "


def as_text(comparison: Comparison, width: int | None = None) -> str:
    """The headline, the parts, the ranks and the notes; folded to a width if it is given."""
    rows = [_head(comparison), *_part_rows(comparison), _total(comparison)]
    if comparison.first.peak_memory and comparison.second.peak_memory:
        rows.append(_memory(comparison))
    lines = [*_folded(comparison.headline(), width), ""]
    lines += aligned(rows, texts=1)
    ranks = rank_rows(comparison)
    if len(ranks) > 1:
        left_out = len(comparison.ranks) - RANKS_SHOWN
        lines += ["", *aligned(ranks, texts=0)]
        if left_out > 0:
            lines.append(f"{left_out:,} more ranks: --json and --report have them")
    if comparison.notes:
        lines.append("")
    for note in comparison.notes:
        lines += _folded(f"note: {note}", width)
    return "\n".join(lines)


def _head(comparison: Comparison) -> Sequence[str]:
    per = "mean per step" if comparison.first.steps and comparison.second.steps else "mean of ranks"
    return (per, *comparison.names, "difference", "share")


def _part_rows(comparison: Comparison) -> Iterable[Sequence[str]]:
    kinds = comparison.by_kind()
    for cause in comparison.by_cause():
        of_cause = [row for row in kinds if row.cause == cause.cause]
        only = f": {of_cause[0].kind}" if len(of_cause) == 1 else ""
        yield _cells(comparison, cause.cause + only, cause)
        small = [row for row in of_cause if _is_small(comparison, row)]
        for row in of_cause:
            if row in small and len(small) > 1:
                continue
            if not only:
                yield _cells(comparison, _INDENT + row.kind, row)
            phases = [
                each
                for each in comparison.rows
                if (each.cause, each.kind) == (row.cause, row.kind)
                and abs(comparison.share(each.difference)) >= _NOTABLE
            ]
            if len(phases) > 1:
                for each in phases:
                    yield _cells(comparison, _INDENT * 2 + each.phase, each)
        if len(small) > 1:
            first, second = sum(row.first for row in small), sum(row.second for row in small)
            rest = ComparisonRow(cause.cause, "", "", Fraction(first), Fraction(second))
            yield _cells(comparison, f"{_INDENT}{len(small)} smaller ones", rest)


def _is_small(comparison: Comparison, row: ComparisonRow) -> bool:
    least = _LEAST * comparison.first.time
    return row.first < least and row.second < least


def _cells(comparison: Comparison, name: str, row: ComparisonRow) -> Sequence[str]:
    return (
        name,
        time_in_words(row.first),
        time_in_words(row.second),
        difference_in_words(row.difference),
        share_in_words(comparison, row),
    )


def _total(comparison: Comparison) -> Sequence[str]:
    first, second = comparison.times
    return _cells(comparison, "whole", ComparisonRow("", "", "", first, second))


def _memory(comparison: Comparison) -> Sequence[str]:
    first, second = comparison.first.peak_memory, comparison.second.peak_memory
    more = second - first
    sign = "-" if more < 0 else "+"
    return (
        "peak memory",
        format_bytes(first),
        format_bytes(second),
        f"{sign}{format_bytes(abs(more))}" if more else "",
        percent(more / first, "+") if more else "",
    )


def rank_rows(comparison: Comparison, shown: int = RANKS_SHOWN) -> list[Sequence[str]]:
    """What each rank takes by cause, after a head."""
    if not comparison.ranks:
        return []
    causes = [
        cause
        for cause in comparison.causes
        if any(cause in row.first or cause in row.second for row in comparison.ranks)
    ]
    rows: list[Sequence[str]] = [("rank", *(f"{short(cause)}, A → B" for cause in causes))]
    rows += [
        (
            str(row.rank),
            *(
                f"{time_in_words(row.first.get(cause, Fraction(0)))} → "
                f"{time_in_words(row.second.get(cause, Fraction(0)))}"
                for cause in causes
            ),
        )
        for row in comparison.ranks[:shown]
    ]
    return rows


def time_in_words(time: Fraction) -> str:
    """A time; a dash for none."""
    if abs(time) < _LEAST_SHOWN:
        return "-"
    sign = "-" if time < 0 else ""
    return f"{sign}{format_picoseconds(round(abs(time)))}"


def difference_in_words(time: Fraction) -> str:
    """A difference with its sign; nothing for none."""
    if abs(time) < _LEAST_SHOWN:
        return ""
    return f"{'-' if time < 0 else '+'}{format_picoseconds(round(abs(time)))}"


def share_in_words(comparison: Comparison, row: ComparisonRow) -> str:
    """A difference as a share of the first run's time; nothing for none."""
    is_none = abs(row.difference) < _LEAST_SHOWN
    return "" if is_none else percent(comparison.share(row.difference), "+")


def _folded(text: str, width: int | None) -> list[str]:
    return [text] if width is None else wrap(text, max(width, 20), subsequent_indent="  ")
