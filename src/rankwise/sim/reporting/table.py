"""Results as a table for a terminal: as wide as they are, or folded to fit.

Where the table is wider than the terminal, what all rows have in common goes above it, rates leave
their unit to the head, keys their sections, and texts are folded inside their columns. CSV and JSON
have all figures at any width.
"""

import re
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import NamedTuple

from rankwise.sim.reporting.results import (
    COLUMNS,
    FIDELITY,
    HELD_BACK,
    LAW,
    LOWER_BOUND,
    BenchResult,
    cells_of,
    tells,
)

Labels = Sequence[tuple[str, Sequence[str]]]

_TEXT_COLUMNS = frozenset({"bench", "case", "bound", HELD_BACK, FIDELITY})
_RATE_UNITS = {"FLOP/s": "FLOP/s", "bytes/s": "B/s"}
_GAP = 2
_NARROWEST = 6
"""Texts are folded to no less than this, or to their longest word; if even that is too wide, every
result becomes a paragraph."""
_WORD = re.compile(r"[^\s_.,/-]*[\s_.,/-]*")


class _Column(NamedTuple):
    head: str
    cells: tuple[str, ...]
    is_text: bool

    @property
    def width(self) -> int:
        return max(map(len, (self.head, *self.cells)))


def result_table(
    results: Iterable[BenchResult], labels: Labels = (), width: int | None = None
) -> str:
    """Show results in aligned columns, with a note about how they were checked.

    Args:
        results: one row each.
        labels: columns to put in front: a head, and a cell for every result.
        width: how many characters a line may have; None for as many as it takes.
    """
    shown = list(results)
    columns = _columns(shown, labels)
    lines: list[str] = []
    if width is not None and _total(columns) > width:
        columns, lines = _shortened(columns)
    widths = _widths(columns, width)
    if width is not None and sum(widths) + _GAP * (len(widths) - 1) > width:
        lines += _records(columns, width)
    else:
        lines += _aligned(columns, widths)
    notes = [_note(shown), *_formulas(shown)]
    if width is not None:
        notes = [part for note in notes for part in wrap(note, max(width, 20))]
    return "\n".join([*lines, *notes])


def _formulas(results: Sequence[BenchResult]) -> list[str]:
    """What the two columns of a collective say; nothing where there is none."""
    if not any(result.law_ps for result in results):
        return []
    return [
        (
            f"{LOWER_BOUND}: the longer of the chain of latencies, and bytes / bandwidth + latency"
            " of the busiest link; a ring of n: max(2 (n-1) alpha, 2 (n-1) S/(n B) + alpha)"
        ),
        (
            f"{LAW}: the chain of latencies + bytes / bandwidth of the busiest link;"
            " a ring of n: 2 (n-1) (alpha + S/(n B))"
        ),
    ]


def _columns(results: Sequence[BenchResult], labels: Labels) -> list[_Column]:
    rows = [cells_of(result) for result in results]
    figures = [tuple(row[place] for row in rows) for place in range(len(COLUMNS))]
    return [
        *(_Column(head, tuple(map(str, cells)), is_text=True) for head, cells in labels),
        *(
            _Column(head, cells, head in _TEXT_COLUMNS)
            for head, cells in zip(COLUMNS, figures, strict=True)
            if tells(head, cells)
        ),
    ]


def _total(columns: Sequence[_Column]) -> int:
    return sum(column.width + _GAP for column in columns) - _GAP


def _shortened(columns: Sequence[_Column]) -> tuple[list[_Column], list[str]]:
    """The columns without what can be said elsewhere, and the lines above that say it."""
    kept, above = [], []
    last_parts = [column.head.rpartition(".")[2] for column in columns]
    for column, last_part in zip(columns, last_parts, strict=True):
        if column.head == "bench" and len(set(column.cells)) == 1:
            above.append(f"{column.cells[0]}:")
            continue
        head = last_part if last_parts.count(last_part) == 1 else column.head
        unit = _RATE_UNITS.get(column.head)
        cells = tuple(cell.removesuffix(unit) for cell in column.cells) if unit else column.cells
        kept.append(_Column(head, cells, column.is_text))
    return kept, above


def _widths(columns: Sequence[_Column], width: int | None) -> list[int]:
    """How wide each column is, texts folded so far that a row fits, if that is possible."""
    widths = [column.width for column in columns]
    if width is None:
        return widths
    least = [
        max(_NARROWEST, *(len(word.strip()) for cell in (column.head, *column.cells)
                          for word in _WORD.findall(cell)))
        if column.is_text else column.width
        for column in columns
    ]  # fmt: skip
    while sum(widths) + _GAP * (len(widths) - 1) > width:
        room = [own - smallest for own, smallest in zip(widths, least, strict=True)]
        if max(room) <= 0:
            break
        foldable = [place for place, spare in enumerate(room) if spare > 0]
        widths[max(foldable, key=lambda place: widths[place])] -= 1
    return widths


def _aligned(columns: Sequence[_Column], widths: Sequence[int]) -> list[str]:
    lines = []
    for row in zip(*((column.head, *column.cells) for column in columns), strict=True):
        folded = [_folded(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in range(max(map(len, folded))):
            parts = [cell[line] if line < len(cell) else "" for cell in folded]
            lines.append(
                (" " * _GAP)
                .join(
                    part.ljust(width) if column.is_text else part.rjust(width)
                    for part, width, column in zip(parts, widths, columns, strict=True)
                )
                .rstrip()
            )
    return lines


def _records(columns: Sequence[_Column], width: int) -> list[str]:
    """A paragraph per result, where not even a folded table fits."""
    lines = []
    for cells in zip(*(column.cells for column in columns), strict=True):
        figures = zip(columns, cells, strict=True)
        text = "; ".join(f"{column.head} {cell}" for column, cell in figures)
        lines += wrap(text, max(width, 20), subsequent_indent="  ")
    return lines


def _folded(text: str, width: int) -> list[str]:
    """A text in lines of at most `width`, broken behind spaces and signs between words."""
    lines = [""]
    for word in _WORD.findall(text):
        if lines[-1] and len((lines[-1] + word).rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]


def _note(results: Sequence[BenchResult]) -> str:
    checked = sum(result.is_checked for result in results)
    if checked == len(results):
        return "numbers: equal to numpy's"
    if not checked:
        return "numbers: none, only time was simulated"
    return f"numbers: {checked} of {len(results)} results are equal to numpy's"
