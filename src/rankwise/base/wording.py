"""How lists of ranks are said, the same in reports, verdicts and notices."""

from collections.abc import Iterable

_RANGES_SHOWN_MAX = 12


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 3-6`; a long and scattered list is cut short."""
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    ranges: list[tuple[int, int]] = []
    for rank in ordered:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    shown = ranges[:_RANGES_SHOWN_MAX]
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in shown)
    unshown = sum(high - low + 1 for low, high in ranges[_RANGES_SHOWN_MAX:])
    return f"ranks {text} and {unshown} more" if unshown else f"ranks {text}"
