"""What ranks do together takes on a fabric that exists, in picoseconds.

The choice is NCCL's: of the algorithms that can do a collective, the one that takes least.

- **ring**: each rank passes its share on; between nodes each rail has a ring of its own.
- **tree** (all-reduce over several nodes): a chain or a reduction inside of each node, a double
  binary tree between nodes.
- **multicast** (all-reduce inside of one node): the switch reduces (NVLS).
- **direct** (all-to-all): each rank sends to each other.

**gloo** has rings alone, and copies. All-gather copies what a rank puts in, and the whole out of
one buffer. Reduce-scatter is an all-reduce of a copy, of which a part is copied out. The copies
take their bytes at the rate of elementwise operations.

A collective takes the start of the outermost level that it crosses, its steps at their levels'
latency, and its bytes at the rate of the slowest level. Small messages use a protocol with flags,
whose rate is a part of that of large ones: the sum of both terms is smooth, as measured curves are.
"""

import math
from collections import Counter
from functools import lru_cache

from rankwise.simranks.prediction.machines.description import LevelSpec, RealMachine

_PER_SECOND = 1e12
_RAMP = 5.0
"""How many starts of a collective its pipelines take to fill, if the message is large."""
_COPYING = frozenset({"all_gather", "reduce_scatter"})
"""The collectives that gloo copies for."""
_BARE = "all_gather without copies"
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter", "barrier"})


class FabricPrices:
    """The prices of collectives and messages between devices of a machine.

    Args:
        machine: it.
        per_node: how many of a node's devices have a rank; rank r is on node r divided by that.
    """

    def __init__(self, machine: RealMachine, per_node: int) -> None:
        self._levels = machine.levels
        self._per_node = per_node
        self._is_gloo = machine.collectives == "gloo"
        device = machine.device
        self._copied = device.bandwidth.value * 1e9 * device.fitted.memory.value / 2
        self._known = lru_cache(maxsize=None)(self._time)

    def time(self, kind: str, size: int, ranks: tuple[int, ...], begin: int = 0) -> int:
        """How long a collective takes; see `NetworkCosts.time`."""
        del begin
        nodes = Counter(rank // self._per_node for rank in ranks)
        return self._known(kind, size, len(nodes), max(nodes.values()), len(ranks))

    def message_time(self, source: int, target: int, size: int, begin: int = 0) -> int:
        """How long a message takes from one rank to another."""
        del begin
        if source == target:
            return 0
        is_inside = source // self._per_node == target // self._per_node
        level = self._levels[0] if is_inside else self._levels[-1]
        seconds = _start(level) + _latency(level) + size / _rate(level)
        return round(seconds * _PER_SECOND)

    def choices(self, kind: str, size: int, nodes: int, local: int) -> dict[str, float]:
        """By algorithm, how many seconds it takes: what `time` takes the least of."""
        count = nodes * local
        if count == 1:
            return {"ring": 0.0}
        return self._ways(kind, size, nodes, local, count)

    def _time(self, kind: str, size: int, nodes: int, local: int, count: int) -> int:
        if count == 1:
            return 0
        ways = self._ways(kind, size, nodes, local, count)
        return round(min(ways.values()) * _PER_SECOND)

    def _ways(self, kind: str, size: int, nodes: int, local: int, count: int) -> dict[str, float]:
        if self._is_gloo and kind in _COPYING:
            return {"ring": self._copying(kind, size, nodes, local, count)}
        inner, outer = self._levels[0], self._levels[-1]
        crossed = inner if nodes == 1 else outer
        start = _start(crossed)
        # What a rank's own link carries while the whole of the collective moves.
        if kind == "all_to_all":
            far = (count - local) / count
            seconds = max(size * (local - 1) / count / _rate(inner), size * far / _rate(outer))
            return {"direct": start + (count - 1) * _latency(crossed) / 4 + seconds}
        hops_inner = nodes * (local - 1)
        hops_outer = nodes if nodes > 1 else 0
        steps = hops_inner * _latency(inner) + hops_outer * _latency(outer)
        # Each device of a node has a rail of its own, and a ring runs over each of them.
        rate = _rate(inner) if nodes == 1 else min(_rate(inner), local * _rate(outer))
        if local == 1 and nodes > 1:
            rate = _rate(outer)
        if kind in {"all_gather", "reduce_scatter", _BARE}:
            whole = size * count if kind == "all_gather" else size
            moving = whole * (count - 1) / count / rate
            return {"ring": start + steps + moving + self._ramp(start, moving)}
        if kind in _ROOTED:
            depth = _tree_latency(inner, outer, nodes, local)
            return {"ring": start + depth + size / rate}
        moving = 2 * size * (count - 1) / count / rate
        ways = {"ring": start + 2 * steps + moving + self._ramp(start, moving)}
        if self._is_gloo:
            return ways
        if nodes == 1 and inner.multicast is not None:
            seconds = 2 * size * (count - 1) / count / _multicast(inner)
            ways["multicast"] = start + 2 * _latency(inner) + seconds + self._ramp(start, seconds)
        if nodes > 1:
            # Two nodes exchange; among more, an inner node of the tree takes and gives twice.
            crossings = 1 if nodes == 2 else 2
            across = crossings * size / (local * _rate(outer))
            chain = _multicast(inner) if inner.multicast is not None else _rate(inner)
            inside = 2 * size * (count - 1) / count / chain if local > 1 else 0.0
            # Pieces follow each other, so both levels are busy at a time.
            seconds = max(across, inside)
            depth = 2 * _tree_latency(inner, outer, nodes, local)
            ways["tree"] = start + depth + seconds + self._ramp(start, seconds)
        return ways

    def _copying(self, kind: str, size: int, nodes: int, local: int, count: int) -> float:
        """Seconds of a collective that gloo makes of another one and of copies."""
        is_gather = kind == "all_gather"
        copied = size + size * count if is_gather else size + size / count
        bare = _BARE if is_gather else "all_reduce"
        ways = self._ways(bare, size * count if is_gather else size, nodes, local, count)
        return min(ways.values()) + copied / self._copied

    def _ramp(self, start: float, seconds: float) -> float:
        """What pipelines take to fill: messages of middle size have too few chunks for it."""
        if self._is_gloo:
            return 0.0
        filling = _RAMP * start
        return 2 * filling * seconds / (filling + 2 * seconds)


def _start(level: LevelSpec) -> float:
    return level.start_us.value * 1e-6


def _latency(level: LevelSpec) -> float:
    return level.latency_us.value * 1e-6


def _rate(level: LevelSpec) -> float:
    return level.bandwidth.value * 1e9 * level.reached.value / level.oversubscription


def _multicast(level: LevelSpec) -> float:
    assert level.multicast is not None, "asked of switches that reduce"
    return level.bandwidth.value * 1e9 * level.multicast.value


def _tree_latency(inner: LevelSpec, outer: LevelSpec, nodes: int, local: int) -> float:
    """Down a tree of nodes, and through a node."""
    inside = 0.0 if local == 1 else (1 if inner.multicast else local - 1) * _latency(inner)
    return math.ceil(math.log2(nodes)) * _latency(outer) + inside if nodes > 1 else inside
