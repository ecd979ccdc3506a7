"""Compares the root cause that a gang tells with what its processes truly did."""

from collections.abc import Iterable

from rankwise.base.failure import Failure, FailureCause
from rankwise.base.units import MILLISECOND, Instant
from rankwise.drivers.sim.processes import VirtualProcess
from rankwise.drivers.sim.programs import Dies

HEAD_START = 50 * MILLISECOND
"""Spelled again, so that a change of the machine's constant does not go unseen."""
SIGABRT = 6
SIGPIPE = 13


def root_cause_is_true(
    root: Failure, workers: Iterable[VirtualProcess | None], *, heard_until: Instant | None
) -> str:
    """What is wrong with this root cause; empty if it is the truth.

    Args:
        root: the first failure that the gang tells of.
        workers: the workers of its attempt.
        heard_until: when the attempt began to end; what failed later explains nothing.
    """
    culprits = [
        (_counts_at(worker), worker.local_rank)
        for worker in workers
        if worker is not None
        and worker.failed_by_itself_at is not None
        and (heard_until is None or worker.failed_by_itself_at <= heard_until)
    ]
    first = min(culprits, default=None)
    match root.cause:
        case FailureCause.HUNG:
            return ""
        case FailureCause.NOT_STARTED:
            if first is not None and first[0] < root.at:
                return f"worker {first[1]} failed at {first[0]}, before {root} did not start"
            return ""
        case FailureCause.RAISED | FailureCause.EXITED | FailureCause.SIGNALED:
            if first is None or first[1] != root.local_rank:
                return f"the root cause is told to be {root}, and in truth it is {first}"
            return ""
        case FailureCause.STOPPED | FailureCause.GUARDIAN_LOST:
            return f"the root cause is told to be {root}, which explains nothing"


def _counts_at(worker: VirtualProcess) -> int:
    assert worker.failed_by_itself_at is not None, "only failed workers are compared"
    ending = worker.program.ending
    is_violent = isinstance(ending, Dies) and ending.signal not in (SIGABRT, SIGPIPE)
    return worker.failed_by_itself_at - (HEAD_START if is_violent else 0)
