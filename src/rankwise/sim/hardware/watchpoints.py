"""Watchpoints: the programs that wait for memory to change, by the bytes that they watch.

Thousands of programs may wait for a signal each, and each signal concerns one of them. So a write
wakes the programs that watch its bytes, and those that watch all memory. A wake-up only means
"written". The program checks its condition again, and waits again if it is false.
"""

from collections.abc import Iterable

from rankwise.sim.kernel import Future

_GRANULE_BYTES = 8
"""A word of the widest type fills one granule. Programs that share a granule are woken together."""


class Watchpoints:
    """The futures that wait for changes of a machine's memory; each happens once.

    Attributes:
        changes: how many changes there were.
    """

    def __init__(self) -> None:
        self._everywhere: list[Future] = []
        self.changes = 0
        self._by_granule: dict[int, list[Future]] = {}

    def watch(self, future: Future, address: int, size: int) -> None:
        """Let a future happen at the next change of some bytes."""
        for granule in _granules(address, size):
            self._by_granule.setdefault(granule, []).append(future)

    def watch_everything(self, future: Future) -> None:
        """Let a future happen at the next change of any byte."""
        self._everywhere.append(future)

    def are_awaited(self) -> bool:
        """Whether a change is waited for."""
        watching = (self._everywhere, *self._by_granule.values())
        return any(not future.is_done for futures in watching for future in futures)

    def changed(self, address: int, size: int) -> None:
        """Let the futures happen that wait for a change of any of these bytes."""
        self.changes += 1
        if not (self._everywhere or self._by_granule):
            return  # most of the time; every store comes here
        awaited, self._everywhere = self._everywhere, []
        for granule in self._watched(_granules(address, size)):
            awaited += self._by_granule.pop(granule)
        for future in awaited:
            if not future.is_done:
                future.succeed()

    def _watched(self, granules: range) -> Iterable[int]:
        if len(granules) < len(self._by_granule):
            return [granule for granule in granules if granule in self._by_granule]
        return [granule for granule in self._by_granule if granule in granules]


def _granules(address: int, size: int) -> range:
    return range(address // _GRANULE_BYTES, -((address + size) // -_GRANULE_BYTES))
