"""The facts that a gang is told (stimuli), and its orders (effects).

All are frozen and tagged, so that the journal is their JSON and a replay reads them back.
`local_rank` counts the workers of this gang from 0; `attempt` counts the gangs on one process host
from 0 and travels with every fact, so that a late one about an earlier gang can be told apart.
"""

from enum import StrEnum

import msgspec

from rankwise.base.failure import ErrorRecord, ExitStatus, Mismatch, Outcome
from rankwise.base.machine import Ticked
from rankwise.base.units import SECOND, Duration, Instant


class GangSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The properties of a gang.

    Attributes:
        size: number of workers.
        grace: how long workers may take to end once told to, before they are killed.
        stop_delay: how long the others may go on after the first failure: a worker that ends by
            itself meanwhile is not told to, and has not failed.
        exit_timeout: how long a worker may take to end after it has told of the exception that it
            dies of; one whose threads never end would otherwise keep all others waiting.
        hang_timeout: without progress of any worker for this long, the gang has hung;
            None never asks.
        spawn_timeout: how long starting all workers may take. A process without progress for
            `hang_timeout`, workers or who makes them, has hung.
        stacks_timeout: how long workers may take to print their stacks after a hang.
        sweep_timeout: how long killed processes may take to vanish, and a sweep to be done.
        exception_timeout: how long an exception of a recoverable worker is held back, since it may
            be the consequence of a death that is not known yet.
        verdict_timeout: how long the death is awaited that explains a worker's exception which
            says that its peer is gone; the kernel closes connections before it tells of a death.
        dump_timeout: how long at most, while a worker writes its core.
    """

    size: int
    grace: Duration = Duration(30 * SECOND)
    stop_delay: Duration = Duration(0)
    exit_timeout: Duration = Duration(10 * SECOND)
    hang_timeout: Duration | None = None
    spawn_timeout: Duration = Duration(600 * SECOND)
    stacks_timeout: Duration = Duration(2 * SECOND)
    sweep_timeout: Duration = Duration(10 * SECOND)
    exception_timeout: Duration = msgspec.field(default=Duration(1 * SECOND), name="fall_timeout")
    verdict_timeout: Duration = Duration(2 * SECOND)
    dump_timeout: Duration = Duration(30 * SECOND)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size is {self.size}, expected at least one worker")
        for name in (
            "grace", "stop_delay", "exit_timeout", "spawn_timeout", "stacks_timeout",
            "sweep_timeout", "exception_timeout", "verdict_timeout", "dump_timeout",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)} ns, expected 0 or more")
        if self.hang_timeout is not None and self.hang_timeout <= 0:
            raise ValueError(f"hang_timeout is {self.hang_timeout} ns, expected more than 0")


class Started(msgspec.Struct, frozen=True, tag=True):
    """The gang begins its life."""


class WorkerSpawned(msgspec.Struct, frozen=True, tag=True):
    """A worker's process exists."""

    local_rank: int
    attempt: int
    pid: int


class WorkerRefused(msgspec.Struct, frozen=True, tag=True):
    """A worker's process could not be made; `reason` is one sentence for people."""

    local_rank: int
    attempt: int
    reason: str


class WorkerReported(msgspec.Struct, frozen=True, tag=True):
    """A worker reported the exception that will end it."""

    local_rank: int
    attempt: int
    error: ErrorRecord


class WorkerExited(msgspec.Struct, frozen=True, tag=True):
    """A worker's process has ended. Its report has been delivered before this."""

    local_rank: int
    attempt: int
    exit: ExitStatus
    at: Instant
    """When its parent saw it end, on the machine's monotonic clock."""
    was_killed_by_us: bool = False
    """True if it had been sent SIGKILL, also where a SIGTERM was ordered that it would not obey."""


class RecoveryMessage(StrEnum):
    """A message of a worker that can be recovered (`rankwise.recover`)."""

    OFFERS = "offers"
    """It runs a function that can be called again."""
    WITHDRAWS = "withdraws"
    """The function has returned: there is nothing to call again."""
    EXCEPTION_HELD = "fell"
    """The function has raised, and the worker holds the exception until it is told what to do."""
    YIELDED = "yielded"
    """It was recalled, has left its function, and waits to be told in which world to call it."""


class RecoveryMessageSent(msgspec.Struct, frozen=True, tag="WorkerSaid"):
    """A worker that can be recovered has sent a message."""

    local_rank: int
    attempt: int
    word: RecoveryMessage
    recall_timeout: Duration = Duration(0)
    """With an offer: how long it may take to leave its function."""


class RecallRequested(msgspec.Struct, frozen=True, tag=True):
    """The round is over for another node's sake: recoverable workers wait for the next one.

    The others are told to stop. If none of them can be recovered, the gang ends.
    """


class Resumed(msgspec.Struct, frozen=True, tag=True):
    """A paused gang goes on: as that attempt, and with restarts left after it, or without."""

    attempt: int
    recovers: bool


