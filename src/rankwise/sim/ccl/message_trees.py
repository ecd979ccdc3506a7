"""The double binary tree, message by message.

Chunks go to the two trees of `tree_allreduce` in turn. Within a tree a chunk moves whole: a leaf
sends it to its parent; an inner node adds what its children send, in any order, and sends the sum
up; the root sends the result down again. Chunks follow each other up and down: a rank takes part in
as many at a time as there are links on the way. So with many chunks the links of an inner node are
what takes time, which carry all of the data twice each way: 2 size / bandwidth, as on the machine
(`message_graph`), where the tree is played from its programs.

`MessageCosts.active_chunks` says otherwise. In ASTRA-sim, one is usual: a rank goes on with the
next chunk when it has the result of the one before, which takes six times as long.

Ranks do different things at different times here, and messages of a later chunk do overtake those
of an earlier one. There are no rounds to compute at once: this is an event queue, with one process
per rank and per message, exact for the chunks that are taken through together.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rankwise.base.errors import ConfigError
from rankwise.core.collectives.algorithms.tree_allreduce import place_in_tree
from rankwise.sim.ccl.message_model import Chunk, Collective, DimensionModel, Picoseconds, Wiring
from rankwise.sim.kernel import Future, Process, Simulator, Steps, all_of


class _TreeRole(NamedTuple):
    """What a rank does in one tree; ranks count over the whole system."""

    parent: int | None
    children: tuple[int, ...]


class TreeNetwork(DimensionModel):
    """One dimension whose ranks all-reduce along a double binary tree."""

    def __init__(self, wiring: Wiring) -> None:
        super().__init__(wiring)
        self._chunks_taken = 0
        self._roles = [
            [self._role(rank, tree) for rank in range(len(wiring.member))] for tree in (0, 1)
        ]

    def _role(self, rank: int, tree: int) -> _TreeRole:
        wiring = self.wiring
        start = int(wiring.group_start[rank])
        parent, children = place_in_tree(int(wiring.member[rank]), wiring.dimension.count, tree)
        return _TreeRole(
            None if parent is None else start + parent * wiring.stride,
            tuple(start + child * wiring.stride for child in children),
        )

    def run_phase(self, kind: Collective, chunks: list[Chunk]) -> None:
        """Take chunks through, one after the other; sets when their ranks are ready."""
        if kind != "all_reduce":
            raise ConfigError(
                f"double_binary_tree has no {kind}",
                hint="it all-reduces, in the last dimension only; use ring, direct or"
                " halving_doubling for the others",
            )
        passage = _Passage(self.wiring, self._roles, chunks, self._chunks_taken)
        self._free = passage.carry_out(self._free)
        self._chunks_taken += len(chunks)


class _Passage:
    """Chunks on their way through the trees."""

    def __init__(
        self, wiring: Wiring, roles: list[list[_TreeRole]], chunks: list[Chunk], chunks_before: int
    ) -> None:
        self._wiring = wiring
        self._roles = roles
        self._chunks = chunks
        self._chunks_before = chunks_before
        # One on each link of the way up and down again, over a switch, and one at each end: with
        # fewer, links idle; with more, what goes up holds up what comes down.
        depth = (wiring.dimension.count - 1).bit_length()
        self._active = wiring.costs.active_chunks or 4 * (depth + 1)
        self._simulator = Simulator()
        self._arrivals: dict[tuple[int, int, int], Future] = {}

    def carry_out(self, free: Picoseconds) -> Picoseconds:
        """Set when each chunk's ranks are ready; return when they have done with the last."""
        begins = [chunk.ready for chunk in self._chunks]
        for chunk in self._chunks:
            chunk.ready = np.zeros_like(free)
        for rank, instant in enumerate(free.tolist()):
            parts: list[Process] = []
            for number, begin in enumerate(begins):
                before = parts[number - self._active] if number >= self._active else None
                steps = self._take_part(rank, number, max(instant, int(begin[rank])), before)
                parts.append(self._simulator.process(steps, f"rank {rank}"))
        self._simulator.run()
        return self._chunks[-1].ready

    def _take_part(self, rank: int, number: int, start: int, before: Process | None) -> Steps:
        endpoint = self._wiring.endpoint
        also_down = self._wiring.costs.reductions == "astra_sim"
        chunk = self._chunks[number]
        if before is not None:
            yield before
        parent, children = self._roles[(self._chunks_before + number) % 2][rank]
        if start > self._simulator.now:
            yield start - self._simulator.now
        if children:
            yield all_of([self._receive(number, child, rank, combines=True) for child in children])
        elif endpoint:
            yield endpoint
        if parent is not None:
            self._send(number, rank, parent)
            yield self._receive(number, parent, rank, combines=bool(children) and also_down)
        for child in children:
            self._send(number, rank, child)
        chunk.ready[rank] = self._simulator.now

    def _send(self, number: int, source: int, destination: int) -> None:
        self._simulator.process(self._travel(number, source, destination))

    def _travel(self, number: int, source: int, destination: int) -> Steps:
        """Let a message cross its links, each of which serves one at a time."""
        wiring, size = self._wiring, self._chunks[number].size
        latency = int(wiring.latency)
        duration = wiring.rate.time_for(size)
        wiring.messages += 1
        for link in self._links(source, destination):
            wiring.link_bytes[link] += size
            if wiring.costs.contention:
                now = self._simulator.now
                end = max(now, int(wiring.link_free[link])) + duration
                wiring.link_free[link] = end
                yield end - now + latency
            else:
                yield latency
        if not wiring.costs.contention:
            yield duration
        self._arrival(number, source, destination).succeed()

    def _links(self, source: int, destination: int) -> Iterator[int]:
        wiring = self._wiring
        first = int(wiring.first_link[source])
        ends = int(wiring.member[source]), int(wiring.member[destination])
        return (first + link for link in wiring.links_between(*ends))

    def _receive(self, number: int, source: int, rank: int, *, combines: bool) -> Process:
        return self._simulator.process(
            self._taking_in(self._arrival(number, source, rank), number, combines=combines)
        )

    def _taking_in(self, arrival: Future, number: int, *, combines: bool) -> Steps:
        yield arrival
        wiring = self._wiring
        reduced = self._chunks[number].size if combines else 0
        yield wiring.endpoint + wiring.reduction(reduced)

    def _arrival(self, number: int, source: int, destination: int) -> Future:
        key = (number, source, destination)
        future = self._arrivals.get(key)
        if future is None:
            future = self._arrivals[key] = self._simulator.future()
        return future
