"""How long collectives take on a plain alpha-beta network, message by message.

The machine of `rankwise.sim.hardware` moves chunks through engines and memories. Here is the level
above, for questions about thousands of ranks: a message costs `latency + size / bandwidth` per link
that it crosses, links serve one message at a time, and a rank goes on when what it waits for has
come. Each algorithm is a sequence of *rounds*, and all messages of a round are computed at once:

    start on a link = max(arrival at the link, end of the message before it)
    arrival         = start + size / bandwidth + latency          (store and forward)
    rank goes on    = its last arrival + endpoint + reduction

That is the same recurrence that an event queue would work off, evaluated in numpy: exact in integer
picoseconds, at tens of nanoseconds per message. On a link that several messages of a round want,
they are served by arrival, then in the order in which the algorithm sends. Messages of a later
round never overtake those of an earlier one, nor later hops of a round its earlier hops.

**Dimensions.** A system may be a product of dimensions, the first of which varies fastest with the
rank. An all-reduce then scatters and reduces along every dimension but the last, all-reduces along
the last, and gathers back. The data is cut into `chunks` that follow each other through the
dimensions; a dimension works on one chunk at a time, the one that was ready first.

**Reading other simulators' figures.** ASTRA-sim's gigabyte, for bandwidths, is 2**30 bytes; hand it
over as `bandwidth_gbps=50 * 1.073741824`. Its times come out within 0.5 % for ring and direct, and
within 3.5 % for halving-doubling, with and without congestion. Differences by design: it cuts each
delay down to whole nanoseconds; and in halving-doubling it charges the reduction of a step with the
size of the next, so that the largest one is free.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rankwise.base.errors import ConfigError
from rankwise.sim.hardware.quantities import Rate, picoseconds
from rankwise.sim.hardware.routing import sip_route
from rankwise.sim.hardware.specification import Graph, LinkSpec, SipsSpec

Picoseconds = npt.NDArray[np.int64]
Indexes = npt.NDArray[np.int64]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Algorithm = Literal["ring", "direct", "halving_doubling"]


class Dimension(msgspec.Struct, frozen=True, kw_only=True):
    """One dimension of a system: how many ranks, what connects them, and how they go about it."""

    count: int
    graph: Graph = "ring_1d"
    shape: tuple[int, int] | None = None
    algorithm: Algorithm = "ring"
    bandwidth_gbps: float
    """10**9 bytes per second, link and direction."""
    latency_ns: float

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a dimension of {self.count} ranks")
        if self.algorithm == "halving_doubling" and self.count & (self.count - 1):
            raise ValueError(f"halving_doubling needs a power of two of ranks, not {self.count}")


class MessageCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What messages cost besides the links.

    Attributes:
        endpoint_ns: added when a message is taken in, and once when a chunk is handed out.
        memory_gbps: bandwidth at which received data is reduced: two reads and a write per byte.
        contention: links serve one message at a time; without, hops only add their latency.
    """

    endpoint_ns: float = 0.0
    memory_gbps: float | None = None
    contention: bool = True


class CollectiveTime(NamedTuple):
    """The result of `collective_time`.

    Attributes:
        picoseconds: until the last rank has its result.
        messages: how many were sent.
        bytes_per_link: per dimension, what each link of it carried; sorted by group and link.
    """

    picoseconds: int
    messages: int
    bytes_per_link: tuple[Indexes, ...]


class Round(NamedTuple):
    """Messages that are sent together: from every member `i` of a group to `targets[d][i]`."""

    targets: tuple[tuple[int, ...], ...]
    size: int
    reduces: bool


