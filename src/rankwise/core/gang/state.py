"""What a gang remembers: its phase, and what it knows of each worker."""

from enum import StrEnum

import msgspec

from rankwise.base.failure import ErrorRecord, ExitStatus
from rankwise.base.units import Instant


class Phase(StrEnum):
    """Where in its life a gang is; machine.py tells how it moves between them."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    DUMPING = "dumping"
    STOPPING = "stopping"
    KILLING = "killing"
    SWEEPING = "sweeping"
    FINISHED = "finished"


class WorkerLife(msgspec.Struct):
    """One worker's life."""

    local_rank: int
    pid: int | None = None
    error: ErrorRecord | None = None
    exit: ExitStatus | None = None
    ended_at: Instant | None = None
    refusal: str | None = None
    """Why it was never started."""
    outlived_kill: bool = False
    """Whether it was given up because not even SIGKILL ended it."""
    lost: str | None = None
    """Why its end could not be seen: what became of the guardian."""
    hung_at: Instant | None = None
    must_end_by: Instant | None = None
    """Until when it may live on, since it has told of the exception that it dies of."""
    signals_sent: list[int] = []
    """The signals that it has been sent, in this order."""
    has_lingered: bool = False
    """Whether it lived on for longer than that."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will be heard of this worker."""
        return self.ended_at is not None

    @property
    def is_running(self) -> bool:
        """Whether a process exists, as far as is known."""
        return self.pid is not None and self.ended_at is None

    @property
    def has_failed(self) -> bool:
        """Whether it hung, or ended in any way but success."""
        succeeded = self.exit is not None and self.exit.ok and self.hung_at is None
        return self.has_ended and not succeeded

    @property
    def is_ended_by_us(self) -> bool:
        """Whether its process ended by a signal that it had been sent."""
        return self.exit is not None and self.exit.signal_number in self.signals_sent

    @property
    def failed_at(self) -> Instant:
        """When it failed: was found hanging, raised the exception it told of, else ended."""
        assert self.ended_at is not None, "asked when a living worker failed"
        if self.hung_at is not None:
            return self.hung_at
        return self.error.raised_at if self.error is not None else self.ended_at
