"""Which of several failures explains the others.

When one rank dies its peers soon fail too: a collective reports a closed connection, a barrier a
missing member. The earliest failure is the cause, and `Failure.at` is fine enough to tell,
with one correction: the kernel closes a dying process's connections *before* its parent can see
it end, so a peer's "connection closed" may carry an earlier instant than the death that closed it.
A death by signal therefore counts as `HEAD_START` earlier. Not so SIGABRT and SIGPIPE: they are how
native code dies of an error of its own, and a closed connection is the most usual one, so they are
as likely to be the consequence as any exception. What ended because rankwise had told it to stop
never explains anything and comes last.
"""

from collections.abc import Iterable

from rankwise.base.failure import Failure, FailureCause
from rankwise.base.units import MILLISECOND, Duration

HEAD_START = Duration(50 * MILLISECOND)
"""How much earlier a violent death counts than anything else."""
SELF_INFLICTED_SIGNALS = (6, 13)
"""SIGABRT and SIGPIPE."""


def root_cause_first(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Order failures so that the first explains the others; ties go to the lower rank."""
    return tuple(sorted(failures, key=likely_order))


def likely_order(failure: Failure) -> tuple[bool, int, int, int]:
    """A key that sorts failures so that the first explains the others."""
    head_start = HEAD_START if _died_a_violent_death(failure) else 0
    return (
        failure.cause is FailureCause.STOPPED,
        failure.at - head_start,
        failure.rank,
        failure.local_rank,
    )


def _died_a_violent_death(failure: Failure) -> bool:
    return (
        failure.cause is FailureCause.SIGNALED
        and failure.exit is not None
        and failure.exit.signal_number not in SELF_INFLICTED_SIGNALS
    )
