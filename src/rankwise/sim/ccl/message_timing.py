"""How long collectives take on a plain alpha-beta network, message by message.

The machine of `rankwise.sim.hardware` moves chunks through engines and memories. Here is the level
above, for questions about thousands of ranks: a message costs `latency + size / bandwidth` per link
that it crosses, links serve one message at a time, and a rank goes on when what it waits for has
come. Ring, direct and halving-doubling are computed round by round (`message_rounds`), the double
binary tree by an event queue (`message_trees`).

**Dimensions.** A system may be a product of dimensions, the first of which varies fastest with the
rank. An all-reduce then scatters and reduces along every dimension but the last, all-reduces along
the last, and gathers back. The data is cut into `chunks` that follow each other through the
dimensions; a dimension works on one chunk at a time, in the order in which they come to it.

**Reading other simulators' figures.** ASTRA-sim's gigabyte, for bandwidths, is 2**30 bytes; hand it
over as `bandwidth_gbps=50 * 1.073741824`, its `endpoint-delay` and `local-mem-bw` as `MessageCosts`
with `reductions="astra_sim"`. Its times then come out within 0.5 %, with and without congestion: it
cuts each delay down to whole nanoseconds. Its charge for a reduction is not ours; see
`MessageCosts.reductions`.
"""

from typing import NamedTuple

import numpy as np

from rankwise.base.errors import ConfigError
from rankwise.sim.ccl.message_model import (
    Algorithm,
    Chunk,
    Collective,
    Dimension,
    DimensionModel,
    Indexes,
    MessageCosts,
    PlacedWiring,
    Rooted,
    Wiring,
)
from rankwise.sim.ccl.message_rounds import RoundNetwork
from rankwise.sim.ccl.message_trees import TreeNetwork
from rankwise.sim.hardware.faults import Damage
from rankwise.sim.hardware.specification import SipsSpec

__all__ = [
    "Algorithm",
    "Collective",
    "CollectiveTime",
    "Dimension",
    "MessageCosts",
    "collective_time",
    "placed_time",
]


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

    Raises:
        ConfigError: there is nothing to time, or an algorithm is not for this collective.
    """
    if size < 1 or chunks < 1 or not dimensions:
        raise ConfigError(f"cannot time {size} bytes in {chunks} chunks on {dimensions}")
    costs = costs or MessageCosts()
    rank_count = int(np.prod([dimension.count for dimension in dimensions]))
    stride, networks = 1, []
    for dimension in dimensions:
        networks.append(_network(Wiring(dimension, stride, rank_count, costs)))
        stride *= dimension.count
    phases = _phases(collective, dimensions)
    waiting = [Chunk(-(-size // chunks), np.zeros(rank_count, np.int64)) for _ in range(chunks)]
    if len(phases) == 1:
        networks[0].run_phase(collective, waiting)
    else:
        _run_phases(phases, networks, waiting)
    return CollectiveTime(
        max(int(chunk.ready.max()) for chunk in waiting),
        sum(network.wiring.messages for network in networks),
        tuple(_used(network.wiring.link_bytes) for network in networks),
    )


_AS_THE_MACHINE = MessageCosts(cut_through=True)
NO_DAMAGE = Damage({}, frozenset())


def placed_time(
    collective: Collective | Rooted,
    size: int,
    sips: SipsSpec,
    homes: tuple[int, ...],
    algorithm: Algorithm,
    *,
    damage: Damage = NO_DAMAGE,
) -> int:
    """Picoseconds of a collective between some devices of an otherwise idle machine.

    Args:
        collective: which one.
        size: bytes that each member puts in; of a scatter, that each takes out.
        sips: what connects the devices; messages cut through, as on the machine itself.
        homes: the device of each member, the root's first.
        algorithm: how they go about it; `rooted` for what has a root, and for barriers.
        damage: what faults have done to the links.

    Raises:
        Unreachable: links have died, and no way is left between two members.
    """
    chunk = Chunk(size, np.zeros(len(homes), np.int64))
    RoundNetwork(PlacedWiring(sips, homes, algorithm, _AS_THE_MACHINE, damage)).run_phase(
        collective, [chunk]
    )
    return int(chunk.ready.max())


def _network(wiring: Wiring) -> DimensionModel:
    if wiring.dimension.algorithm == "double_binary_tree":
        return TreeNetwork(wiring)
    return RoundNetwork(wiring)


def _run_phases(
    phases: list[tuple[int, Collective]], networks: list[DimensionModel], waiting: list[Chunk]
) -> None:
    """Take every chunk through all phases, at each step the one that can go on first.

    Of those that wait for one dimension, that is the one that came to it first.
    """

    def turn(chunk: Chunk) -> tuple[int, int]:
        network = networks[phases[chunk.phase][0]]
        return network.could_start(chunk.ready), int(chunk.ready.max())

    while any(chunk.phase < len(phases) for chunk in waiting):
        chunk = min((each for each in waiting if each.phase < len(phases)), key=turn)
        dimension_index, kind = phases[chunk.phase]
        networks[dimension_index].run_phase(kind, [chunk])
        chunk.phase += 1


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


def _used(link_bytes: Indexes) -> Indexes:
    return link_bytes[link_bytes > 0]
