"""How busy the parts of a machine were, by kind: a large one has thousands of equal parts."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rankwise.base.sorting import by_numbers

_KINDS = {
    "host to SIPs": r"host->sip\d+",
    "SIPs to host": r"sip\d+->host",
    "links between SIPs": r"(sip\d+|switch)->(sip\d+|switch)",
    "links between cubes": r"sip\d+\.cube\d+->cube\d+",
    "devices, computing": r"sip\d+\.computing",
    "HBM channels": r".*\.hbm\d+",
    "ports of PEs, in": r".*\.pe\d+\.in",
    "ports of PEs, out": r".*\.pe\d+\.out",
    "TCM": r".*\.tcm",
    "DMA engines": r".*\.dma",
    "GEMM engines": r".*\.gemm",
    "math engines": r".*\.math",
}
OTHERS = "others"


class KindInUse(NamedTuple):
    """The parts of one kind that were used at all.

    Attributes:
        used: how many there are of them.
        mean: how busy they were on average, 0 to 1.
        busiest: the name of the one that was busiest; the first of equals.
        highest: how busy that was.
    """

    kind: str
    used: int
    mean: float
    busiest: str
    highest: float


def by_kind(shares: Mapping[str, float]) -> list[KindInUse]:
    """The kinds of which anything was used, from the host to the engines."""
    found: dict[str, list[tuple[str, float]]] = {kind: [] for kind in (*_KINDS, OTHERS)}
    for name, share in busiest_first(shares):
        found[_kind_of(name)].append((name, share))
    return [
        KindInUse(kind, len(parts), _mean([share for _, share in parts]), *parts[0])
        for kind, parts in found.items()
        if parts
    ]


def busiest_first(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    """What was used, by how busy it was; equals in the order of their numbers."""
    used = [(name, share) for name, share in shares.items() if share > 0]
    return sorted(used, key=lambda item: (-item[1], by_numbers(item[0])))


def _mean(shares: Sequence[float]) -> float:
    # Of equal numbers it is that number: rounding must not carry it above the highest.
    return min(shares[0], sum(shares) / len(shares))


def _kind_of(name: str) -> str:
    for kind, pattern in _KINDS.items():
        if re.fullmatch(pattern, name):
            return kind
    return OTHERS
