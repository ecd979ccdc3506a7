"""How ranks, counts and kinds of values are said: the same in reports, notices and errors."""

import re
from collections.abc import Iterable, Sequence

BY_SIGNAL = "stopped by a signal (SIGSTOP) or a debugger"
"""The state of a suspended process."""
_RANGES_SHOWN_MAX = 12
_KIND = re.compile(r"`(\w+)`")
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "fields with values",
    "null": "nothing",
}


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 3-6`; a long and scattered list is cut short."""
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    return f"ranks {ranges_of(ordered)}"


def ranges_of(ranks: Iterable[int]) -> str:
    """`0, 3-6`; a long and scattered list is cut short."""
    ranges: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    shown = ranges[:_RANGES_SHOWN_MAX]
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in shown)
    unshown = sum(high - low + 1 for low, high in ranges[_RANGES_SHOWN_MAX:])
    return f"{text} and {unshown} more" if unshown else text


def counted(count: int, noun: str = "rank") -> str:
    """`1 rank`, `2048 ranks`, `0 nodes`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def kinds_in_words(problem: str) -> str:
    """What msgspec says of a value, with `a number` for `float` and the like."""
    return _KIND.sub(lambda found: _KINDS.get(found[1], found[0]), problem)


def aligned(rows: Sequence[Sequence[str]], *, texts: int, is_last_text: bool = False) -> list[str]:
    """Rows of cells as lines.

    The first `texts` columns begin below each other, perhaps the last one too; the others end.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width)
            if index < texts or (is_last_text and index == last)
            else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
