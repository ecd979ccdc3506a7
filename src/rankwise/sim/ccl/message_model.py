"""The words of the message level: dimensions of a system, what messages cost, and their wires."""

from abc import ABC, abstractmethod
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from rankwise.core.collectives.levels import Grid, grid_of_homes
from rankwise.sim.hardware.faults import Damage, live_route
from rankwise.sim.hardware.quantities import Rate, picoseconds
from rankwise.sim.hardware.routing import Hop, axes_of, link_of_hop, sip_route
from rankwise.sim.hardware.specification import Graph, LinkSpec, SipsSpec

Picoseconds = npt.NDArray[np.int64]
Indexes = npt.NDArray[np.int64]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Rooted = Literal["broadcast", "reduce", "gather", "scatter", "barrier"]
"""What else a group of a machine does; the root is its member 0."""
Algorithm = Literal[
    "ring", "direct", "halving_doubling", "double_binary_tree", "rooted", "hierarchical"
]


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
            raise ValueError(f"a dimension has {self.count} ranks, expected 1 or more")
        if not (self.bandwidth_gbps > 0 and self.latency_ns >= 0):
            raise ValueError(
                f"a dimension with links of {self.bandwidth_gbps} GB/s and {self.latency_ns} ns"
            )
        if self.algorithm == "halving_doubling" and self.count & (self.count - 1):
            raise ValueError(f"halving_doubling needs a power of two of ranks, not {self.count}")


class MessageCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What messages cost besides the links.

    Attributes:
        endpoint_ns: added when a message is taken in, and once when a chunk is handed out.
        memory_gbps: bandwidth at which received data is reduced: two reads and a write per byte.
        contention: links serve one message at a time; without, hops only add their latency.
        reductions: what is charged as a reduction. `received`: every message that is combined, by
            its size. `astra_sim`: as ASTRA-sim does, for comparisons: in halving, a message by the
            size of the one that is sent next, so that the last one is free; in a tree, also what an
            inner node gets from its parent and only hands down.
        cut_through: the head of a message goes on to the next link one latency later, without
            waiting for its tail, as on the machine of `rankwise.sim.hardware`.
    """

    endpoint_ns: float = 0.0
    memory_gbps: float | None = None
    contention: bool = True
    reductions: Literal["received", "astra_sim"] = "received"
    cut_through: bool = False
    active_chunks: int | None = None
    """In a tree, in how many chunks a rank takes part at a time; None for as many as fill it."""


class Chunk:
    """A piece of the data on its way through the dimensions; `ready` is per rank."""

    def __init__(self, size: int, ready: Picoseconds) -> None:
        self.size = size
        self.ready = ready
        self.phase = 0


class Wiring:
    """The links of one dimension, in all of its groups, and what the dimension's messages cost.

    Attributes:
        dimension: which.
        member: for each rank, its position in its group.
        group_start: for each rank, the rank at position 0 of its group.
        stride: how many ranks lie between neighbours of a group.
        link_free: for each link, when it has served all that it was given.
        link_bytes: for each link, what it has carried.
        messages: how many were sent.
    """

    def __init__(
        self, dimension: Dimension, stride: int, rank_count: int, costs: MessageCosts
    ) -> None:
        self.dimension = dimension
        self.stride = stride
        self.costs = costs
        link = LinkSpec(bandwidth=dimension.bandwidth_gbps, latency_ns=dimension.latency_ns)
        self._sips = SipsSpec(
            count=dimension.count, graph=dimension.graph, shape=dimension.shape, link=link
        )
        self.rate = link.rate
        self.latency: Picoseconds = np.array(link.latency, np.int64)
        """Of each link; by link where they may differ."""
        self.endpoint = picoseconds(costs.endpoint_ns)
        self._memory = (
            None if costs.memory_gbps is None else Rate.of_gigabytes_per_second(costs.memory_gbps)
        )
        ranks = np.arange(rank_count)
        self.member = ranks // stride % dimension.count
        self.group_start = ranks - self.member * stride
        group = self.group_start % stride + ranks // (stride * dimension.count) * stride
        self._nodes = dimension.count + (dimension.graph == "switch")
        self.first_link = group * self._nodes * self._nodes
        links = rank_count // dimension.count * self._nodes * self._nodes
        self.link_free = np.zeros(links, np.int64)
        self.link_bytes = np.zeros(links, np.int64)
        self.messages = 0
        self.grid: Grid | None = None
        """What its members fill, along the levels of their network."""

    def reduction(self, size: int) -> int:
        """How long it takes to combine so many received bytes with what is there."""
        return self._memory.time_for(3 * size) if self._memory is not None and size else 0

    def take_in_links(self) -> None:
        """Nothing: all links are known from the beginning."""

    def duration(self, size: int) -> Picoseconds:
        """How long a link is busy with so many bytes; by link where they differ."""
        return np.array(self.rate.time_for(size), np.int64)

    def links_between(self, source: int, destination: int) -> list[int]:
        """The links from one position to another, counted within the group."""
        return self._links(source, sip_route(self._sips, source, destination))

    def _links(self, source: int, nodes: list[int]) -> list[int]:
        pairs = zip([source, *nodes], nodes, strict=False)
        return [one * self._nodes + other for one, other in pairs]


class PlacedWiring(Wiring):
    """The links of a machine, as a group on some of its devices uses them.

    Args:
        sips: what connects the devices of the machine.
        homes: the device of each member.
        algorithm: how they go about it.
        costs: what messages cost besides the links.
        damage: what faults have done to the links.
    """

    def __init__(
        self,
        sips: SipsSpec,
        homes: tuple[int, ...],
        algorithm: Algorithm,
        costs: MessageCosts,
        damage: Damage,
    ) -> None:
        dimension = Dimension(
            count=len(homes),
            algorithm=algorithm,
            bandwidth_gbps=sips.fastest_link.bandwidth,
            latency_ns=sips.fastest_link.latency_ns,
        )
        super().__init__(dimension, 1, len(homes), costs)
        self._sips, self._homes, self._damage = sips, homes, damage
        self.grid = grid_of_homes(homes, axes_of(sips))
        self.first_link = np.zeros(len(homes), np.int64)
        self._numbers: dict[Hop, int] = {}
        """Of the links that are used. Of all pairs of nodes there would be millions."""
        self._kinds: list[Rate] = []
        self._kind_of_link: list[int] = []
        self._latencies: list[int] = []
        self.link_free = np.zeros(0, np.int64)
        self.link_bytes = np.zeros_like(self.link_free)

    def links_between(self, source: int, destination: int) -> list[int]:
        """The links from the device of one member to that of another."""
        here, there = self._homes[source], self._homes[destination]
        nodes = live_route(self._sips, here, there, self._damage.dead)
        return [self._number(hop) for hop in zip([here, *nodes], nodes, strict=False)]

    def _number(self, hop: Hop) -> int:
        number = self._numbers.get(hop)
        if number is None:
            number = self._numbers[hop] = len(self._numbers)
            link = link_of_hop(self._sips, hop)
            rate = self._damage.rates.get(hop, link.rate)
            if rate not in self._kinds:
                self._kinds.append(rate)
            self._kind_of_link.append(self._kinds.index(rate))
            self._latencies.append(link.latency)
        return number

    def take_in_links(self) -> None:
        """Have a place for all links that routes have named so far."""
        more = len(self._numbers) - len(self.link_free)
        if more:
            self.link_free = np.concatenate([self.link_free, np.zeros(more, np.int64)])
            self.link_bytes = np.concatenate([self.link_bytes, np.zeros(more, np.int64)])
            self.latency = np.array(self._latencies, np.int64)

    def duration(self, size: int) -> Picoseconds:
        """How long a link is busy with so many bytes; by link where they differ."""
        times = np.array([rate.time_for(size) for rate in self._kinds], np.int64)
        durations: Picoseconds = np.array(times.sum()) if len(times) < _TO_TELL_APART else times
        return durations[self._kind_of_link] if durations.ndim else durations


_TO_TELL_APART = 2


class DimensionModel(ABC):
    """One dimension with its algorithm: takes chunks through it."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self._free = np.zeros(len(wiring.member), np.int64)

    def could_start(self, ready: Picoseconds) -> int:
        """When a chunk could start here on its last rank."""
        return int(np.maximum(ready, self._free).max())

    @abstractmethod
    def run_phase(self, kind: Collective, chunks: list[Chunk]) -> None:
        """Take chunks through, one after the other; sets when their ranks are ready, and sizes."""
