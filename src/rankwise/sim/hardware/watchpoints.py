"""Watchpoints: who waits for memory to change, by the bytes that they watch.

Thousands of programs may wait for a signal each, and each signal that arrives concerns one of them.
So a change wakes those who watch its bytes, and those who watch all memory. Who is woken looks
again, and may wait anew: to be woken says that something was written, not that it is different.
"""

from collections.abc import Iterable

from rankwise.sim.kernel import Event

_GRANULE_BYTES = 8
"""A word of the widest type fills one granule. Who shares a granule is woken together."""


class Watchpoints:
    """The events that wait for changes of a machine's memory; each happens once.

    Attributes:
        changes: how many changes there were.
    """

    def __init__(self) -> None:
        self._everywhere: list[Event] = []
        self.changes = 0
        self._by_granule: dict[int, list[Event]] = {}

    def watch(self, event: Event, address: int, size: int) -> None:
        """Let an event happen at the next change of some bytes."""
        for granule in _granules(address, size):
            self._by_granule.setdefault(granule, []).append(event)

    def watch_everything(self, event: Event) -> None:
        """Let an event happen at the next change of any byte."""
        self._everywhere.append(event)

    def are_awaited(self) -> bool:
        """Whether anybody waits for a change."""
        watching = (self._everywhere, *self._by_granule.values())
        return any(not event.is_done for events in watching for event in events)

    def changed(self, address: int, size: int) -> None:
        """Let the events happen that wait for a change of any of these bytes."""
        self.changes += 1
        awaited, self._everywhere = self._everywhere, []
        for granule in self._watched(_granules(address, size)):
            awaited += self._by_granule.pop(granule)
        for event in awaited:
            if not event.is_done:
                event.succeed()

    def _watched(self, granules: range) -> Iterable[int]:
        if len(granules) < len(self._by_granule):
            return [granule for granule in granules if granule in self._by_granule]
        return [granule for granule in self._by_granule if granule in granules]


def _granules(address: int, size: int) -> range:
    return range(address // _GRANULE_BYTES, -((address + size) // -_GRANULE_BYTES))
