"""What ranks wait for: something that happens once, or an instant of virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.base.units import Instant
    from rankwise.simranks.world.ranks import Strand


class Gate:
    """Something that ranks wait for, and that happens once.

    Attributes:
        is_of_peers: whether other ranks open it, in another way than by a call of a group.
    """

    is_of_peers = False

    __slots__ = ("_waiters", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._waiters: list[Strand] = []

    def open(self) -> None:
        """Let it happen: the waiting ranks become ready, in the order in which they came."""
        self.is_open = True
        waiters, self._waiters = self._waiters, []
        if waiters:
            waiters[0].rank.scheduler.make_ready(*waiters)

    def describe(self) -> str:
        """Say what is waited for, after `waits for`."""
        return "something"

    def label(self) -> str:
        """Name it."""
        return self.describe()

    def admit(self, strand: Strand) -> None:
        """Take note of a strand that waits."""
        self._waiters.append(strand)


class VirtualTimer(Gate):
    """An instant of virtual time.

    Attributes:
        is_deadline: whether it only limits a wait for something else.
    """

    __slots__ = ("instant", "is_cancelled", "is_deadline")

    def __init__(self, instant: Instant) -> None:
        super().__init__()
        self.instant = instant
        self.is_cancelled = False
        self.is_deadline = False

    def describe(self) -> str:
        """Say when."""
        return f"virtual time {self.instant / 1e9:g} s"


class SignalGate(Gate):
    """A signal: it opens no gate, but makes the rank ready that gets it."""

    __slots__ = ()

    def describe(self) -> str:
        """Say what."""
        return "a signal"
