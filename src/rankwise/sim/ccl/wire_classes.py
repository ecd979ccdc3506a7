"""Wires that carry the same, if all ranks do the same: one rank stands for all of them.

The programs of an algorithm may be alike under the translations of a grid (`levels`): move each
rank by as much along each axis, and the programs become each other. If the network is alike, too,
all ranks do the same at the same instants. Their flows use the wires of a *class* equally: those
that translations carry into each other. So one rank's messages tell what happens, and 4,096 ranks
cost what one does.

A network is alike where each of its levels is: a switch, rails and direct links under any grid that
fills its units; a ring or torus round its own axes; a fat tree if its leaves have the same spines
for the same places. Grids with borders, links of one's own, and hashed routes are not.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from rankwise.core.collectives.levels import Grid, row_of
from rankwise.sim.hardware.routing import Hop, levels_of_network, sip_edges, sip_route
from rankwise.sim.hardware.specification import SipsSpec
from rankwise.sim.hardware.topology import Topology


class WireClass(NamedTuple):
    """Wires that translations carry into each other.

    Attributes:
        kind: which they are.
        size: how many.
    """

    kind: Hashable
    size: int


class WireClasses:
    """The classes of the wires between the devices of a network, one rank on each."""

    def __init__(self, sips: SipsSpec, grid: Grid) -> None:
        self._sips, self._grid = sips, grid
        self.count = sips.count
        self.first = grid.ranks[0]

    def on_way(self, source: int, target: int) -> Iterator[tuple[Hop, WireClass]]:
        """The hops from one device to another, and their classes."""
        nodes = sip_route(self._sips, source, target)
        for hop in pairwise([source, *nodes]):
            yield hop, self.of_hop(hop)

    def of_hop(self, hop: Hop) -> WireClass:
        """The class of the wire from a node to its neighbour."""
        one, other = hop
        if max(hop) < self.count:
            # As far as from place 0 along each axis: the same for all that are moved there.
            by, stride = 0, 1
            for length in self._grid.lengths:
                by += (other // stride - one // stride) % length * stride
                stride *= length
            return WireClass(("direct", by), self.count)
        if not self._sips.levels:
            return WireClass("down" if one >= self.count else "up", self.count)
        level = levels_of_network(self._sips).level_at(max(hop))
        if min(hop) >= self.count:
            size = level.leaf_count * level.spec.spines
            return WireClass(("to spines" if one < other else "to leaves", level.name), size)
        return WireClass(("down" if one >= self.count else "up", level.name), self.count)

    def all_hops(self) -> Iterator[tuple[Hop, WireClass]]:
        """All wires, in both directions."""
        for one, other in sip_edges(self._sips):
            yield (one, other), self.of_hop((one, other))
            yield (other, one), self.of_hop((other, one))


def wire_classes(topology: Topology, homes: Sequence[int], grid: Grid | None) -> WireClasses | None:
    """The classes of the wires under the translations of a grid; None if the network is not alike.

    Args:
        topology: the machine; with faults, no wires are alike.
        homes: the device of each rank.
        grid: that under which programs are alike.
    """
    sips = topology.machine.system.sips
    if topology.faults is not None:
        return None
    row = tuple(range(sips.count))
    if grid is None or tuple(homes) != row or grid.ranks != row_of(sips.count).ranks:
        return None
    lengths = [length for length in grid.lengths if length > 1]
    return WireClasses(sips, grid) if all(_alike(sips, lengths)) else None


def _alike(sips: SipsSpec, lengths: list[int]) -> Iterator[bool]:
    """Whether each axis of the network is carried into itself."""
    left = list(lengths)
    axes: list[tuple[str, int]] = []
    if not sips.levels:
        axes = [(sips.graph, count) for count in (sips.shape or (sips.count,))[::-1]]
    else:
        for level in levels_of_network(sips).levels:
            if level.spec.graph == "fat_tree":
                yield _has_like_leaves(level.spec.routing, level.spec.spines, level.leaf, lengths)
                yield not (level.leaf % level.below or level.size % level.leaf)
            axes += [(level.spec.graph, count) for count in level.axes]
    for graph, count in axes:
        yield graph not in {"mesh_2d", "custom"}
        own = []
        size = 1
        while size < count and left:
            own.append(left.pop(0))
            size *= own[-1]
        yield size == count
        yield graph not in {"ring_1d", "torus_2d"} or len(own) <= 1
    yield not left


def _has_like_leaves(routing: str, spines: int, leaf: int, lengths: list[int]) -> bool:
    """Whether moving devices moves the spines that lead to them, all of which are used equally."""
    if spines == 1:
        return True
    if routing != "static" or leaf % spines:
        return False
    unit = 1
    for length in lengths:
        if unit == spines or (spines % unit == 0 and length % (spines // unit) == 0):
            return True
        unit *= length
    return unit == spines
