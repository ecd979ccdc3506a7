"""Builders for tests of the gang machine: gangs in a given phase, and short names for facts.

Builders begin at instant 0 and take no time. A worker's pid follows from its rank and attempt
(`pid_of`), so that expected values can be written down.
"""

from typing import TypedDict, Unpack

from rankwise.base.failure import ErrorRecord, ExitStatus
from rankwise.base.units import Duration, Instant
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.vocabulary import (
    Effect,
    GangSpec,
    SignalWorker,
    Started,
    WorkerExited,
    WorkerReported,
    WorkerSpawned,
)


class GangOptions(TypedDict, total=False):
    """Fields of `GangSpec` that a builder takes beside the size."""

    grace: Duration
    stop_delay: Duration
    exit_timeout: Duration
    hang_timeout: Duration | None
    spawn_timeout: Duration
    stacks_timeout: Duration
    sweep_timeout: Duration


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


def signal_orders(signal: int, local_ranks: list[int], attempt: int = 0) -> list[Effect]:
    """The orders that send a signal to these workers."""
    return [SignalWorker(local_rank, attempt, signal) for local_rank in local_ranks]


def starting_gang(size: int = 2, *, attempt: int = 0, **options: Unpack[GangOptions]) -> Gang:
    """A gang that has ordered its workers and has heard of none of them yet."""
    gang = Gang(GangSpec(size=size, **options), attempt)
    gang.handle(Started(), Instant(0))
    return gang


def running_gang(size: int = 2, *, attempt: int = 0, **options: Unpack[GangOptions]) -> Gang:
    """A gang whose workers all run."""
    gang = starting_gang(size, attempt=attempt, **options)
    for local_rank in range(size):
        gang.handle(spawned(local_rank, attempt), Instant(0))
    return gang


def sweeping_gang(
    size: int = 2, *, code: int = 0, attempt: int = 0, **options: Unpack[GangOptions]
) -> Gang:
    """A gang whose workers have all ended with `code`, and are being swept up after."""
    gang = running_gang(size, attempt=attempt, **options)
    for local_rank in range(size):
        gang.handle(exited(local_rank, code, attempt=attempt), Instant(0))
    return gang
