"""The memory of a simulated tree: cells that remember which task wrote them from what.

A task reads its cells when it begins and writes them when it ends, each with a digest of its
number and of all that it has read. So two runs have the same values only if every task saw in each
cell what it should have seen.
"""

from collections.abc import Iterable, Sequence

from rankwise.base.seeds import derived_seed
from rankwise.core.tree.vocabulary import Access
from rankwise.drivers.sim.tree.plans import CELL_BYTES

Cell = tuple[int, int]
"""The space and the address of a cell."""


def cells_of(access: Access) -> Iterable[Cell]:
    """The cells that an access touches."""
    return ((access.space, address) for address in range(access.start, access.end, CELL_BYTES))


class Cells:
    """All cells; what was never written is 0."""

    def __init__(self) -> None:
        self.values: dict[Cell, int] = {}

    def read(self, accesses: Sequence[Access]) -> list[int]:
        """What a task that begins sees."""
        return [
            self.values.get(cell, 0)
            for access in accesses
            if access.reads
            for cell in cells_of(access)
        ]

    def write(self, accesses: Sequence[Access], number: int, seen: list[int]) -> None:
        """What a task that ends leaves."""
        value = derived_seed(number, *seen)
        for access in accesses:
            if access.writes:
                for cell in cells_of(access):
                    self.values[cell] = value
