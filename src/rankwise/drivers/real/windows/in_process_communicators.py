"""How ranks of one process join a communicator: simulated ranks, without sockets between them.

Ranks that are processes find each other through the kernel (`rankwise.workers.comm`). A run of many
ranks in one process says so here, and hands them memory that they share already.
"""

from collections.abc import Mapping
from typing import Protocol

from rankwise.base.errors import TreeValueError
from rankwise.base.units import Duration
from rankwise.drivers.real.windows.region import WindowRegion


class CommunicatorMember(Protocol):
    """A rank of a communicator that all ranks have joined."""

    def agree(self, size: int, signal_count: int) -> WindowRegion:
        """The windows that all of them want; returns when all have asked.

        Raises:
            ConfigError: they want different ones.
        """
        ...


class JoinCommunicator(Protocol):
    """Lets the rank that calls this meet others at a path; returns when all have come."""

    def __call__(
        self, rank: int, count: int, path: str, patience: Duration
    ) -> CommunicatorMember | None:
        """None means that the caller is no such rank, but a process.

        Raises:
            ConfigError: they disagree about who they are.
            CollectiveTimeout: not all have come.
        """
        ...


def _nowhere(rank: int, count: int, path: str, patience: Duration) -> CommunicatorMember | None:
    del rank, count, path, patience
    return None


class InProcessCommunicators:
    """The communicators of this process.

    Attributes:
        meet: how ranks join one.
    """

    def __init__(self) -> None:
        self.meet: JoinCommunicator = _nowhere


IN_PROCESS_COMMUNICATORS = InProcessCommunicators()


def different_windows(wishes: Mapping[int, tuple[int, int]]) -> TreeValueError:
    """The error of ranks that want different sizes, or numbers of signals; by rank."""
    ranks = sorted(wishes)
    sizes = ", ".join(f"rank {rank} {wishes[rank][0]}" for rank in ranks)
    if len({size for size, _ in wishes.values()}) > 1:
        return TreeValueError(f"ranks want windows of different sizes: {sizes}")
    signals = ", ".join(f"rank {rank} {wishes[rank][1]}" for rank in ranks)
    return TreeValueError(f"ranks want different numbers of signals: {signals}")
