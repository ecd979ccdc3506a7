"""Tells the failures of an attempt from what is known of its workers.

Pure: it looks at the workers' lives, of which some may go on. The order in which causes are tried
is the point. A hang was found before anything was done about it, so whatever the worker died of
afterwards is a consequence; an exception that was raised before the stop was ordered is the
worker's own, however it then ended.
"""

from collections.abc import Iterable
from typing import NamedTuple

from rankwise.base.failure import ErrorRecord, Failure, FailureCause
from rankwise.base.root_cause import root_cause_first
from rankwise.base.units import Duration, Instant, between, format_duration
from rankwise.core.gang.state import WorkerLife
from rankwise.core.gang.vocabulary import GangSpec

SIGKILL = 9


class StopOrders(NamedTuple):
    """When the workers of an attempt were first told to stop, and when they were killed."""

    stopped_at: Instant | None
    killed_at: Instant | None


def failures_of(
    workers: Iterable[WorkerLife], spec: GangSpec, attempt: int, orders: StopOrders
) -> tuple[Failure, ...]:
    """Every failure among these workers, the root cause first.

    Args:
        workers: the lives to look at.
        spec: the gang they belong to.
        attempt: which of its lives it was.
        orders: when they were told to stop and killed.
    """
    workers = tuple(workers)
    found = [
        Failure(
            local_rank=worker.local_rank,
            attempt=attempt,
            cause=_cause_of(worker, orders.stopped_at),
            at=worker.failed_at,
            exit=worker.exit,
            pid=worker.pid,
            error=_error_of(worker),
            detail=_detail_of(worker, spec, orders),
            ended_by_us=worker.is_ended_by_us,
            seen_dying=worker.dumps_core,
            accused=worker.accused,
            mismatch=worker.mismatch,
        )
        for worker in workers
        if worker.has_failed
    ]
    if len(found) < 2:
        return tuple(found)  # there is nothing to explain: its texts need not be searched
    failures = root_cause_first(found)
    if failures[0].cause is not FailureCause.HUNG:
        return failures
    # All have hung at once; those for which the others wait explain that.
    # Sorting is stable: among the others the order of root causes stays.
    return tuple(sorted(failures, key=lambda failure: not failure.accused))


def _cause_of(worker: WorkerLife, stop_ordered_at: Instant | None) -> FailureCause:
    # Found while all lived. Whatever it died of afterwards is a consequence of our stopping it.
    if worker.blamed_at is not None:
        return FailureCause.OUT_OF_STEP
    if worker.hung_at is not None:
        return FailureCause.HUNG
    if worker.refusal is not None:
        return FailureCause.NOT_STARTED
    if worker.lost is not None and worker.error is None:
        return FailureCause.GUARDIAN_LOST
    # An exception raised before the stop was ordered is the worker's own, however it ended.
    is_late = stop_ordered_at is not None and worker.failed_at > stop_ordered_at
    if is_late and not worker.died_by_itself:
        return FailureCause.STOPPED
    if worker.error is not None:
        return FailureCause.RAISED
    if worker.outlived_kill:
        return FailureCause.STOPPED
    return FailureCause.EXITED if worker.exit is None else worker.exit.failure_cause


def _error_of(worker: WorkerLife) -> ErrorRecord | None:
    """What it has raised; not what it raised when it was to blame already, as its peers were gone.

    Where it stood tells more then.
    """
    error, blamed_at = worker.error, worker.blamed_at
    is_late = error is not None and blamed_at is not None and error.raised_at > blamed_at
    return None if is_late else error


def _detail_of(worker: WorkerLife, spec: GangSpec, orders: StopOrders) -> str:
    if worker.blame:
        return worker.blame
    if worker.outlived_kill:
        return f"process {worker.pid} survives SIGKILL: it is stuck in the kernel"
    if worker.has_lingered:
        return f"it had not ended {format_duration(spec.exit_timeout)} after its exception"
    if worker.hung_at is not None and spec.hang_timeout is not None:
        return f"no progress for {format_duration(spec.hang_timeout)}"
    if worker.is_ended_by_us:
        return _how_we_killed_it(worker, orders, spec.grace)
    return worker.refusal or worker.lost or ""


def _how_we_killed_it(worker: WorkerLife, orders: StopOrders, grace: Duration) -> str:
    was_killed = worker.exit is not None and worker.exit.signal_number == SIGKILL
    if not was_killed or orders.stopped_at is None or orders.killed_at is None:
        return ""
    patience = between(orders.stopped_at, orders.killed_at)
    if patience == 0:
        return "it got no time to end"
    if patience < grace:  # a second request, or an earlier deadline, cut it short
        return f"it was given only {format_duration(patience)} to end"
    return f"it did not end within {format_duration(patience)} of the request to stop"
