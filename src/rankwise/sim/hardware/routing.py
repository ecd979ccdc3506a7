"""Which way messages take, from SIP to SIP and from cube to cube.

Routes are fixed by the graph alone: shortest, and where several are, rows before columns and the
increasing direction before the decreasing one. In a mesh that is dimension-ordered routing, which
cannot deadlock. A switch is one more node, numbered after the SIPs.

**Levels.** Two devices meet at the outermost level at which their units differ. A switch or a fat
tree takes a flow there from one to the other. Rails and direct graphs connect devices with the same
place in the units below: a flow first goes to that device in its own unit, then over this level.
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from functools import cached_property, lru_cache

from rankwise.base.seeds import derived_seed
from rankwise.sim.hardware.specification import LevelOfNetwork, LinkSpec, SipsSpec

Hop = tuple[int, int]
"""From node to node, which are neighbours."""


def mesh_route(source: int, destination: int, columns: int) -> list[int]:
    """The nodes after `source`: first along its row, then along the column."""
    row, column = divmod(source, columns)
    last_row, last_column = divmod(destination, columns)
    nodes = []
    while column != last_column:
        column += 1 if column < last_column else -1
        nodes.append(row * columns + column)
    while row != last_row:
        row += 1 if row < last_row else -1
        nodes.append(row * columns + column)
    return nodes


def _around(source: int, destination: int, length: int) -> list[int]:
    """Positions after `source` on a ring, the shorter way round; upwards if both are equal."""
    up = (destination - source) % length
    step, count = (1, up) if 2 * up <= length else (-1, length - up)
    return [(source + step * (index + 1)) % length for index in range(count)]


def torus_route(source: int, destination: int, rows: int, columns: int) -> list[int]:
    """The nodes after `source`: first around its row, then around the column."""
    row, column = divmod(source, columns)
    last_row, last_column = divmod(destination, columns)
    nodes = [row * columns + each for each in _around(column, last_column, columns)]
    return nodes + [each * columns + last_column for each in _around(row, last_row, rows)]


@lru_cache(maxsize=64)
def _next_nodes(edges: tuple[Hop, ...], count: int, destination: int) -> tuple[int, ...]:
    """For every node, the next one on its way to `destination`; the lowest number among equals."""
    neighbours: list[list[int]] = [[] for _ in range(count)]
    for one, other in edges:
        neighbours[one].append(other)
        neighbours[other].append(one)
    follower = [-1] * count
    follower[destination] = destination
    frontier = deque([destination])
    while frontier:
        node = frontier.popleft()
        for neighbour in sorted(neighbours[node]):
            if follower[neighbour] < 0:
                follower[neighbour] = node
                frontier.append(neighbour)
    return tuple(follower)


def sip_route(sips: SipsSpec, source: int, destination: int) -> list[int]:
    """The nodes after SIP `source` on the way to SIP `destination`."""
    if source == destination:
        return []
    match sips.graph:
        case "ring_1d":
            return _around(source, destination, sips.count)
        case "mesh_2d":
            assert sips.shape is not None, "the specification was checked"
            return mesh_route(source, destination, sips.shape[1])
        case "torus_2d":
            assert sips.shape is not None, "the specification was checked"
            return torus_route(source, destination, *sips.shape)
        case "fully_connected":
            return [destination]
        case "switch":
            return [sips.count, destination]
        case "custom":
            follower = _next_nodes(sips.edges, sips.count, destination)
            nodes = [follower[source]]
            while nodes[-1] != destination:
                nodes.append(follower[nodes[-1]])
            return nodes
        case "levels":
            return levels_of_network(sips).route(source, destination)


class LeveledNetwork:
    """The nodes and edges of a network of levels."""

    def __init__(self, sips: SipsSpec) -> None:
        self.levels: list[_Level] = []
        self.node_count = sips.count
        size = 1
        for number, spec in enumerate(sips.levels):
            level = _Level(spec, number, size, sips.count, self.node_count)
            self.levels.append(level)
            self.node_count += level.switch_count
            size = level.size

    def route(self, source: int, destination: int) -> list[int]:
        """The nodes after a device on the way to another one."""
        if source == destination:
            return []
        number = next(
            number
            for number in reversed(range(len(self.levels)))
            if source // self.levels[number].below != destination // self.levels[number].below
        )
        level = self.levels[number]
        if level.spec.graph in {"switch", "fat_tree"}:
            return [*level.switches(source, destination), destination]
        below = level.below
        crossing = source - source % below + destination % below
        return [*self.route(source, crossing), *level.across(crossing, destination)]

    @cached_property
    def links(self) -> dict[Hop, LinkSpec]:
        """What each pair of neighbours is connected by, the lower number first."""
        return {edge: link for level in self.levels for edge, link in level.edges()}

    def level_at(self, node: int) -> "_Level":
        """The level that a switch belongs to."""
        return next(level for level in reversed(self.levels) if level.first_switch <= node)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The switches, by name."""
        return {
            level.switch_name(node): node
            for level in self.levels
            for node in range(level.first_switch, level.first_switch + level.switch_count)
        }