def collective_time(
    collective: Collective,
    size: int,
    dimensions: list[Dimension],
    *,
    chunks: int = 1,
    costs: MessageCosts | None = None,
) -> CollectiveTime:
    """Time a collective on an otherwise idle system.

    Args:
        collective: which one.
        size: bytes that each rank puts in; of all_gather that is one rank's part of the result.
        dimensions: the system, the fastest-varying dimension first.
        chunks: pieces in which the data goes through the dimensions.
        costs: what messages cost besides the links; nothing unless given.
    """
    if size < 1 or chunks < 1 or not dimensions:
        raise ConfigError(f"cannot time {size} bytes in {chunks} chunks on {dimensions}")
    costs = costs or MessageCosts()
    rank_count = int(np.prod([dimension.count for dimension in dimensions]))
    stride, networks = 1, []
    for dimension in dimensions:
        networks.append(_Network(dimension, stride, rank_count, costs))
        stride *= dimension.count
    phases = _phases(collective, dimensions)
    waiting = [_Chunk(-(-size // chunks), np.zeros(rank_count, np.int64)) for _ in range(chunks)]
    finished = 0
    while any(chunk.phase < len(phases) for chunk in waiting):
        chunk = min(
            (each for each in waiting if each.phase < len(phases)),
            key=lambda each: networks[phases[each.phase][0]].could_start(each.ready),
        )
        dimension_index, kind = phases[chunk.phase]
        networks[dimension_index].run_phase(kind, chunk)
        chunk.phase += 1
        finished = max(finished, int(chunk.ready.max()))
    return CollectiveTime(
        finished,
        sum(network.messages for network in networks),
        tuple(network.link_bytes for network in networks),
    )


def _phases(collective: Collective, dimensions: list[Dimension]) -> list[tuple[int, Collective]]:
    inner, last = list(range(len(dimensions) - 1)), len(dimensions) - 1
    match collective:
        case "all_reduce":
            scatters: list[tuple[int, Collective]] = [(index, "reduce_scatter") for index in inner]
            gathers: list[tuple[int, Collective]] = [(index, "all_gather") for index in inner]
            return [*scatters, (last, "all_reduce"), *reversed(gathers)]
        case "all_gather":
            return [(index, collective) for index in (last, *reversed(inner))]
        case "reduce_scatter" | "all_to_all":
            return [(index, collective) for index in (*inner, last)]


class _Chunk:
    """A piece of the data on its way through the dimensions; `ready` is per rank."""

    def __init__(self, size: int, ready: Picoseconds) -> None:
        self.size = size
        self.ready = ready
        self.phase = 0


class _Paths(NamedTuple):
    """Where messages of a round go, for all ranks: links hop by hop, -1 after the last."""

    sources: Indexes
    destinations: Indexes
    hops: tuple[Indexes, ...]
    is_exclusive: tuple[bool, ...]


class _Network:
    """The links of one dimension, in all of its groups."""

    def __init__(
        self, dimension: Dimension, stride: int, rank_count: int, costs: MessageCosts
    ) -> None:
        self._dimension = dimension
        self._stride = stride
        self._costs = costs
        link = LinkSpec(bandwidth=dimension.bandwidth_gbps, latency_ns=dimension.latency_ns)
        self._sips = SipsSpec(
            count=dimension.count, graph=dimension.graph, shape=dimension.shape, link=link
        )
        self._rate, self._latency = link.rate, link.latency
        self._endpoint = picoseconds(costs.endpoint_ns)
        self._memory = (
            None if costs.memory_gbps is None else Rate.of_gigabytes_per_second(costs.memory_gbps)
        )
        ranks = np.arange(rank_count)
        self._member = ranks // stride % dimension.count
        self._group_start = ranks - self._member * stride
        self._group = self._group_start % stride + ranks // (stride * dimension.count) * stride
        nodes = dimension.count + (dimension.graph == "switch")
        self._nodes = nodes
        self._link_free = np.zeros(rank_count // dimension.count * nodes * nodes, np.int64)
        self._link_bytes = np.zeros_like(self._link_free)
        self._free = np.zeros(rank_count, np.int64)
        self._paths: dict[tuple[tuple[int, ...], ...], _Paths] = {}
        self.messages = 0

    @property
    def link_bytes(self) -> Indexes:
        """What each link that was used has carried."""
        return self._link_bytes[self._link_bytes > 0]

    def could_start(self, ready: Picoseconds) -> int:
        """When a chunk could start here on its last rank."""
        return int(np.maximum(ready, self._free).max())

    def run_phase(self, kind: Collective, chunk: _Chunk) -> None:
        """Take a chunk through this dimension; sets when its ranks are ready, and its new size."""
        ready = np.maximum(chunk.ready, self._free) + self._endpoint
        for each in _ROUNDS[self._dimension.algorithm](kind, self._dimension.count, chunk.size):
            ready = self._run_round(each, ready)
        chunk.ready = self._free = ready
        if kind == "reduce_scatter":
            chunk.size = -(-chunk.size // self._dimension.count)
        elif kind == "all_gather":
            chunk.size *= self._dimension.count

    def _run_round(self, each: Round, ready: Picoseconds) -> Picoseconds:
        paths = self._paths.get(each.targets)
        if paths is None:
            paths = self._paths[each.targets] = self._find_paths(each.targets)
        self.messages += len(paths.sources)
        duration = self._rate.time_for(each.size)
        arrival = ready[paths.sources]
        for links, is_exclusive in zip(paths.hops, paths.is_exclusive, strict=True):
            arrival = self._cross(links, arrival, duration, each.size, is_exclusive=is_exclusive)
        if not self._costs.contention:
            arrival += duration
        taken_in = self._endpoint
        if each.reduces and self._memory is not None:
            taken_in += self._memory.time_for(3 * each.size)
        result = ready.copy()
        if len(each.targets) == 1:
            targets = paths.destinations
            result[targets] = np.maximum(result[targets], arrival + taken_in)
        else:
            np.maximum.at(result, paths.destinations, arrival + taken_in)
        return result

    def _cross(
        self, links: Indexes, arrival: Picoseconds, duration: int, size: int, *, is_exclusive: bool
    ) -> Picoseconds:
        crossing = links >= 0
        everyone = bool(crossing.all())
        chosen = links if everyone else links[crossing]
        came = arrival if everyone else arrival[crossing]
        if not self._costs.contention:
            left = came + self._latency
        elif is_exclusive:
            end = np.maximum(came, self._link_free[chosen]) + duration
            self._link_free[chosen] = end
            left = end + self._latency
        else:
            end = _queue(chosen, np.maximum(came, self._link_free[chosen]), duration)
            np.maximum.at(self._link_free, chosen, end)
            left = end + self._latency
        if is_exclusive:
            self._link_bytes[chosen] += size
        else:
            np.add.at(self._link_bytes, chosen, size)
        if everyone:
            return left
        result = arrival.copy()
        result[crossing] = left
        return result

    def _find_paths(self, targets: tuple[tuple[int, ...], ...]) -> _Paths:
        sources, destinations, rows = [], [], []
        ranks = np.arange(len(self._member))
        first_link = self._group * self._nodes * self._nodes
        for each in targets:
            routes = [self._links_to(member, each[member]) for member in range(len(each))]
            longest = max(len(route) for route in routes)
            table = np.full((len(routes), longest), -1, np.int64)
            for member, route in enumerate(routes):
                table[member, : len(route)] = route
            links = table[self._member]
            rows.append(np.where(links >= 0, links + first_link[:, None], -1))
            sources.append(ranks)
            targets_here = np.asarray(each)[self._member]
            destinations.append(self._group_start + targets_here * self._stride)
        longest = max(row.shape[1] for row in rows)
        padded = [
            np.pad(row, ((0, 0), (0, longest - row.shape[1])), constant_values=-1) for row in rows
        ]
        hops = np.concatenate(padded)
        columns = tuple(np.ascontiguousarray(hops[:, hop]) for hop in range(longest))
        return _Paths(
            np.concatenate(sources),
            np.concatenate(destinations),
            columns,
            tuple(_are_distinct(column) for column in columns),
        )

    def _links_to(self, source: int, destination: int) -> list[int]:
        nodes = sip_route(self._sips, source, destination)
        pairs = zip([source, *nodes], nodes, strict=False)
        return [one * self._nodes + other for one, other in pairs]


def _are_distinct(links: Indexes) -> bool:
    used = links[links >= 0]
    return bool(np.unique(used).size == used.size)


def _queue(links: Indexes, came: Picoseconds, duration: int) -> Picoseconds:
    """When each message has left its link, if those of one link are served by arrival."""
    order = np.lexsort((came, links))
    links, came = links[order], came[order]
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


def _ring_rounds(kind: Collective, count: int, size: int) -> Iterator[Round]:
    """To the next neighbour, count - 1 times; each block of an all-to-all travels by itself."""
    following = (_shifted(count, 1),)
    part = -(-size // count)
    if kind in {"all_reduce", "reduce_scatter"}:
        for _ in range(count - 1):
            yield Round(following, part, reduces=True)
    if kind in {"all_reduce", "all_gather"}:
        for _ in range(count - 1):
            yield Round(following, part if kind == "all_reduce" else size, reduces=False)
    if kind == "all_to_all":
        for _ in range(count * (count - 1) // 2):
            yield Round(following, part, reduces=False)


def _direct_rounds(kind: Collective, count: int, size: int) -> Iterator[Round]:
    """To all others at once."""
    if count == 1:
        return
    others = tuple(_shifted(count, by) for by in range(1, count))
    part = -(-size // count)
    if kind in {"all_reduce", "reduce_scatter"}:
        yield Round(others, part, reduces=True)
    if kind in {"all_reduce", "all_to_all"}:
        yield Round(others, part, reduces=False)
    if kind == "all_gather":
        yield Round(others, size, reduces=False)


def _halving_doubling_rounds(kind: Collective, count: int, size: int) -> Iterator[Round]:
    """With the partner at distance count / 2, then count / 4, …; gathering goes back."""
    if kind == "all_to_all":
        raise ConfigError("halving_doubling has no all_to_all", hint="use ring or direct")
    steps = count.bit_length() - 1
    partners = [
        tuple(member ^ (1 << step) for member in range(count)) for step in reversed(range(steps))
    ]
    if kind in {"all_reduce", "reduce_scatter"}:
        for step, partner in enumerate(partners):
            yield Round((partner,), -(-size // (2 << step)), reduces=True)
    if kind in {"all_reduce", "all_gather"}:
        whole = size if kind == "all_reduce" else size * count
        for step in reversed(range(steps)):
            yield Round((partners[step],), -(-whole // (2 << step)), reduces=False)


_ROUNDS: dict[Algorithm, Callable[[Collective, int, int], Iterator[Round]]] = {
    "ring": _ring_rounds,
    "direct": _direct_rounds,
    "halving_doubling": _halving_doubling_rounds,
}
