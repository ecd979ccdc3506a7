"""Collectives of numpy programs, written down for a comparison (`rankwise diff`)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rankwise.base.units import Duration
from rankwise.collectives.calls import AgreedCall, describe
from rankwise.collectives.ordered_reductions import Reduction
from rankwise.collectives.transport import Flat, Transport
from rankwise.simranks.world.rank_events import EventRecorder, Plain, present_recorder

GROUP = "rankwise.collectives"


class RecordedTransport:
    """Another transport, whose operations are recorded; a `Transport`."""

    def __init__(self, transport: Transport, recorder: EventRecorder) -> None:
        self._transport = transport
        self._recorder = recorder
        self._call = describe("barrier")
        self.rank = transport.rank
        self.size = transport.size

    @property
    def begun(self) -> int:
        """How many operations this rank has begun."""
        return self._transport.begun

    def begin(self, call: AgreedCall, patience: Duration) -> None:
        """Remember what is called."""
        self._call = call
        self._transport.begin(call, patience)

    def all_reduce(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        """Fold all sources."""
        self._record(source, result, lambda: self._transport.all_reduce(source, result, reduction))

    def reduce_scatter(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        """Fold all sources, and share the result out."""
        self._record(
            source, result, lambda: self._transport.reduce_scatter(source, result, reduction)
        )

    def all_gather(self, source: Flat, result: Flat) -> None:
        """Put all sources one after the other."""
        self._record(source, result, lambda: self._transport.all_gather(source, result))

    def all_to_all(self, source: Flat, result: Flat) -> None:
        """Give each rank its part."""
        self._record(source, result, lambda: self._transport.all_to_all(source, result))

    def broadcast(self, source: Flat, result: Flat, root: int) -> None:
        """Give the source of `root` to all; what the others bring does not matter."""
        brought = source if root == self.rank else None
        self._record(brought, result, lambda: self._transport.broadcast(source, result, root))

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._record(None, None, self._transport.barrier)

    def withdraw(self, reason: str, *, lost_peer: bool = False) -> None:
        """Tell the peers that this rank gave up."""
        self._transport.withdraw(reason, lost_peer=lost_peer)

    def close(self) -> None:
        """Let go of all resources."""
        self._transport.close()

    def _record(
        self, source: Flat | None, result: Flat | None, operation: Callable[[], None]
    ) -> None:
        words = f"{self._call.numbered(self._recorder.numbered(GROUP))} in group {GROUP}"
        self._recorder.note(f"{words}: its input", plains(source))
        operation()
        self._recorder.note(f"{words}: its output", plains(result))


def plains(*arrays: Flat | None) -> list[Plain]:
    """What of arrays can be compared."""
    return [(each.tobytes(), str(each.dtype), each.shape) for each in arrays if each is not None]


def part_of_array(value: Any) -> dict[str, Plain] | None:
    """What of an array, or of a number of numpy's, can be compared."""
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return {"": plains(np.asarray(value))[0]}
    return None


def recorded(transport: Transport) -> Transport:
    """The transport itself, or one that records, if this rank is recorded."""
    recorder = present_recorder()
    return transport if recorder is None else RecordedTransport(transport, recorder)
