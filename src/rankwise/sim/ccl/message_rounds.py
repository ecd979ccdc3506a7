"""Collectives in rounds, in which all ranks of a dimension do the same at once.

An algorithm is a sequence of *rounds*, and all messages of a round are computed together:

    start on a link = max(arrival at the link, end of the message before it)
    arrival         = start + size / bandwidth + latency          (store and forward)
    rank goes on    = its last arrival + endpoint + reduction

That is the same recurrence that an event queue would work off, evaluated in numpy: exact in integer
picoseconds, at tens of nanoseconds per message. On a link that several messages of a round want,
they are served by arrival, then in the order in which the algorithm sends. Messages of a later
round never overtake those of an earlier one, nor later hops of a round its earlier hops: among
ranks that all do the same they do not get the chance.

**Equal rounds are replayed.** A round knows only maxima and sums, so if it begins some time later
on all ranks and links, everything in it happens so much later. When one of several equal rounds has
moved the state of all ranks and of the links it uses by one and the same time, each of those that
follow does so too: they are added at once, and no picosecond is lost. On a ring of equal wires that
is from the second round on.

Halving begins with the neighbour: what is largest has the shortest way.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rankwise.base.errors import ConfigError
from rankwise.core.collectives.levels import Grid
from rankwise.sim.ccl.message_model import (
    Algorithm,
    Chunk,
    Collective,
    DimensionModel,
    Indexes,
    Picoseconds,
    Rooted,
    Wiring,
)


class MessageRound(NamedTuple):
    """Messages that are sent together: from every member `i` of a group to `targets[d][i]`.

    A member that is its own target sends nothing. There are `times` of them, one after the other.
    """

    targets: tuple[tuple[int, ...], ...]
    size: int
    reduces: bool
    times: int = 1


class _Paths(NamedTuple):
    """Where messages of a round go, for all ranks: links hop by hop, -1 after the last."""

    sources: Indexes
    destinations: Indexes
    hops: tuple[Indexes, ...]
    is_exclusive: tuple[bool, ...]
    are_apart: bool
    """Whether each rank gets one message at most."""
    links: Indexes
    """Every link that is crossed, once."""


class RoundNetwork(DimensionModel):
    """One dimension whose algorithm goes in rounds."""

    def __init__(self, wiring: Wiring) -> None:
        super().__init__(wiring)
        self._paths: dict[tuple[tuple[int, ...], ...], _Paths] = {}

    def run_phase(self, kind: Collective | Rooted, chunks: list[Chunk]) -> None:
        """Take chunks through, one after the other; sets when their ranks are ready, and sizes."""
        for chunk in chunks:
            self._run_chunk(kind, chunk)

    def _run_chunk(self, kind: Collective | Rooted, chunk: Chunk) -> None:
        wiring = self.wiring
        count = wiring.dimension.count
        ready = np.maximum(chunk.ready, self._free) + wiring.endpoint
        if wiring.dimension.algorithm == "hierarchical":
            rounds = list(_rounds_along_axes(kind, wiring.grid, chunk.size))
        else:
            rounds = list(ROUNDS[wiring.dimension.algorithm](kind, count, chunk.size))
        for number, each in enumerate(rounds):
            following = rounds[number + 1] if number + 1 < len(rounds) else None
            ready = self._run_equal_rounds(each, self._reduced_bytes(each, following), ready)
        chunk.ready = self._free = ready
        if kind == "reduce_scatter":
            chunk.size = -(-chunk.size // count)
        elif kind == "all_gather":
            chunk.size *= count

    def _reduced_bytes(self, each: MessageRound, following: MessageRound | None) -> int:
        if not each.reduces:
            return 0
        is_halving = self.wiring.dimension.algorithm == "halving_doubling"
        if is_halving and self.wiring.costs.reductions == "astra_sim":
            return following.size if following is not None and following.reduces else 0
        return each.size

    def _run_equal_rounds(
        self, each: MessageRound, reduced: int, ready: Picoseconds
    ) -> Picoseconds:
        wiring = self.wiring
        paths = self._paths.get(each.targets)
        if paths is None:
            paths = self._paths[each.targets] = self._find_paths(each.targets)
            wiring.take_in_links()
        for left in reversed(range(each.times)):
            free, carried = wiring.link_free[paths.links], wiring.link_bytes[paths.links]
            began, ready = ready, self._run_round(each, paths, reduced, ready)
            if not left:
                break
            later = int(ready[0] - began[0])
            is_free_later = (wiring.link_free[paths.links] - free == later).all()
            if (ready - began == later).all() and (is_free_later or not wiring.costs.contention):
                wiring.link_free[paths.links] += left * later
                wiring.link_bytes[paths.links] += left * (wiring.link_bytes[paths.links] - carried)
                wiring.messages += left * len(paths.sources)
                return ready + left * later
        return ready

    def _run_round(
        self, each: MessageRound, paths: _Paths, reduced: int, ready: Picoseconds
    ) -> Picoseconds:
        wiring = self.wiring
        wiring.messages += len(paths.sources)
        duration = wiring.duration(each.size)
        arrival = ready[paths.sources]
        for links, is_exclusive in zip(paths.hops, paths.is_exclusive, strict=True):
            arrival = self._cross(links, arrival, duration, each.size, is_exclusive=is_exclusive)
        if paths.hops and (not wiring.costs.contention or wiring.costs.cut_through):
            # Its tail comes as long after its head as the slowest link takes for all of it.
            arrival = arrival + np.max(
                [np.where(links >= 0, _of(duration, links), 0) for links in paths.hops], axis=0
            )
        taken_in = wiring.endpoint + wiring.reduction(reduced)
        result = ready.copy()
        if paths.are_apart:
            targets = paths.destinations
            result[targets] = np.maximum(result[targets], arrival + taken_in)
        else:
            np.maximum.at(result, paths.destinations, arrival + taken_in)
        return result

    def _cross(
        self,
        links: Indexes,
        arrival: Picoseconds,
        durations: Picoseconds,
        size: int,
        *,
        is_exclusive: bool,
    ) -> Picoseconds:
        wiring = self.wiring
        crossing = links >= 0
        everyone = bool(crossing.all())
        chosen = links if everyone else links[crossing]
        came = arrival if everyone else arrival[crossing]
        duration, latency = _of(durations, chosen), _of(wiring.latency, chosen)
        if not wiring.costs.contention:
            left = came + latency
        elif is_exclusive:
            end = np.maximum(came, wiring.link_free[chosen]) + duration
            wiring.link_free[chosen] = end
            left = end + latency
        else:
            end = _queue(chosen, np.maximum(came, wiring.link_free[chosen]), duration)
            np.maximum.at(wiring.link_free, chosen, end)
            left = end + latency
        if wiring.costs.contention and wiring.costs.cut_through:
            left = left - duration  # its head; the tail follows at the end of the way
        if is_exclusive:
            wiring.link_bytes[chosen] += size
        else:
            np.add.at(wiring.link_bytes, chosen, size)
        if everyone:
            return left
        result = arrival.copy()
        result[crossing] = left
        return result

    def _find_paths(self, targets: tuple[tuple[int, ...], ...]) -> _Paths:
        wiring = self.wiring
        sources, destinations, rows = [], [], []
        ranks = np.arange(len(wiring.member))
        for each in targets:
            routes = [wiring.links_between(member, each[member]) for member in range(len(each))]
            longest = max(len(route) for route in routes)
            table = np.full((len(routes), longest), -1, np.int64)
            for member, route in enumerate(routes):
                table[member, : len(route)] = route
            links = table[wiring.member]
            rows.append(np.where(links >= 0, links + wiring.first_link[:, None], -1))
            sources.append(ranks)
            targets_here = np.asarray(each)[wiring.member]
            destinations.append(wiring.group_start + targets_here * wiring.stride)
        longest = max(row.shape[1] for row in rows)
        padded = [
            np.pad(row, ((0, 0), (0, longest - row.shape[1])), constant_values=-1) for row in rows
        ]
        hops = np.concatenate(padded)
        columns = tuple(np.ascontiguousarray(hops[:, hop]) for hop in range(longest))
        all_destinations = np.concatenate(destinations)
        return _Paths(
            np.concatenate(sources),
            all_destinations,
            columns,
            tuple(_are_distinct(column) for column in columns),
            _are_distinct(all_destinations),
            np.unique(hops[hops >= 0]),
        )


def _of(figures: Picoseconds, links: Indexes) -> Picoseconds:
    """Figures of links: of each its own, or one of all."""
    return figures[links] if figures.ndim else figures


def _are_distinct(links: Indexes) -> bool:
    used = links[links >= 0]
    return bool(np.unique(used).size == used.size)


def _queue(links: Indexes, came: Picoseconds, duration: Picoseconds) -> Picoseconds:
    """When each message has left its link, if those of one link are served by arrival."""
    order = np.lexsort((came, links))
    links, came = links[order], came[order]
    duration = duration[order] if duration.ndim else duration
    first = np.flatnonzero(np.concatenate(([True], links[1:] != links[:-1])))
    segment = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(links))))
    position = np.arange(len(links)) - first[segment]
    # Message p of a queue ends at the latest of: came of j + (p - j + 1) durations, over j <= p.
    slack = came - position * duration
    span = int(slack.max() - slack.min()) + 1
    lifted = np.maximum.accumulate(slack - slack.min() + segment * span)
    end = lifted - segment * span + slack.min() + (position + 1) * duration
    result: Picoseconds = np.empty_like(end)
    result[order] = end
    return result


@lru_cache(maxsize=256)
def _shifted(count: int, by: int) -> tuple[int, ...]:
    return tuple((member + by) % count for member in range(count))


def _ring_rounds(kind: Collective | Rooted, count: int, size: int) -> Iterator[MessageRound]:
    """To the next neighbour, count - 1 times; each block of an all-to-all travels by itself."""
    if count == 1:
        return
    following = (_shifted(count, 1),)
    part = -(-size // count)
    if kind in {"all_reduce", "reduce_scatter"}:
        yield MessageRound(following, part, reduces=True, times=count - 1)
    if kind in {"all_reduce", "all_gather"}:
        whole = part if kind == "all_reduce" else size
        yield MessageRound(following, whole, reduces=False, times=count - 1)
    if kind == "all_to_all":
        yield MessageRound(following, part, reduces=False, times=count * (count - 1) // 2)


def _direct_rounds(kind: Collective | Rooted, count: int, size: int) -> Iterator[MessageRound]:
    """To all others at once."""
    if count == 1:
        return
    others = tuple(_shifted(count, by) for by in range(1, count))
    part = -(-size // count)
    if kind in {"all_reduce", "reduce_scatter"}:
        yield MessageRound(others, part, reduces=True)
    if kind in {"all_reduce", "all_to_all"}:
        yield MessageRound(others, part, reduces=False)
    if kind == "all_gather":
        yield MessageRound(others, size, reduces=False)


def _halving_doubling_rounds(
    kind: Collective | Rooted, count: int, size: int
) -> Iterator[MessageRound]:
    """With the partner at distance 1, then 2, 4, …; gathering goes back."""
    if kind == "all_to_all":
        raise ConfigError("halving_doubling has no all_to_all", hint="use ring or direct")
    steps = count.bit_length() - 1
    partners = [tuple(member ^ (1 << step) for member in range(count)) for step in range(steps)]
    if kind in {"all_reduce", "reduce_scatter"}:
        for step, partner in enumerate(partners):
            yield MessageRound((partner,), -(-size // (2 << step)), reduces=True)
    if kind in {"all_reduce", "all_gather"}:
        whole = size if kind == "all_reduce" else size * count
        for step in reversed(range(steps)):
            yield MessageRound((partners[step],), -(-whole // (2 << step)), reduces=False)


def _rounds_along_axes(
    kind: Collective | Rooted, grid: Grid | None, size: int
) -> Iterator[MessageRound]:
    """Rings along each axis in turn, from the inside out, and back."""
    assert grid is not None, "what is no grid is not asked for it"
    following = []
    for axis, length in enumerate(grid.lengths):
        lines = (grid.along(rank, axis) for rank in range(len(grid.ranks)))
        following.append((tuple(line[(here + 1) % length] for line, here in lines),))
    axes = list(zip(following, grid.lengths, strict=True))
    left = size
    if kind in {"all_reduce", "reduce_scatter"}:
        for targets, length in axes:
            left = -(-left // length)
            yield MessageRound(targets, left, reduces=True, times=length - 1)
    if kind in {"all_reduce", "all_gather"}:
        for targets, length in reversed(axes):
            yield MessageRound(targets, left, reduces=False, times=length - 1)
            left *= length


def _rooted_rounds(kind: Collective | Rooted, count: int, size: int) -> Iterator[MessageRound]:
    """Broadcast and reduce along a binomial tree, gather and scatter directly; a barrier spreads.

    Member 0 is the root.
    """
    distances = [1 << step for step in range((count - 1).bit_length())]
    match kind:
        case "broadcast":
            for distance in distances:
                yield MessageRound((_from_the_first(distance, count),), size, reduces=False)
        case "reduce":
            for distance in reversed(distances):
                down = _from_the_first(distance, count)
                up = list(range(count))
                for sender in range(min(distance, count - distance)):
                    up[down[sender]] = sender
                yield MessageRound((tuple(up),), size, reduces=True)
        case "gather":
            yield MessageRound(((0,) * count,), size, reduces=False)
        case "scatter":
            others = tuple((to, *range(1, count)) for to in range(1, count))
            yield MessageRound(others, size, reduces=False)
        case _:
            for distance in distances:
                yield MessageRound((_shifted(count, distance),), size, reduces=False)


def _from_the_first(distance: int, count: int) -> tuple[int, ...]:
    """The first `distance` members send so far ahead, where there is a member."""
    return tuple(
        member + distance if member < distance and member + distance < count else member
        for member in range(count)
    )


ROUNDS: dict[Algorithm, Callable[[Collective | Rooted, int, int], Iterator[MessageRound]]] = {
    "ring": _ring_rounds,
    "direct": _direct_rounds,
    "halving_doubling": _halving_doubling_rounds,
    "rooted": _rooted_rounds,
}
"""The algorithms that go in rounds."""
