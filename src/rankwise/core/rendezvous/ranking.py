"""Which nodes run, and which rank each has.

A node that stays keeps its rank wherever it can: its workers' caches, shards and log directories
carry it. Gaps are filled by newcomers in the order of the network, so that neighbours in rank are
neighbours in topology. Equal questions have equal answers, whichever node leads.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.records import NodeRecord

_NUMBERS = re.compile(r"(\d+)")


def active_count(config: RendezvousConfig, ready_count: int) -> int:
    """How many of that many ready nodes run; the others are spares. 0 if there are too few."""
    if ready_count < config.nodes_min:
        return 0
    return min(config.nodes_max, max(config.nodes_min, ready_count - config.spares))


def ranked(
    candidates: Mapping[str, NodeRecord], previous: Sequence[str], count: int
) -> tuple[str, ...]:
    """The ids of the `count` candidates that run, in the order of their ranks.

    Args:
        candidates: nodes that are ready, by id.
        previous: the members of the round before, in the order of their ranks.
        count: how many are wanted; at most as many as there are candidates.
    """
    assert count <= len(candidates), f"{count} ranks for {len(candidates)} nodes"
    survivors = [node for node in previous if node in candidates][:count]
    newcomers = _in_network_order(candidates, candidates.keys() - set(previous))
    chosen = set(survivors) | set(newcomers[: count - len(survivors)])
    ranks: list[str | None] = [None] * count
    for rank, node in enumerate(previous[:count]):
        if node in chosen:
            ranks[rank] = node
    placed = {node for node in ranks if node is not None}
    # Survivors whose rank is out of range come before newcomers, in the order that they had.
    waiting = [node for node in survivors if node not in placed]
    waiting += [node for node in newcomers if node in chosen]
    gaps = iter(waiting)
    return tuple(node if node is not None else next(gaps) for node in ranks)


def seated(candidates: Mapping[str, NodeRecord], count: int) -> tuple[str, ...] | None:
    """The ids of the candidates by seat, or None while a seat is empty or taken twice."""
    by_seat = {record.seat: node for node, record in candidates.items()}
    if len(candidates) != count or by_seat.keys() != set(range(count)):
        return None
    return tuple(by_seat[seat] for seat in range(count))


def _in_network_order(candidates: Mapping[str, NodeRecord], nodes: Iterable[str]) -> list[str]:
    def place(node: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]], str]:
        record = candidates[node]
        return _natural(record.topology), _natural(record.host), node

    return sorted(nodes, key=place)


def _natural(text: str) -> list[tuple[int, str]]:
    """A key by which `rack2` comes before `rack10`."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBERS.split(text) if part
    ]