class _Level:
    """One level, over all of its units.

    Attributes:
        below, size: how many devices a unit of the level below has, and one of this.
        leaf_count: of a fat tree, how many leaves it has in all its units.
        uplink: of a fat tree, from each leaf to each spine.
    """

    def __init__(
        self, spec: LevelOfNetwork, number: int, below: int, devices: int, first_switch: int
    ) -> None:
        self.spec = spec
        self.name = spec.name or f"level{chr(ord('A') + number)}"
        self.below, self.size = below, below * spec.count
        self.first_switch = first_switch
        self._devices = devices
        units = devices // self.size
        self.leaf = spec.leaf or below
        self.leaf_count = devices // self.leaf if spec.graph == "fat_tree" else 0
        self.switch_count = {
            "switch": units,
            "rails": units * below,
            "fat_tree": self.leaf_count + units * spec.spines,
        }.get(spec.graph, 0)
        self.uplink = LinkSpec(
            bandwidth=spec.link.bandwidth * self.leaf / spec.oversubscription / spec.spines,
            latency_ns=spec.link.latency_ns,
        )
        self._plane: SipsSpec | None = None
        match spec.graph:
            case "switch" | "rails" | "fat_tree":
                pass
            case graph:
                self._plane = SipsSpec(
                    count=spec.count, graph=graph, shape=spec.shape, link=spec.link
                )

    @property
    def axes(self) -> tuple[int, ...]:
        """How many units follow each other along each axis: of a grid there are two."""
        if self.spec.graph == "fat_tree" and self.leaf > self.below and not self.leaf % self.below:
            return (self.leaf // self.below, self.size // self.leaf)
        return (self.spec.count,) if self.spec.shape is None else self.spec.shape[::-1]

    def switch_name(self, node: int) -> str:
        """What a switch is called."""
        number = node - self.first_switch
        if self.spec.graph == "fat_tree":
            if number < self.leaf_count:
                return f"{self.name}_leaf{number}"
            return f"{self.name}_spine{number - self.leaf_count}"
        return f"{self.name}{number}"

    def switches(self, source: int, destination: int) -> list[int]:
        """Those between two devices of one unit."""
        unit = source // self.size
        if self.spec.graph == "switch":
            return [self.first_switch + unit]
        here, there = source // self.leaf, destination // self.leaf
        first = self.first_switch
        if here == there:
            return [first + here]
        return [first + here, self._spine(unit, source, destination), first + there]

    def _spine(self, unit: int, source: int, destination: int) -> int:
        spec = self.spec
        chosen = destination
        if spec.routing == "hashed":
            chosen = derived_seed(spec.seed, "route", source, destination)
        return self.first_switch + self.leaf_count + unit * spec.spines + chosen % spec.spines

    def across(self, source: int, destination: int) -> list[int]:
        """The nodes after a device on the way to one that has the same place in its unit below."""
        unit, place = source // self.size, source % self.below
        if self.spec.graph == "rails":
            return [self.first_switch + unit * self.below + place, destination]
        assert self._plane is not None, "the others connect devices directly"
        one, other = (each % self.size // self.below for each in (source, destination))
        start = unit * self.size + place
        return [start + each * self.below for each in sip_route(self._plane, one, other)]

    def edges(self) -> Iterator[tuple[Hop, LinkSpec]]:
        """All pairs of neighbours, the lower number first, and their links."""
        link, first = self.spec.link, self.first_switch
        match self.spec.graph:
            case "switch":
                for device in range(self._devices):
                    yield (device, first + device // self.size), link
            case "rails":
                for device in range(self._devices):
                    unit, place = device // self.size, device % self.below
                    yield (device, first + unit * self.below + place), link
            case "fat_tree":
                for device in range(self._devices):
                    yield (device, first + device // self.leaf), link
                for leaf in range(self.leaf_count):
                    unit = leaf * self.leaf // self.size
                    for spine in range(self.spec.spines):
                        top = first + self.leaf_count + unit * self.spec.spines + spine
                        yield (first + leaf, top), self.uplink
            case _:
                assert self._plane is not None, "the others connect devices directly"
                for start in range(0, self._devices, self.size):
                    for one, other in sip_edges(self._plane):
                        for place in range(start, start + self.below):
                            yield (place + one * self.below, place + other * self.below), link


@lru_cache(maxsize=16)
def levels_of_network(sips: SipsSpec) -> LeveledNetwork:
    """The network of levels that a system has."""
    return LeveledNetwork(sips)


def node_count(sips: SipsSpec) -> int:
    """How many devices and switches there are."""
    if sips.levels:
        return levels_of_network(sips).node_count
    return sips.count + (sips.graph == "switch")


def node_name(sips: SipsSpec, node: int) -> str:
    """What a device or a switch is called."""
    if node < sips.count:
        return f"sip{node}"
    if not sips.levels:
        return "switch"
    return levels_of_network(sips).level_at(node).switch_name(node)


def switch_named(sips: SipsSpec, name: str) -> int:
    """The number of a switch; -1 if there is none of that name."""
    if sips.levels:
        return levels_of_network(sips).numbers.get(name, -1)
    return sips.count if name == "switch" and sips.graph == "switch" else -1


def link_of_hop(sips: SipsSpec, hop: Hop) -> LinkSpec:
    """What connects two neighbours."""
    if sips.link is not None:
        return sips.link
    return levels_of_network(sips).links[min(hop), max(hop)]


def axes_of(sips: SipsSpec) -> tuple[int, ...]:
    """How many devices are in a unit of each level of the network, from the inside out.

    The axes of a grid are levels of their own. The last number is that of all devices.
    """
    if not sips.levels:
        counts: tuple[int, ...] = (sips.count,) if sips.shape is None else sips.shape[::-1]
    else:
        counts = tuple(n for level in levels_of_network(sips).levels for n in level.axes)
    axes: list[int] = []
    for count in counts:
        axes.append(count * (axes[-1] if axes else 1))
    return tuple(axes)


def detour(
    sips: SipsSpec, source: int, destination: int, dead: AbstractSet[Hop]
) -> list[int] | None:
    """The nodes after SIP `source` on the shortest way without dead links; None if there is none.

    Of ways that are equally long, the one by the lowest numbers.
    """
    neighbours: dict[int, list[int]] = {}
    for one, other in sip_edges(sips):
        for here, there in ((one, other), (other, one)):
            if (here, there) not in dead:
                neighbours.setdefault(here, []).append(there)
    came_from = {source: source}
    frontier = deque([source])
    while frontier and destination not in came_from:
        node = frontier.popleft()
        for neighbour in sorted(neighbours.get(node, ())):
            if neighbour not in came_from:
                came_from[neighbour] = node
                frontier.append(neighbour)
    if destination not in came_from:
        return None
    nodes = [destination]
    while came_from[nodes[-1]] != source:
        nodes.append(came_from[nodes[-1]])
    return nodes[::-1]


def sip_edges(sips: SipsSpec) -> list[Hop]:
    """Every pair of nodes that a link connects, the lower number first, in order."""
    count = sips.count
    edges: list[Hop] = []
    match sips.graph:
        case "ring_1d":
            edges = [(sip, (sip + 1) % count) for sip in range(count)] if count > 1 else []
        case "mesh_2d" | "torus_2d":
            assert sips.shape is not None, "the specification was checked"
            rows, columns = sips.shape
            wraps = sips.graph == "torus_2d"
            for sip in range(count):
                row, column = divmod(sip, columns)
                if column + 1 < columns or (wraps and columns > 1):
                    edges.append((sip, row * columns + (column + 1) % columns))
                if row + 1 < rows or (wraps and rows > 1):
                    edges.append((sip, (row + 1) % rows * columns + column))
        case "fully_connected":
            edges = [(one, other) for one in range(count) for other in range(one + 1, count)]
        case "switch":
            edges = [(sip, count) for sip in range(count)]
        case "custom":
            edges = list(sips.edges)
        case "levels":
            edges = list(levels_of_network(sips).links)
    return sorted({(min(edge), max(edge)) for edge in edges})
