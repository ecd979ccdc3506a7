"""A comparison of two runs as one self-contained HTML page."""

from collections.abc import Mapping
from fractions import Fraction
from html import escape

from rankwise.base.plots import COLOURS, Bar, bars_chart
from rankwise.base.units import format_bytes
from rankwise.base.web_page import document, fragment, table
from rankwise.sim.reporting.breakdown import CAUSES, Breakdown
from rankwise.sim.reporting.comparison import Comparison, ComparisonRow, kind_in_words, seconds
from rankwise.sim.reporting.comparison_text import (
    RANKS_SHOWN,
    difference_in_words,
    rank_rows,
    share_in_words,
    time_in_words,
)

_MORE, _LESS = COLOURS[3], COLOURS[2]
_BARS_SHOWN = 16
_RANKS_IN_TABLE = 256


def comparison_page(comparison: Comparison) -> str:
    """The page."""
    sections = [
        f"<h1>{escape(' and '.join(comparison.names))}</h1>",
        f'<p class="about">{escape(comparison.headline())}.</p>',
        *(f'<p class="note">Note: {escape(note)}.</p>' for note in comparison.notes),
        *_whole(comparison),
        "<h2>Where the difference comes from</h2>",
        (
            '<p class="note">What the second run takes more or less, per kind of operation: means '
            "over the ranks. All rows of the table below add up to the difference.</p>"
        ),
        f'<div class="scroll">{_differences(comparison)}</div>',
        "<h2>Parts</h2>",
        _parts(comparison),
    ]
    if comparison.ranks:
        sections += [
            "<h2>Ranks</h2>",
            f'<div class="scroll">{_rank_bars(comparison)}</div><p></p>',
            table(rank_rows(comparison, _RANKS_IN_TABLE)),
        ]
    return document(f"{' and '.join(comparison.names)}: comparison", sections)


def in_notebook(comparison: Comparison) -> str:
    """The headline, the bars and the parts, for a cell of a notebook."""
    return fragment(
        [
            f"<p>{escape(comparison.headline())}</p>",
            _differences(comparison),
            _parts(comparison),
        ]
    )


def _whole(comparison: Comparison) -> list[str]:
    first, second = comparison.first, comparison.second
    rows: list[tuple[str, ...]] = [("", *comparison.names)]
    for name, cells in (
        ("program", (first.program, second.program)),
        ("machine", (first.machine, second.machine)),
        ("ranks", (f"{first.size:,}", f"{second.size:,}")),
        ("time", tuple(_describe_time(run) for run in (first, second))),
        ("peak memory", tuple(_describe_memory(run) for run in (first, second))),
    ):
        if any(cells):
            rows.append((name, *cells))
    bars = [
        _stacked(name, {row.cause: getattr(row, which) for row in comparison.by_cause()})
        for name, which in zip(comparison.names, ("first", "second"), strict=True)
    ]
    chart = bars_chart(bars, "Where the time of both runs went", _legend(comparison.causes))
    return [
        "<h2>Side by side</h2>",
        table(rows),
        f'<p></p><div class="scroll">{chart}</div>',
    ]


def _describe_time(run: Breakdown) -> str:
    of = f"per step, mean of {run.steps}" if run.steps else "the whole run"
    return f"{time_in_words(run.time)}, {of}"


def _describe_memory(run: Breakdown) -> str:
    return format_bytes(run.peak_memory) if run.peak_memory else ""


def _stacked(name: str, spent: Mapping[str, Fraction]) -> Bar:
    parts = [
        (seconds(time), colour_of(cause), f"{cause}: {time_in_words(time)}")
        for cause, time in spent.items()
        if time
    ]
    return Bar(name, parts, time_in_words(sum(spent.values(), Fraction(0))))


def colour_of(cause: str) -> str:
    """The colour of a cause, the same in all charts."""
    return COLOURS[CAUSES.index(cause) if cause in CAUSES else -1]


def _legend(causes: list[str]) -> list[tuple[str, str]]:
    return [(cause, colour_of(cause)) for cause in causes]


def _differences(comparison: Comparison) -> str:
    changed = sorted(comparison.by_kind(), key=lambda row: -abs(row.difference))
    changed = [row for row in changed if difference_in_words(row.difference)]
    bars = [_changed(comparison, row) for row in changed[:_BARS_SHOWN]]
    left_out = changed[_BARS_SHOWN:]
    if left_out:
        rest = sum((row.difference for row in left_out), Fraction(0))
        smaller = ComparisonRow("", f"{len(left_out)} smaller ones", "", Fraction(0), rest)
        bars.append(_changed(comparison, smaller))
    bars.append(_changed(comparison, ComparisonRow("", "whole", "", *comparison.times)))
    return bars_chart(bars, "Differences by kind of operation")


def _changed(comparison: Comparison, row: ComparisonRow) -> Bar:
    colour = _MORE if row.difference > 0 else _LESS
    told = f"{difference_in_words(row.difference) or 'equal'}"
    share = f", {share_in_words(comparison, row)}" if told != "equal" else ""
    name = kind_in_words(row.cause, row.kind)
    part = (seconds(row.difference), colour, f"{name}: {told}{share}")
    return Bar(name, [part], f"{told}{share}")


def _parts(comparison: Comparison) -> str:
    head = ("cause", "kind", "phase", *comparison.names, "difference", "share")
    rows = [
        (
            row.cause,
            row.kind,
            row.phase,
            time_in_words(row.first),
            time_in_words(row.second),
            difference_in_words(row.difference),
            share_in_words(comparison, row),
        )
        for row in (*comparison.rows, ComparisonRow("whole", "", "", *comparison.times))
    ]
    return table([head, *rows])


def _rank_bars(comparison: Comparison) -> str:
    bars = []
    for row in comparison.ranks[:RANKS_SHOWN]:
        for name, spent in zip("AB", (row.first, row.second), strict=True):
            bars.append(_stacked(f"rank {row.rank}, {name}", spent))
    return bars_chart(bars, "Where the time of each rank went", _legend(comparison.causes))
