"""The holders of the heap's bytes: scopes, and the unfinished tasks that touch them.

An allocation that does not fit waits while tasks of closed scopes hold memory, and is refused when
only open scopes do: nothing that happens could free it.
"""

from bisect import bisect_right
from collections.abc import Sequence

from rankwise.base.errors import LocalProtocolError
from rankwise.base.units import format_bytes
from rankwise.core.tree.heap import Heap
from rankwise.core.tree.state import Slab
from rankwise.core.tree.vocabulary import (
    HOST,
    Access,
    AllocationGranted,
    AllocationRefused,
    Discard,
    Effect,
)

SCOPE_DEPTH_MAX = 64


class TaskMemory:
    """The heap with its slabs, and the scopes of the present run; orders go to `effects`."""

    def __init__(self, heap: Heap, effects: list[Effect]) -> None:
        self._heap = heap
        self._effects = effects
        self._slabs: list[Slab] = []
        self._starts: list[int] = []
        self.scope_depth = 1
        """The run's own scope is always open."""
        self.wanted_bytes: int | None = None
        """The size of the allocation that waits; None if none does."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been given out."""
        return not self._slabs

    def open_scope(self) -> None:
        """Let what is allocated from now on live until this scope is closed."""
        if self.scope_depth > SCOPE_DEPTH_MAX:
            raise LocalProtocolError(
                f"scopes are nested deeper than {SCOPE_DEPTH_MAX}",
                hint="close scopes in the function that opens them: with orch.scope(): …",
            )
        self.scope_depth += 1

    def close_scope(self) -> None:
        """Let go of what the innermost scope holds."""
        if self.scope_depth == 1:
            raise LocalProtocolError("a scope was closed, but none is open")
        for slab in self._slabs and [s for s in self._slabs if s.scope_depth == self.scope_depth]:
            slab.scope_depth = 0
            if slab.holders == 0:
                self._free(slab)
        self.scope_depth -= 1

    def request(self, size_bytes: int) -> AllocationGranted | None:
        """Grant bytes, refuse them, or want them until `retry` can do either."""
        if self.wanted_bytes is not None:
            raise LocalProtocolError("memory was requested while another request waits for memory")
        self.wanted_bytes = Heap.rounded(size_bytes)
        return self.retry()

    def retry(self) -> AllocationGranted | None:
        """See whether what is wanted can be had by now, or never; what was granted."""
        size_bytes = self.wanted_bytes
        if size_bytes is None:
            return None
        address = self._heap.take(size_bytes)
        if address is not None:
            self.wanted_bytes = None
            place = bisect_right(self._starts, address)
            self._starts.insert(place, address)
            self._slabs.insert(place, Slab(address, size_bytes, self.scope_depth))
            granted = AllocationGranted(address, size_bytes)
            self._effects.append(granted)
            return granted
        is_on_its_way = any(slab.scope_depth == 0 for slab in self._slabs)
        if not is_on_its_way or size_bytes > self._heap.capacity_bytes:
            self.wanted_bytes = None
            self._effects.append(AllocationRefused(self._why_full(size_bytes)))
        return None

    def hold(self, accesses: Sequence[Access]) -> list[Slab]:
        """Hold all slabs that these accesses touch; give them to `let_go` once."""
        held: list[Slab] = []
        for access in accesses:
            if access.space != HOST:
                continue
            place = max(0, bisect_right(self._starts, access.start) - 1)
            while place < len(self._slabs) and self._slabs[place].address < access.end:
                slab = self._slabs[place]
                place += 1
                if access.start < slab.address + slab.size_bytes:
                    slab.holders += 1
                    held.append(slab)
        return held

    def let_go(self, slabs: Sequence[Slab]) -> None:
        """Free what is not held any more."""
        for slab in slabs:
            slab.holders -= 1
            if slab.holders == 0 and slab.scope_depth == 0:
                self._free(slab)

    def free_all(self) -> None:
        """Begin anew, with only the run's own scope open."""
        if self._slabs:
            for slab in list(self._slabs):
                self._free(slab)
        self.scope_depth = 1
        self.wanted_bytes = None

    def _free(self, slab: Slab) -> None:
        place = bisect_right(self._starts, slab.address) - 1
        del self._starts[place], self._slabs[place]
        self._heap.give_back(slab.address, slab.size_bytes)
        self._effects.append(Discard(slab.address, slab.size_bytes))

    def _why_full(self, size_bytes: int) -> str:
        wanted, capacity = format_bytes(size_bytes), format_bytes(self._heap.capacity_bytes)
        if size_bytes > self._heap.capacity_bytes:
            return f"{wanted} were asked for, the heap has {capacity}"
        held: dict[int, int] = {}
        for slab in self._slabs:
            held[slab.scope_depth] = held.get(slab.scope_depth, 0) + slab.size_bytes
        holders = [
            f"the open scope at depth {depth} holds {format_bytes(size)}"
            for depth, size in sorted(held.items())
        ]
        free = format_bytes(self._heap.free_bytes)
        return (
            f"{wanted} in one piece were asked for, {free} of the heap's {capacity} are free, "
            f"and nothing that happens can free more: {', '.join(holders)}"
        )
