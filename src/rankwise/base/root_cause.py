"""Which of several failures explains the others.

When one rank dies its peers soon fail too: a collective reports a closed connection, a barrier a
missing member. The earliest failure is the cause, and `Failure.at` is fine enough to tell, with one
correction: the kernel closes a dying process's connections *before* its parent can see it end, so a
peer's "connection closed" may carry an earlier instant than the death that closed it. An exception
that names a lost connection of a group (gloo's "closed by peer", our `PeerDied`) is never the cause
where another rank has failed without one, however much later: by a signal, an exit code, or an
exception of its own. (The kernel may write a core for seconds before it tells of a death; the gang
waits for that before it tells others to stop.) Many exceptions may come of a lost peer and need
not, as a download that has timed out: only a death by signal that was seen less than `HEAD_START`
later explains them; without one, an exit that told of nothing. The same is true of SIGABRT and
SIGPIPE, by which native code dies of a closed connection. So SIGABRT explains a lost connection
only if it was seen that soon, or if the rank was seen dying then (its core was written): a watchdog
aborts later, when its peer is gone. A `ValueError` tells of no peer, and stays the cause of what
was killed after it. A failure after rankwise had told the rank to stop explains nothing and comes
last. A rank that was found to be out of step explains the exceptions of those that waited for it,
and consequences that others raise, also earlier: while these waited, they did. An exception of our
own collectives says that another rank is to blame. So the first failure that says nothing of others
explains it, also a later one.

Tasks of a chip worker are no ranks: the task graph knows which of them follow from which (see
`rankwise.workers.failures`). Members of a group of tasks run together as ranks do, and are ordered
here.
"""

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from rankwise.base.failure import ErrorRecord, Failure, FailureCause
from rankwise.base.units import MILLISECOND, Duration

HEAD_START = Duration(250 * MILLISECOND)
"""How much later a violent death may be seen than what it has caused: 58 ms on a busy machine."""
SELF_INFLICTED_SIGNALS = (6, 13)
"""SIGABRT and SIGPIPE."""

_LOST_PEER = (
    r"connection|socket|peer|broken ?pipe|\bEOF|end of file|timed? ?out|\brefused\b|unreachable"
    r"|nccl|gloo|\bMPI|DistBackendError|DistNetworkError|DistStoreError"
)
_OF_GROUP = r"gloo|nccl|rccl|\bMPI|c10d|TCPStore|ProcessGroup|DistBackendError|DistNetworkError"
_CLOSED = r"(closed|reset) by (remote )?peer|broken ?pipe|remote process exit|was likely closed"
_TEXT_MAX = 20_000

_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_PEER_DIED = "rankwise.base.errors.PeerDied"
_OUR_COLLECTIVES = ("rankwise.base.errors.Collective", _PEER_DIED)

T = TypeVar("T")