class Swept(msgspec.Struct, frozen=True, tag=True):
    """No process of that attempt is left; `survivors` could not be killed (pids).

    After a sweep that spares workers: none of those who are not spared.
    """

    attempt: int
    survivors: tuple[int, ...] = ()
    spares: tuple[int, ...] = ()


class StopRequested(msgspec.Struct, frozen=True, tag=True):
    """A request to end the gang: a signal's number, or None from the program itself.

    The second one means: now.
    """

    signal: int | None = None


class ProgressLooked(msgspec.Struct, frozen=True, tag=True):
    """The answer to `LookForProgress`: when a worker last made progress."""

    attempt: int
    last_progress: Instant
    awaited: tuple[int, ...] = ()
    """If that was too long ago: workers that are known to keep the others waiting."""
    accused: tuple[int, ...] = ()
    """The same as ranks of the job."""


class DumpsLooked(msgspec.Struct, frozen=True, tag=True):
    """These workers are dying: the kernel writes their cores. Answers `LookForDumps`.

    It is also told of a worker that is found so when it is sent a signal.
    """

    attempt: int
    dumping: tuple[int, ...] = ()


class RanksBlamed(msgspec.Struct, frozen=True, tag=True):
    """The ledger of collectives shows that others wait for these workers for ever."""

    local_ranks: tuple[int, ...]
    attempt: int
    reason: str
    """Their calls, in a sentence."""
    accused: tuple[int, ...] = ()
    """All ranks of the job that are blamed for that, also those of other nodes."""
    mismatch: Mismatch | None = None
    """The same as `reason`, as a value."""


class StacksDumped(msgspec.Struct, frozen=True, tag=True):
    """All workers that can print their stacks have done so."""

    attempt: int


class Suspended(msgspec.Struct, frozen=True, tag="StoodStill"):
    """This node's ranks and agent were suspended for this time (Ctrl-Z), and continue."""

    duration: Duration


class GuardianLost(msgspec.Struct, frozen=True, tag=True):
    """The guardian died; the workers are dead or dying."""

    reason: str


Stimulus = (
    Started
    | WorkerSpawned
    | WorkerRefused
    | WorkerReported
    | WorkerExited
    | RecoveryMessageSent
    | RecallRequested
    | Resumed
    | Swept
    | StopRequested
    | ProgressLooked
    | DumpsLooked
    | RanksBlamed
    | StacksDumped
    | Suspended
    | GuardianLost
    | Ticked
)


class SpawnWorker(msgspec.Struct, frozen=True, tag=True):
    """Make a worker's process; answer `WorkerSpawned` or `WorkerRefused`, later `WorkerExited`."""

    local_rank: int
    attempt: int


class SignalWorker(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a worker and its process group, if it is still there."""

    local_rank: int
    attempt: int
    signal: int


class LookForProgress(msgspec.Struct, frozen=True, tag=True):
    """Find out when a worker last made progress; answer `ProgressLooked`."""

    attempt: int


class LookForDumps(msgspec.Struct, frozen=True, tag=True):
    """Find the workers whose core the kernel writes; answer `DumpsLooked`."""

    attempt: int


class DumpStacks(msgspec.Struct, frozen=True, tag=True):
    """Make every living worker print its stacks; answer `StacksDumped`."""

    attempt: int


class RecoveryOrder(StrEnum):
    """An order of the agent to a worker that can be recovered."""

    RECALL = "recall"
    """Leave the function, close connections to other ranks, and answer YIELDED."""
    RELEASE = "release"
    """No other rank caused the exception: raise it."""
    AGAIN = "again"
    """Call the function again, in the world of this attempt."""


class TellWorker(msgspec.Struct, frozen=True, tag=True):
    """Send an order to a worker, if it still lives."""

    local_rank: int
    attempt: int
    """With AGAIN the attempt that begins; the worker belongs to it from then on."""
    word: RecoveryOrder


class Sweep(msgspec.Struct, frozen=True, tag=True):
    """Kill all processes that the attempt's workers left behind; answer `Swept`."""

    attempt: int
    spares: tuple[int, ...] = ()
    """Local ranks that live on, with all that they have started."""


class AnnounceKill(msgspec.Struct, frozen=True, tag=True):
    """Tell the user that these workers have not ended and are being killed."""

    attempt: int
    local_ranks: tuple[int, ...]
    asked_again: bool = False
    """True for a second request; otherwise the grace is over."""


class AnnounceStuck(msgspec.Struct, frozen=True, tag=True):
    """Tell the user that these workers have not left their functions in time, and are killed."""

    attempt: int
    local_ranks: tuple[int, ...]


class Pause(msgspec.Struct, frozen=True, tag=True):
    """The living rest of the gang waits for `Resumed`, or to be stopped; the others have ended."""

    outcome: Outcome
    kept: tuple[int, ...]
    """Local ranks of those that wait."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The gang's life is over, and this is what became of it."""

    outcome: Outcome


Effect = (
    SpawnWorker
    | SignalWorker
    | TellWorker
    | LookForProgress
    | LookForDumps
    | DumpStacks
    | Sweep
    | AnnounceKill
    | AnnounceStuck
    | Pause
    | Finish
)
