"""The door to processes."""

from collections.abc import Sequence
from typing import Protocol


class ProcessHost(Protocol):
    """Makes, signals and sweeps the processes of one gang.

    Every call is an order and returns at once. Its result arrives as a stimulus of
    `rankwise.core.gang.vocabulary`, in the order in which it happened, through the callback that
    the host was made with.
    """

    def spawn(self, local_rank: int, attempt: int) -> None:
        """Make a worker's process: `WorkerSpawned` or `WorkerRefused`, later `WorkerExited`."""
        ...

    def signal(self, local_rank: int, attempt: int, signal: int) -> None:
        """Send a signal to a worker's process group; does nothing when it is gone."""
        ...

    def look_for_progress(self, attempt: int) -> None:
        """Find out when any worker last made progress: `ProgressLooked`."""
        ...

    def look_for_dumps(self, attempt: int) -> None:
        """Find out whose core the kernel is writing: `DumpsLooked`."""
        ...

    def dump_stacks(self, attempt: int) -> None:
        """Make every living worker print its stacks: `StacksDumped`."""
        ...

    def tell(self, local_rank: int, attempt: int, word: str) -> None:
        """Send an order to a worker that can be recovered; it may answer `RecoveryMessageSent`."""
        ...

    def sweep(self, attempt: int, spares: Sequence[int] = ()) -> None:
        """Kill what the attempt's workers left behind, and let nothing more come of it: `Swept`.

        Workers of the local ranks in `spares` live on, with what they have started.
        """
        ...