def root_cause_first(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Order failures so that the first explains the others; ties go to the lower rank."""
    return tuple(suspects_in_order(failures, lambda failure: failure))


def suspects_in_order(suspects: Iterable[T], failure_of: Callable[[T], Failure]) -> list[T]:
    """Order what carries failures so that the first one's explains the others."""
    ordered = sorted(suspects, key=lambda suspect: _order_in_time(failure_of(suspect)))
    if ordered and may_be_consequence(failure_of(ordered[0])):
        earliest = failure_of(ordered[0])
        says_so = _says_connection_is_lost(earliest)
        by_itself = (_killed_by_foreign_signal, _exited_in_silence)
        for died_alone in (*by_itself, _raised_by_itself, _killed) if says_so else by_itself:
            for suspect in ordered:
                failure = failure_of(suspect)
                is_soon = failure.at - earliest.at < HEAD_START
                # Native code may do so when its peer is gone, and also as the first.
                may_be_late = says_so and (died_alone is not _killed or failure.seen_dying)
                if died_alone(failure) and (is_soon or may_be_late):
                    return [suspect, *(each for each in ordered if each is not suspect)]
        hung = [each for each in ordered if failure_of(each).cause is FailureCause.HUNG]
        if hung:
            return [hung[0], *(each for each in ordered if each is not hung[0])]
    if ordered and is_of_our_collectives(failure_of(ordered[0])):
        for suspect in ordered:
            if _tells_of_no_other(failure_of(suspect)):
                return [suspect, *(each for each in ordered if each is not suspect)]
    return ordered


def tells_of_lost_peer(error: ErrorRecord) -> bool:
    """Whether an exception may have been raised since another rank has gone."""
    return any(
        re.search(_LOST_PEER, text, re.IGNORECASE)
        for text in (error.type, error.message[-_TEXT_MAX:], _raised_lines(error.traceback))
    )


def names_lost_connection(error: ErrorRecord) -> bool:
    """Whether an exception names a connection of a group that was lost: another rank has gone."""
    if error.type == _PEER_DIED:
        return True
    texts = (error.message[-_TEXT_MAX:], _raised_lines(error.traceback))
    return any(
        re.search(_CLOSED, text, re.IGNORECASE)
        and re.search(_OF_GROUP, f"{error.type} {text}", re.IGNORECASE)
        for text in texts
    )


def may_be_of_others(error: ErrorRecord) -> bool:
    """Whether an exception may have been raised since another rank did not do its part."""
    return error.type.startswith(_OUR_COLLECTIVES) or tells_of_lost_peer(error)


def is_of_our_collectives(failure: Failure) -> bool:
    """Whether a collective of ours was not completed, so that another rank is to blame."""
    return failure.error is not None and failure.error.type.startswith(_OUR_COLLECTIVES)


def tells_of_time(error: ErrorRecord) -> bool:
    """Whether it was raised since patience was over."""
    return bool(_TIMED_OUT.search(f"{error.type} {error.message[-_TEXT_MAX:]}"))


def _raised_lines(traceback: str) -> str:
    """The lines of a traceback that are exceptions: those of its causes too, but no code."""
    lines = traceback[-_TEXT_MAX:].splitlines()
    return "\n".join(line for line in lines if line and not line[0].isspace())


def _order_in_time(failure: Failure) -> tuple[int, int, int, int]:
    place = {FailureCause.OUT_OF_STEP: 0, FailureCause.STOPPED: 2}.get(failure.cause, 1)
    return place, failure.at, failure.rank, failure.local_rank


def may_follow_from_loss(failure: Failure) -> bool:
    """Whether a rank may have failed since another node was lost, about the same time."""
    return may_be_consequence(failure) or _exited_in_silence(failure)


def may_be_consequence(failure: Failure) -> bool:
    """Whether a rank may have failed since it has lost its connection to another one."""
    if failure.cause is FailureCause.RAISED:
        return failure.error is None or tells_of_lost_peer(failure.error)
    return (
        failure.cause is FailureCause.SIGNALED
        and failure.exit is not None
        and failure.exit.signal_number in SELF_INFLICTED_SIGNALS
    )


def _says_connection_is_lost(failure: Failure) -> bool:
    """Whether a rank has raised an exception that names a lost connection to another one."""
    error = failure.error if failure.cause is FailureCause.RAISED else None
    return error is not None and names_lost_connection(error)


def _raised_by_itself(failure: Failure) -> bool:
    error = failure.error if failure.cause is FailureCause.RAISED else None
    return error is not None and not may_be_of_others(error)


def _killed(failure: Failure) -> bool:
    return failure.cause is FailureCause.SIGNALED


def _tells_of_no_other(failure: Failure) -> bool:
    """Whether a rank has failed by itself, as far as its failure tells."""
    if failure.cause is FailureCause.RAISED:
        return failure.error is not None and not may_be_of_others(failure.error)
    return _killed_by_foreign_signal(failure) or _exited_in_silence(failure)


def _killed_by_foreign_signal(failure: Failure) -> bool:
    return (
        failure.cause is FailureCause.SIGNALED
        and failure.exit is not None
        and failure.exit.signal_number not in SELF_INFLICTED_SIGNALS
    )


def _exited_in_silence(failure: Failure) -> bool:
    return failure.cause is FailureCause.EXITED
