"""Which way messages take, from SIP to SIP and from cube to cube.

Routes are fixed by the graph alone: shortest, and where several are, rows before columns and the
increasing direction before the decreasing one. In a mesh that is dimension-ordered routing, which
cannot deadlock. A switch is one more node, numbered after the SIPs.
"""

from collections import deque
from collections.abc import Set as AbstractSet
from functools import lru_cache

from rankwise.sim.hardware.specification import SipsSpec

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
    return sorted({(min(edge), max(edge)) for edge in edges})
