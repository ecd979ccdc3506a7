"""Signals: 64-bit values that ranks raise for each other, and sleep until they are reached.

Python has no atomic addition of 64 bits, and the kernel's adds only small numbers to 32. So every
rank adds to a word of its own, and the value of a signal is a sum:

    value = base + what rank 0 has added + what rank 1 has added + …      (modulo 2**64)

- `add` stores the sender's own word.
- `set` stores the base, chosen so that the sum is the value wanted. An `add` that races with a
  `set` counts either on top of it or not at all, as if it had come after or before.
- `value` reads the row until it reads the same twice: `eq` may be trusted.

After its store, the sender counts up the receiver's doorbell in the kernel, which is a full barrier
and wakes sleepers in the same breath. A sender that dies between store and ring leaves a receiver
asleep; its death rings as well, and then the value is looked at before the death.

A rank that marks another one dead, or leaves, tells it in the same order: first the fact, then all
doorbells.

Data that a sender has copied before it signals is visible to all that have seen the signal: x86-64
keeps stores in order and loads too; elsewhere `fence` stands between data and signal on both sides.

The board knows words, not memory, so that `tests/simulation` can run it through all interleavings.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, overload

from rankwise.base.units import Instant

MODULUS = 1 << 64
_MASK = MODULUS - 1


class Cells(Protocol):
    """Words of 64 bits, each loaded and stored whole; a `memoryview` cast to "Q" is one."""

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> "SignalRow": ...
    def __setitem__(self, index: int, value: int) -> None:
        """Store one."""
        ...


class SignalRow(Protocol):
    """Some of them next to each other."""

    def tolist(self) -> list[int]:
        """Load each."""
        ...


class Doorbell(Protocol):
    """What `rankwise.drivers.real.futex.FutexWord` offers of a word to sleep on."""

    def look(self) -> int:
        """Load it."""
        ...

    def fence(self) -> None:
        """Keep loads and stores on their side."""
        ...

    def add_and_wake(self) -> None:
        """Count it up, as a full barrier, and wake who sleeps on it."""
        ...

    def sleep(self, seen: int, deadline: Instant) -> None:
        """Sleep while it shows `seen`."""
        ...


class SignalBoard:
    """The signals of all ranks, as one of them uses them."""

    def __init__(
        self,
        cells: Cells,
        doorbells: Sequence[Doorbell],
        rank: int,
        signal_count: int,
    ) -> None:
        """`cells` holds `signal_count` rows per rank; `doorbells` one per rank."""
        self._cells = cells
        self._doorbells = doorbells
        self._doorbell = doorbells[rank]
        self._rank = rank
        self._signal_count = signal_count
        self._row_words = 1 + len(doorbells)
        # Adding loads and stores, between which another thread of this rank must not do the same.
        self._adding = threading.Lock()

    def add(self, signal: int, to: int, value: int) -> None:
        """Add to a signal of rank `to`, after everything that this rank has stored."""
        own = self._row(to, signal) + 1 + self._rank
        doorbell = self._doorbells[to]
        doorbell.fence()
        with self._adding:  # its only writer: no count is lost
            self._cells[own] = self._cells[own] + value & _MASK
        doorbell.add_and_wake()

    def set(self, signal: int, to: int, value: int) -> None:
        """Make a signal of rank `to` be `value`, after everything that this rank has stored."""
        row = self._row(to, signal)
        doorbell = self._doorbells[to]
        doorbell.fence()
        # Many ranks write the base, and none reads it first: as of any plain variable, the last
        # wins.
        self._cells[row] = value - sum(self._snapshot(row)[1:]) & _MASK
        doorbell.add_and_wake()

    def value(self, signal: int) -> int:
        """What a signal of this rank is now."""
        return sum(self._snapshot(self._row(self._rank, signal))) & _MASK

    def added(self, signal: int) -> list[int]:
        """What each rank has added to a signal of this rank."""
        return self._snapshot(self._row(self._rank, signal))[1:]

    def wait(
        self,
        signal: int,
        is_reached: Callable[[int], bool],
        look_around: Callable[[], None],
        clock: Callable[[], int],
        deadline: Instant,
    ) -> int | None:
        """Sleep until a signal of this rank is as wanted; its value, or None after `deadline`.

        `look_around` is called before each sleep, and raises if no signal can come any more.
        """
        doorbell = self._doorbell
        row = self._row(self._rank, signal)
        has_slept = False
        while True:
            # Before the look at the signal: a ring that comes after it changes the doorbell, and
            # the kernel lets this rank sleep only while it shows `seen`. So no wake-up is lost.
            seen = doorbell.look()
            value = sum(self._snapshot(row)) & _MASK
            if is_reached(value):
                doorbell.fence()
                return value
            look_around()
            if has_slept and clock() >= deadline:
                return None
            doorbell.sleep(seen, deadline)
            has_slept = True

    def _row(self, receiver: int, signal: int) -> int:
        return (receiver * self._signal_count + signal) * self._row_words

    def _snapshot(self, row: int) -> list[int]:
        # The sums of ranks only grow: a row that reads the same twice stood like that at one
        # instant, and a sum that never was is not seen.
        load = self._cells[row : row + self._row_words].tolist
        once = load()
        while (again := load()) != once:
            once = again
        return once
