"""Memory that devices share: allocations of which each rank of a group has one, and all know all.

A kernel that is given one of them finds the others by the number of the peer; an address in one of
them may be used from every device of the group, and no other address of another device may.
"""

from bisect import bisect_right, insort
from typing import NamedTuple

from rankwise.base.errors import LocalProtocolError


class Shared(NamedTuple):
    """One symmetric allocation.

    Attributes:
        name: how messages call it.
        bases: where it begins, by rank of the group.
        size: how many bytes each rank has of it.
    """

    name: str
    bases: tuple[int, ...]
    size: int


class Peers:
    """The symmetric allocations of a machine, by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._shared: dict[int, tuple[Shared, int]] = {}

    def share(self, shared: Shared) -> None:
        """Let the devices of a group reach each other's part of an allocation."""
        for place, base in enumerate(shared.bases):
            if base not in self._shared:
                insort(self._starts, base)
            self._shared[base] = (shared, place)

    def forget(self, address: int) -> None:
        """Share the allocation that begins at an address no longer; nothing if none does."""
        shared, _place = self._shared.get(address, (None, 0))
        for base in () if shared is None else shared.bases:
            if self._shared.pop(base, None) is not None:
                self._starts.remove(base)

    def around(self, address: int) -> tuple[Shared, int] | None:
        """The allocation that an address lies in, and whose part it is; None if in none."""
        at = bisect_right(self._starts, address)
        if not at:
            return None
        base = self._starts[at - 1]
        shared, place = self._shared[base]
        return (shared, place) if address < base + shared.size else None

    def twin(self, address: int, rank: int) -> int:
        """The address at a rank that corresponds to one here.

        Raises:
            LocalProtocolError: the address is not in symmetric memory, or there is no such rank.
        """
        found = self.around(address)
        if found is None:
            raise LocalProtocolError(
                f"address {address:#x} is not in symmetric memory",
                hint="allocate with symm_mem.empty, and call symm_mem.rendezvous on every rank",
            )
        shared, place = found
        if not 0 <= rank < len(shared.bases):
            raise LocalProtocolError(
                f"{shared.name} has no part at rank {rank}: its group has {len(shared.bases)}"
                " ranks",
                hint="peers count in the group of the rendezvous, dl.rank() among all ranks",
            )
        return shared.bases[rank] + address - shared.bases[place]
