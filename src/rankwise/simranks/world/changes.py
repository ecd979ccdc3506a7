"""Changes of memory that several ranks use, for those that wait for one.

Two kinds wait. A kernel that looks at memory again and again waits for any change. A rank that
waits for a word is told of changes of that word by the rank that writes it; but a kernel does not
know what it has written, so it wakes all of them, and they look. None looks without being told.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

from rankwise.simranks.world.gates import Gate


class MemoryChange(Gate):
    """Any change of memory; `awaited` says what a kernel waits for."""

    is_of_peers = True

    __slots__ = ("_awaited",)

    def __init__(self, awaited: str) -> None:
        super().__init__()
        self._awaited = awaited

    def describe(self) -> str:
        """Say what, and where in the kernel."""
        return self._awaited


class SharedPart(Protocol):
    """Memory of one rank that others use.

    Attributes:
        number: of the rank.
    """

    number: int

    def holds(self, address: int) -> bool:
        """Whether the byte at an address belongs to it."""
        ...


class Changes:
    """The ranks of one world that wait for memory to change.

    Attributes:
        parts: the memory that ranks share, by `owner_of`; it goes with its owner.
        time: when a kernel has changed some last, in picoseconds of its rank; 0 without a machine.
    """

    def __init__(self) -> None:
        self.parts: WeakSet[SharedPart] = WeakSet()
        self.time = 0
        self._kernels: list[Gate] = []
        self._words: list[Gate] = []

    def owner_of(self, address: int) -> int | None:
        """The rank whose shared memory has this address, if it is any's."""
        return next((part.number for part in self.parts if part.holds(address)), None)

    @contextmanager
    def awaited_by_kernel(self, gate: Gate) -> Iterator[None]:
        """Open a gate at the next change, until the block ends."""
        yield from _kept_in(self._kernels, gate)

    @contextmanager
    def awaited_by_rank(self, gate: Gate) -> Iterator[None]:
        """Open a gate at the next change by a kernel, until the block ends."""
        yield from _kept_in(self._words, gate)

    def made_by_rank(self) -> None:
        """A rank has changed a word: wake the ranks that wait for it."""
        _open(self._kernels)

    def made_by_kernel(self, time: int) -> None:
        """A kernel may have changed anything."""
        self.time = max(self.time, time)
        _open(self._kernels)
        _open(self._words)


def _kept_in(gates: list[Gate], gate: Gate) -> Iterator[None]:
    gates.append(gate)
    try:
        yield
    finally:
        gates.remove(gate)


def _open(gates: list[Gate]) -> None:
    for gate in gates:
        if not gate.is_open:
            gate.open()
