"""Collectives of all ranks of a job: shared memory within a node, messages between nodes.

The ranks with one number on their nodes are a *rail*: each of them has a connection to each other.
Where all nodes have equally many ranks, long arrays use all rails, each for a part; otherwise, and
for short ones, the first ranks of the nodes speak for the others.

Reductions fold the ranks of each node first, in their order, and then the nodes, in theirs:
`(r0 + r1) + (r2 + r3)` on two nodes of two. All ranks get the same bits.

A peer that dies or gives up is noticed by those who wait for it: on its node through the segment,
on its rail by the connection. They give up in turn, on their node and on their rail, and so all
ranks of an operation learn that it has come to nothing, and from whom it went out.
"""

import msgspec
import numpy as np

from rankwise.base.units import Duration
from rankwise.collectives.calls import AgreedCall
from rankwise.collectives.connecting import Connector, RankEndpoint, places_by_node
from rankwise.collectives.ordered_reductions import Reduction
from rankwise.collectives.tcp import TcpTransport
from rankwise.collectives.transport import Flat, Transport

_SMALL_BYTES = 1 << 16
"""Up to here one rank speaks for its node: it saves two barriers on each."""


class NodesTransport:
    """The transport of all ranks of a job, over that of its node's; which it owns."""

    def __init__(self, local: Transport, here: RankEndpoint) -> None:
        self.rank = here.rank
        self.size = here.size
        self._here = here
        self._local = local
        self._rail: TcpTransport | None = None
        self._counts: list[int] = []
        """How many ranks each node has; empty until they are connected."""
        self._is_even = True

    @property
    def begun(self) -> int:
        """How many operations this rank has begun."""
        return self._local.begun

    def begin(self, call: AgreedCall, patience: Duration) -> None:
        """Announce an operation; before the first, all ranks are connected."""
        self._local.begin(call, patience)
        if not self._counts:
            self._connect(call, patience)
        if self._rail is not None:
            self._rail.begin(call, patience)

    def _connect(self, call: AgreedCall, patience: Duration) -> None:
        connector = Connector(self._here, call.numbered(1), patience)
        connections = connector.connect()
        nodes = places_by_node(connector.places)
        self._counts = [len(nodes[node]) for node in sorted(nodes)]
        self._is_even = connector.is_even
        if connections:
            number = self._here.local_rank
            ranks = [nodes[node][number].rank for node in sorted(nodes)]
            self._rail = TcpTransport(self._here.node, ranks, connections)

    @property
    def _speaker(self) -> TcpTransport | None:
        """The first rail, if this is the rank that speaks for its node."""
        return self._rail if self._here.local_rank == 0 else None

    def all_reduce(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        """Fold all sources; every rank gets the whole."""
        if (only := self._only_rail()) is not None:
            only.all_reduce(source, result, reduction)
            return
        undivided = msgspec.structs.replace(reduction, divides=False)
        count = self._local.size
        if not self._is_even or source.nbytes <= _SMALL_BYTES:
            self._all_reduce_by_speakers(source, result, undivided)
        else:
            most = source.size // count * count
            part = np.empty(most // count, source.dtype)
            self._local.reduce_scatter(source[:most], part, undivided)
            self._its_rail.all_reduce(part, part, undivided)
            self._local.all_gather(part, result[:most])
            if most < source.size:
                self._all_reduce_by_speakers(source[most:], result[most:], undivided)
        self._divide(result, reduction)

    def _all_reduce_by_speakers(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        self._local.all_reduce(source, result, reduction)
        if self._speaker is not None:
            self._speaker.all_reduce(result, result, reduction)
        self._local.broadcast(result, result, 0)

    def reduce_scatter(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        """Fold all sources; rank r gets the r-th of `size` equal parts."""
        if (only := self._only_rail()) is not None:
            only.reduce_scatter(source, result, reduction)
            return
        undivided = msgspec.structs.replace(reduction, divides=False)
        if self._is_even:
            part = np.empty(source.size // self._local.size, source.dtype)
            self._local.reduce_scatter(self._by_number(source), part, undivided)
            self._its_rail.reduce_scatter(part, result, undivided)
        else:
            whole = np.empty_like(source)
            self._all_reduce_by_speakers(source, whole, undivided)
            np.copyto(result, whole.reshape(self.size, -1)[self.rank])
        self._divide(result, reduction)

    def all_gather(self, source: Flat, result: Flat) -> None:
        """Put all sources one after the other, in the order of the ranks."""
        if (only := self._only_rail()) is not None:
            only.all_gather(source, result)
            return
        if not self._is_even:
            self._all_gather_by_speakers(source, result)
            return
        nodes, count = len(self._counts), self._local.size
        column = np.empty(nodes * source.size, source.dtype)
        self._its_rail.all_gather(source, column)
        gathered = np.empty_like(result)
        self._local.all_gather(column, gathered)
        by_number = gathered.reshape(count, nodes, source.size)
        np.copyto(result.reshape(nodes, count, source.size), by_number.transpose(1, 0, 2))

    def _all_gather_by_speakers(self, source: Flat, result: Flat) -> None:
        most, own = max(self._counts), self._local.size
        padded = np.zeros(most * source.size, source.dtype)
        self._local.all_gather(source, padded[: own * source.size])
        everything = np.empty(len(self._counts) * padded.size, source.dtype)
        if self._speaker is not None:
            self._speaker.all_gather(padded, everything)
        self._local.broadcast(everything, everything, 0)
        rows = everything.reshape(len(self._counts), -1)
        filled = [row[: count * source.size] for row, count in zip(rows, self._counts, strict=True)]
        np.concatenate(filled, out=result)

    def all_to_all(self, source: Flat, result: Flat) -> None:
        """Give the r-th of `size` equal parts to rank r, in the order of the ranks."""
        if (only := self._only_rail()) is not None:
            only.all_to_all(source, result)
            return
        if not self._is_even:
            everything = np.empty(self.size * source.size, source.dtype)
            self._all_gather_by_speakers(source, everything)
            parts = everything.reshape(self.size, self.size, -1)
            np.copyto(result.reshape(self.size, -1), parts[:, self.rank])
            return
        # First to the rank on this node that is on the rail of the receiver, then along the rail.
        nodes, count = len(self._counts), self._local.size
        collected = np.empty_like(source)
        self._local.all_to_all(self._by_number(source), collected)
        by_node = collected.reshape(count, nodes, -1).transpose(1, 0, 2)
        self._its_rail.all_to_all(by_node.reshape(-1), result)

    def broadcast(self, source: Flat, result: Flat, root: int) -> None:
        """Give the source of `root` to all."""
        if (only := self._only_rail()) is not None:
            only.broadcast(source, result, root)
            return
        node = 0
        while root >= self._counts[node]:
            root -= self._counts[node]
            node += 1
        if self._here.node == node:
            self._local.broadcast(source, result, root)
        if self._speaker is not None:
            self._speaker.broadcast(result, result, node)
        if self._here.node != node:
            self._local.broadcast(result, result, 0)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        if (only := self._only_rail()) is not None:
            only.barrier()
            return
        self._local.barrier()
        if self._speaker is not None:
            self._speaker.barrier()
        self._local.barrier()

    def withdraw(self, reason: str, *, lost_peer: bool = False) -> None:
        """Tell the peers that this rank gave up in an operation."""
        self._local.withdraw(reason, lost_peer=lost_peer)
        if self._rail is not None:
            self._rail.withdraw(reason, lost_peer=lost_peer)

    def close(self) -> None:
        """End all connections, and let go of the node's memory."""
        if self._rail is not None:
            self._rail.close()
        self._local.close()

    def _only_rail(self) -> TcpTransport | None:
        """The rail, where every node has one rank only: it is the whole way then."""
        if not self._is_even or self._local.size > 1:
            return None
        self._local.barrier()  # a sign of life, for the agent
        return self._its_rail

    @property
    def _its_rail(self) -> TcpTransport:
        assert self._rail is not None, "where nodes are even, every rank has a rail"
        return self._rail

    def _by_number(self, source: Flat) -> Flat:
        """The parts of a source, those for equal numbers on the nodes next to each other."""
        parts = source.reshape(len(self._counts), self._local.size, -1)
        return parts.transpose(1, 0, 2).reshape(-1)

    def _divide(self, result: Flat, reduction: Reduction) -> None:
        if reduction.divides:
            np.divide(result, self.size, out=result)
