"""The gang machine when the guardian dies, in every phase."""

from gangs import (
    error_record,
    exited,
    pid_of,
    reported,
    running_gang,
    spawned,
    starting_gang,
    sweeping_gang,
)

from rankwise.base.failure import Failure, FailureCause, Outcome, OutcomeStatus
from rankwise.base.units import Duration, Instant
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import (
    Finish,
    GuardianLost,
    ProgressLooked,
    StopRequested,
)

LOST = GuardianLost("the guardian was killed")


def lost(local_rank: int, *, at: int, pid: int | None) -> Failure:
    return Failure(
        local_rank=local_rank,
        attempt=0,
        cause=FailureCause.GUARDIAN_LOST,
        at=Instant(at),
        pid=pid,
        detail="the guardian was killed",
    )


def test_while_starting_it_fails_the_born_and_the_unborn() -> None:
    gang = starting_gang(size=2)
    gang.handle(spawned(0), Instant(1))

    effects = gang.handle(LOST, Instant(3))

    failures = (lost(0, at=3, pid=pid_of(0)), lost(1, at=3, pid=None))
    detail = "not restarted: the guardian was killed"
    outcome = Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=failures, detail=detail)
    assert effects == [Finish(outcome)]


def test_while_running_it_ends_the_gang_and_says_why_none_can_follow() -> None:
    gang = running_gang(size=1)

    effects = gang.handle(LOST, Instant(3))

    outcome = Outcome(
        status=OutcomeStatus.FAILED,
        attempts=1,
        failures=(lost(0, at=3, pid=pid_of(0)),),
        detail="not restarted: the guardian was killed",
    )
    assert effects == [Finish(outcome)]
    assert gang.next_deadline is None


def test_an_exception_that_was_told_before_remains_the_cause() -> None:
    gang = running_gang(size=2)
    gang.handle(reported(1, raised_at=1), Instant(2))

    gang.handle(LOST, Instant(3))

    assert gang.outcome is not None
    root, other = gang.outcome.failures
    assert (root.local_rank, root.cause, root.error) == (
        1,
        FailureCause.RAISED,
        error_record(raised_at=1),
    )
    assert other == lost(0, at=3, pid=pid_of(0))


def test_while_stopping_a_failure_it_leaves_the_first_cause_first() -> None:
    gang = running_gang(size=2)
    gang.handle(exited(1, 5, at=1), Instant(1))

    gang.handle(LOST, Instant(3))

    assert gang.outcome is not None
    assert [(f.local_rank, f.cause) for f in gang.outcome.failures] == [
        (1, FailureCause.EXITED),
        (0, FailureCause.GUARDIAN_LOST),
    ]


def test_while_stopping_on_request_it_leaves_a_stop_a_stop() -> None:
    gang = running_gang(size=1)
    gang.handle(StopRequested(2), Instant(1))

    gang.handle(LOST, Instant(3))

    assert gang.outcome is not None
    assert gang.outcome.status is OutcomeStatus.STOPPED
    assert gang.outcome.stop_signal == 2


def test_while_stacks_are_printed_the_hang_remains_the_cause() -> None:
    gang = running_gang(size=1, hang_timeout=Duration(10))
    gang.tick(Instant(10))
    gang.handle(ProgressLooked(0, Instant(0)), Instant(10))

    gang.handle(LOST, Instant(11))

    assert gang.outcome is not None
    assert [(f.cause, f.at) for f in gang.outcome.failures] == [(FailureCause.HUNG, 10)]


def test_while_killing_it_ends_the_wait() -> None:
    gang = running_gang(size=2, grace=Duration(0))
    gang.handle(exited(0, 1, at=1), Instant(1))

    gang.handle(LOST, Instant(2))

    assert gang.phase is GangPhase.FINISHED


def test_while_sweeping_it_does_not_unmake_a_success() -> None:
    gang = sweeping_gang(size=2)

    effects = gang.handle(LOST, Instant(3))

    assert effects == [Finish(Outcome(status=OutcomeStatus.SUCCEEDED, attempts=1))]


def test_while_sweeping_after_a_failure_it_forbids_another_gang() -> None:
    gang = sweeping_gang(size=1, code=1)

    gang.handle(LOST, Instant(3))

    assert gang.outcome is not None
    assert gang.outcome.status is OutcomeStatus.FAILED
    assert gang.outcome.detail == "not restarted: the guardian was killed"
    assert [f.cause for f in gang.outcome.failures] == [FailureCause.EXITED]
