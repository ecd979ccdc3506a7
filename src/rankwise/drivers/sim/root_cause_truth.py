"""Compares the root cause that a gang tells with what its processes truly did."""

from collections.abc import Iterable, Sequence
from operator import itemgetter

from rankwise.base.failure import Failure, FailureCause
from rankwise.base.units import MILLISECOND, Instant
from rankwise.drivers.sim.processes import VirtualProcess
from rankwise.drivers.sim.programs import Dies, Ending, Raises

HEAD_START = 50 * MILLISECOND
"""Spelled again, so that a change of the machine's constant does not go unseen."""
SIGABRT = 6
SIGPIPE = 13

Culprit = tuple[Instant, int, Ending]
"""When a worker failed, its rank, and how it ended."""


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
        (worker.failed_by_itself_at, worker.local_rank, worker.program.ending)
        for worker in workers
        if worker is not None
        and worker.failed_by_itself_at is not None
        and (heard_until is None or worker.failed_by_itself_at <= heard_until)
    ]
    culprits.sort(key=itemgetter(0, 1))
    first = _truth_of(culprits)
    match root.cause:
        case FailureCause.HUNG | FailureCause.OUT_OF_STEP:
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


def _truth_of(culprits: Sequence[Culprit]) -> Culprit | None:
    """The earliest; or the violent death that was seen soon after, if that may have caused it."""
    if culprits and _may_be_consequence(culprits[0][2]):
        for culprit in culprits:
            if _is_violent(culprit[2]) and culprit[0] - culprits[0][0] < HEAD_START:
                return culprit
    return culprits[0] if culprits else None


def _may_be_consequence(ending: Ending) -> bool:
    if isinstance(ending, Dies):
        return ending.signal in (SIGABRT, SIGPIPE)
    return isinstance(ending, Raises) and "connection" in ending.message


def _is_violent(ending: Ending) -> bool:
    return isinstance(ending, Dies) and ending.signal not in (SIGABRT, SIGPIPE)
