"""Builders for tests of the gang machine: gangs in a given phase, and short names for facts.

Builders begin at instant 0 and take no time but the pauses before restarts. A worker's pid follows
from its rank and attempt (`pid_of`), so that expected values can be written down.
"""

from typing import TypedDict, Unpack

from rankwise.base.backoff import Backoff
from rankwise.base.failure import ErrorRecord, ExitStatus
from rankwise.base.units import Duration, Instant
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.state import Phase
from rankwise.core.gang.vocabulary import (
    Effect,
    GangSpec,
    SignalWorker,
    SpawnWorker,
    Started,
    Swept,
    WorkerExited,
    WorkerReported,
    WorkerSpawned,
)


class GangOptions(TypedDict, total=False):
    """Fields of `GangSpec` that a builder takes beside the size."""

    restarts_max: int
    grace: Duration
    exit_timeout: Duration
    hang_timeout: Duration | None
    spawn_timeout: Duration
    stacks_timeout: Duration
    sweep_timeout: Duration
    backoff: Backoff


def pid_of(local_rank: int, attempt: int = 0) -> int:
    """The pid that builders give to a worker."""
    return 1000 * (attempt + 1) + local_rank


def spawned(local_rank: int, attempt: int = 0) -> WorkerSpawned:
    """The worker's process exists."""
    return WorkerSpawned(local_rank, attempt, pid_of(local_rank, attempt))


def exited(local_rank: int, code: int = 0, *, at: int = 0, attempt: int = 0) -> WorkerExited:
    """The worker's process ended at `at` with `code`."""
    return WorkerExited(local_rank, attempt, ExitStatus(code), Instant(at))


def error_record(message: str = "loss is NaN", *, raised_at: int = 0) -> ErrorRecord:
    """A RuntimeError as a worker tells of it."""
    return ErrorRecord(
        type="RuntimeError",
        message=message,
        traceback=f"RuntimeError: {message}",
        raised_at=Instant(raised_at),
        wall_ns=raised_at,
    )


def reported(
    local_rank: int, message: str = "loss is NaN", *, raised_at: int = 0, attempt: int = 0
) -> WorkerReported:
    """The worker told of an exception that it raised at `raised_at`."""
    return WorkerReported(local_rank, attempt, error_record(message, raised_at=raised_at))


def spawn_orders(size: int, attempt: int = 0) -> list[Effect]:
    """The orders that start an attempt."""
    return [SpawnWorker(local_rank, attempt) for local_rank in range(size)]


def signal_orders(signal: int, local_ranks: list[int], attempt: int = 0) -> list[Effect]:
    """The orders that send a signal to these workers."""
    return [SignalWorker(local_rank, attempt, signal) for local_rank in local_ranks]


def idle_gang(size: int = 2, **options: Unpack[GangOptions]) -> Gang:
    """A gang whose life has not begun."""
    return Gang(GangSpec(size=size, **options))


def starting_gang(size: int = 2, *, attempt: int = 0, **options: Unpack[GangOptions]) -> Gang:
    """A gang that has ordered the workers of `attempt` and has heard of none of them yet."""
    options.setdefault("restarts_max", attempt)
    gang = idle_gang(size, **options)
    gang.handle(Started(), Instant(0))
    for failing_attempt in range(attempt):
        _fail(gang, failing_attempt)
    return gang


def running_gang(size: int = 2, *, attempt: int = 0, **options: Unpack[GangOptions]) -> Gang:
    """A gang whose workers of `attempt` all run; earlier attempts have failed."""
    gang = starting_gang(size, attempt=attempt, **options)
    _spawn_all(gang, attempt)
    return gang


def sweeping_gang(
    size: int = 2, *, code: int = 0, attempt: int = 0, **options: Unpack[GangOptions]
) -> Gang:
    """A gang whose workers have all ended with `code`, and are being swept up after."""
    gang = running_gang(size, attempt=attempt, **options)
    for local_rank in range(size):
        gang.handle(exited(local_rank, code, attempt=attempt), Instant(0))
    return gang


def _spawn_all(gang: Gang, attempt: int) -> Instant:
    """Let all workers come up at the instant at which they were ordered, and return it."""
    assert gang.next_deadline is not None, "a gang that is starting knows until when"
    now = Instant(gang.next_deadline - gang.spec.start_patience)
    for local_rank in range(gang.spec.size):
        gang.handle(spawned(local_rank, attempt), now)
    return now


def _fail(gang: Gang, attempt: int) -> None:
    now = _spawn_all(gang, attempt)
    for local_rank in range(gang.spec.size):
        gang.handle(exited(local_rank, 1, attempt=attempt, at=now), now)
    gang.handle(Swept(attempt), now)
    if gang.phase is Phase.BACKING_OFF:
        assert gang.next_deadline is not None, "a gang that backs off knows until when"
        gang.tick(gang.next_deadline)
