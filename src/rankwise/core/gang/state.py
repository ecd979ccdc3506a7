"""What a gang remembers: its phase, and what it knows of each worker."""

from enum import StrEnum

import msgspec

from rankwise.base.failure import ErrorRecord, ExitStatus, Mismatch
from rankwise.base.root_cause import names_lost_connection
from rankwise.base.units import Duration, Instant


class GangPhase(StrEnum):
    """Where in its life a gang is; machine.py tells how it moves between them."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    DUMPING = "dumping"
    RECALLING = "recalling"
    """A worker has died; those that can be called again are leaving their functions."""
    CLEARING = "clearing"
    """They have, and what the dead have left behind is swept."""
    PAUSED = "paused"
    """They wait for the world in which they are called again."""
    STOPPING = "stopping"
    KILLING = "killing"
    SWEEPING = "sweeping"
    FINISHED = "finished"


class RecallState(StrEnum):
    """Where a worker stands with `rankwise.recover`."""

    BOUND = "bound"
    """It cannot be called again."""
    OFFERED = "offered"
    """It runs a function that can be called again."""
    EXCEPTION_HELD = "fallen"
    """It holds the exception of its function."""
    RECALLED = "recalled"
    """It was told to leave its function."""
    YIELDED = "yielded"
    """It has done so, and waits."""


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
    blame: str = ""
    """What it has done that others waited for it in vain."""
    mismatch: Mismatch | None = None
    """The same as a value."""
    blamed_at: Instant | None = None
    accused: tuple[int, ...] = ()
    """The ranks of the job that are blamed, or that all others wait for when they hang."""
    must_end_by: Instant | None = None
    """Until when it may live on, since it has told of the exception that it dies of."""
    dumps_core: bool = False
    """Whether it was seen dying of a signal: its core was written, or its memory taken down."""
    signals_sent: list[int] = []
    """The signals that it has been sent, in this order."""
    has_lingered: bool = False
    """Whether it lived on for longer than that."""
    recall_state: RecallState = RecallState.BOUND
    recall_timeout: Duration = Duration(0)
    """How long it may take to leave its function when it is recalled."""

    @property
    def has_ended(self) -> bool:
        """True if this worker sends nothing more."""
        return self.ended_at is not None

    @property
    def is_running(self) -> bool:
        """Whether a process exists, as far as is known."""
        return self.pid is not None and self.ended_at is None

    @property
    def has_failed(self) -> bool:
        """Whether it hung, was to blame that others did, or ended in any way but success."""
        if self.found_at is not None:
            return True  # also before it has ended: others ask who has begun it
        succeeded = self.exit is not None and self.exit.ok
        return self.has_ended and not succeeded

    @property
    def found_at(self) -> Instant | None:
        """When it was found that it is to blame, or hangs."""
        return self.hung_at if self.blamed_at is None else self.blamed_at

    @property
    def is_ended_by_us(self) -> bool:
        """Whether its process ended by a signal that it had been sent."""
        return self.exit is not None and self.exit.signal_number in self.signals_sent

    @property
    def says_peer_is_gone(self) -> bool:
        """Whether it has ended of an exception that names a lost connection to another one."""
        return self.has_ended and self.error is not None and names_lost_connection(self.error)

    @property
    def died_by_itself(self) -> bool:
        """Whether it was dying, of a signal that it was not sent, before it was asked to stop."""
        return self.dumps_core and self.exit is not None and not self.is_ended_by_us

    @property
    def failed_at(self) -> Instant:
        """When it failed: was found out, raised the exception it told of, else ended."""
        if self.found_at is not None:
            return self.found_at
        assert self.ended_at is not None, "asked when a living worker failed"
        return self.error.raised_at if self.error is not None else self.ended_at
