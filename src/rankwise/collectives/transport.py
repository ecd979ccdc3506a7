"""What a communicator needs from the transport that carries its data.

A transport moves flat arrays. It knows nothing of shapes, of defaults or of threads: the
`Communicator` has checked all arguments, made the arrays contiguous and one-dimensional, and
calls one method at a time. There are transports over shared memory, by messages between nodes, of
both together, and in virtual time.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rankwise.base.units import Duration
from rankwise.collectives.calls import AgreedCall
from rankwise.collectives.ordered_reductions import Reduction, fold
from rankwise.core.matching import MemberCalls

Flat = NDArray[Any]
"""A contiguous array of one dimension."""


class Transport(Protocol):
    """Carries out one collective operation at a time, together with its peers.

    Each operation begins with `begin`, which says what this rank is about to do. Operations
    raise `PeerDied`, `CollectiveTimeout` or `CollectiveError` when a peer does not do its part;
    the transport is of no use after that.
    """

    rank: int
    size: int

    @property
    def begun(self) -> int:
        """How many operations this rank has begun, by the numbering of `core.matching`."""
        ...

    def begin(self, call: AgreedCall, patience: Duration) -> None:
        """Announce an operation, in which no wait for a peer may be longer than `patience`."""
        ...

    def all_reduce(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        """Fold all sources; every rank gets the whole. `source` may be `result`."""
        ...

    def reduce_scatter(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        """Fold all sources; rank r gets the r-th of `size` equal parts."""
        ...

    def all_gather(self, source: Flat, result: Flat) -> None:
        """Put all sources one after the other, in the order of the ranks."""
        ...

    def all_to_all(self, source: Flat, result: Flat) -> None:
        """Give the r-th of `size` equal parts to rank r, in the order of the ranks."""
        ...

    def broadcast(self, source: Flat, result: Flat, root: int) -> None:
        """Give the source of `root` to all. `source` may be `result`."""
        ...

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        ...

    def withdraw(self, reason: str, *, lost_peer: bool = False) -> None:
        """Tell the peers that this rank gave up in an operation, so that they do not wait.

        With `lost_peer` it did so because a peer had died: its peers then look for that one.
        """
        ...

    def close(self) -> None:
        """Let go of all resources."""
        ...


class SolitaryTransport:
    """The transport of a world of one rank: all that is to be done is copying."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._calls = MemberCalls()

    @property
    def begun(self) -> int:
        """How many operations this rank has begun."""
        return self._calls.begun

    def begin(self, call: AgreedCall, patience: Duration) -> None:
        """Count the operation: no other rank needs to be told."""
        del patience
        self._calls.begin(call)

    def all_reduce(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        """Fold one source."""
        fold(reduction, [source], result)

    def reduce_scatter(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        """Fold one source, all of which is this rank's part."""
        fold(reduction, [source], result)

    def all_gather(self, source: Flat, result: Flat) -> None:
        """Gather from one rank."""
        np.copyto(result, source)

    def all_to_all(self, source: Flat, result: Flat) -> None:
        """Give the only part to oneself."""
        np.copyto(result, source)

    def broadcast(self, source: Flat, result: Flat, root: int) -> None:
        """Receive from oneself."""
        del root
        np.copyto(result, source)

    def barrier(self) -> None:
        """Wait until all ranks have come."""

    def withdraw(self, reason: str, *, lost_peer: bool = False) -> None:
        """Do nothing: no other rank waits."""

    def close(self) -> None:
        """Nothing is held."""
