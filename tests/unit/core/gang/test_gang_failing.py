"""The gang machine when workers end: well, or badly."""

import pytest
from gangs import (
    error_record,
    exited,
    pid_of,
    reported,
    running_gang,
    signal_orders,
    spawned,
    sweeping_gang,
)

from rankwise.base.failure import ExitStatus, Failure, FailureCause, Outcome, OutcomeStatus
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import (
    AnnounceKill,
    Finish,
    GuardianLost,
    ProgressLooked,
    StacksDumped,
    Stimulus,
    StopRequested,
    Sweep,
    Swept,
    WorkerRefused,
)

SIGTERM, SIGKILL = 15, 9
GRACE = Duration(30 * SECOND)
PATIENCE = Duration(10 * SECOND)


def outcome_of(gang: Gang) -> Outcome:
    assert gang.outcome is not None
    return gang.outcome


def test_a_gang_whose_workers_all_end_well_is_swept_and_succeeds() -> None:
    gang = running_gang(size=2)

    assert gang.handle(exited(1, at=5), Instant(5)) == []
    assert gang.handle(exited(0, at=6), Instant(6)) == [Sweep(0)]
    assert gang.next_deadline == 6 + gang.spec.sweep_timeout
    effects = gang.handle(Swept(0), Instant(7))

    assert effects == [Finish(Outcome(status=OutcomeStatus.SUCCEEDED, attempts=1))]
    assert gang.phase is GangPhase.FINISHED
    assert gang.next_deadline is None


@pytest.mark.parametrize("code", [1, 255, -9, -11])
def test_one_failure_stops_all_others(code: int) -> None:
    gang = running_gang(size=4, grace=GRACE)

    effects = gang.handle(exited(2, code, at=5), Instant(6))

    assert effects == signal_orders(SIGTERM, [0, 1, 3])
    assert gang.phase is GangPhase.STOPPING
    assert gang.next_deadline == 6 + GRACE


def test_those_that_had_ended_well_are_not_told_to_stop() -> None:
    gang = running_gang(size=3)
    gang.handle(exited(0, at=1), Instant(1))

    assert gang.handle(exited(1, 1, at=2), Instant(2)) == signal_orders(SIGTERM, [2])


def test_the_sweep_waits_for_the_last_of_them() -> None:
    gang = running_gang(size=3)
    gang.handle(exited(0, 1, at=1), Instant(1))

    assert gang.handle(exited(1, -15, at=2), Instant(2)) == []
    assert gang.handle(exited(2, -15, at=3), Instant(3)) == [Sweep(0)]


def test_the_failure_of_a_gang_of_one_is_swept_at_once() -> None:
    gang = running_gang(size=1)

    assert gang.handle(exited(0, 1, at=1), Instant(1)) == [Sweep(0)]


def test_the_outcome_tells_the_root_cause_first_and_the_stopped_ones_as_stopped() -> None:
    gang = running_gang(size=2)
    gang.handle(reported(1, raised_at=90), Instant(95))
    gang.handle(exited(1, 1, at=100), Instant(101))
    gang.handle(exited(0, -15, at=110), Instant(111))

    effects = gang.handle(Swept(0), Instant(120))

    raised = Failure(
        local_rank=1,
        attempt=0,
        cause=FailureCause.RAISED,
        at=Instant(90),
        exit=ExitStatus(1),
        pid=pid_of(1),
        error=error_record(raised_at=90),
    )
    stopped = Failure(
        local_rank=0,
        attempt=0,
        cause=FailureCause.STOPPED,
        at=Instant(110),
        exit=ExitStatus(-15),
        pid=pid_of(0),
        ended_by_us=True,
    )
    assert effects == [
        Finish(Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=(raised, stopped)))
    ]


def test_a_rank_that_was_ending_when_it_was_told_to_has_been_ended_by_us() -> None:
    gang = running_gang()
    gang.handle(reported(0, raised_at=88), Instant(92))
    gang.handle(reported(1, raised_at=90), Instant(95))
    gang.handle(exited(1, 1, at=100), Instant(101))
    gang.handle(exited(0, -15, at=110), Instant(111))
    gang.handle(Swept(0), Instant(120))

    first, second = outcome_of(gang).failures
    assert (first.local_rank, first.cause, first.ended_by_us) == (0, FailureCause.RAISED, True)
    assert (second.local_rank, second.cause, second.ended_by_us) == (1, FailureCause.RAISED, False)


def test_a_sigkill_in_the_grace_was_not_ours() -> None:
    gang = running_gang(grace=Duration(30 * SECOND))
    gang.handle(exited(1, 1, at=100), Instant(101))
    gang.handle(exited(0, -9, at=110), Instant(111))
    gang.handle(Swept(0), Instant(120))

    _, killed = outcome_of(gang).failures
    assert (killed.cause, killed.ended_by_us, killed.detail) == (FailureCause.STOPPED, False, "")


def test_a_kill_tells_how_long_the_worker_had() -> None:
    gang = running_gang(grace=Duration(30 * SECOND))
    gang.handle(exited(1, 1, at=100), Instant(100))
    gang.tick(Instant(100 + 30 * SECOND))
    gang.handle(exited(0, -9, at=110 + 30 * SECOND), Instant(111 + 30 * SECOND))
    gang.handle(Swept(0), Instant(120 + 30 * SECOND))

    _, killed = outcome_of(gang).failures
    assert killed.ended_by_us
    assert killed.detail == "it did not end within 30 s of the request to stop"


def test_a_worker_that_was_killed_before_its_grace_was_over_is_not_said_to_be_late() -> None:
    gang = running_gang(grace=Duration(30 * SECOND))
    gang.handle(exited(1, 1, at=100), Instant(100))
    gang.handle(StopRequested(2), Instant(100))
    gang.handle(StopRequested(2), Instant(100 + 2 * SECOND))
    gang.handle(exited(0, -9, at=100 + 3 * SECOND), Instant(100 + 3 * SECOND))
    gang.handle(Swept(0), Instant(100 + 4 * SECOND))

    _, killed = outcome_of(gang).failures
    assert killed.detail == "it was given only 2 s to end"


def test_a_report_alone_changes_nothing_yet() -> None:
    gang = running_gang()

    assert gang.handle(reported(0, raised_at=1), Instant(2)) == []
    assert gang.phase is GangPhase.RUNNING


def test_the_first_report_of_a_worker_counts() -> None:
    gang = running_gang(size=1)
    gang.handle(reported(0, "mine", raised_at=1), Instant(2))
    gang.handle(reported(0, "my child's", raised_at=3), Instant(4))
    gang.handle(exited(0, 1, at=5), Instant(6))
    gang.handle(Swept(0), Instant(7))

    assert outcome_of(gang).failures[0].error == error_record("mine", raised_at=1)


def test_a_worker_that_reported_and_still_exits_with_zero_has_succeeded() -> None:
    gang = running_gang(size=1)
    gang.handle(reported(0, raised_at=1), Instant(2))

    gang.handle(exited(0, 0, at=5), Instant(6))
    gang.handle(Swept(0), Instant(7))

    assert outcome_of(gang) == Outcome(status=OutcomeStatus.SUCCEEDED, attempts=1)


def test_an_exception_raised_after_the_order_to_stop_is_a_consequence_of_it() -> None:
    gang = running_gang(size=2)
    gang.handle(exited(0, 7, at=100), Instant(100))
    gang.handle(reported(1, "interrupted", raised_at=150), Instant(151))
    gang.handle(exited(1, 1, at=160), Instant(161))
    gang.handle(Swept(0), Instant(170))

    assert [f.cause for f in outcome_of(gang).failures] == [
        FailureCause.EXITED,
        FailureCause.STOPPED,
    ]


def test_a_worker_that_failed_by_itself_before_the_order_reached_it_has_failed() -> None:
    gang = running_gang(size=2)
    gang.handle(exited(0, 7, at=100), Instant(200))
    gang.handle(exited(1, -11, at=199), Instant(201))
    gang.handle(Swept(0), Instant(300))

    assert {f.local_rank: f.cause for f in outcome_of(gang).failures} == {
        0: FailureCause.EXITED,
        1: FailureCause.SIGNALED,
    }


def test_those_that_outlast_the_grace_are_killed_and_the_user_is_told() -> None:
    gang = running_gang(size=3, grace=GRACE, sweep_timeout=PATIENCE)
    gang.handle(exited(0, 1, at=0), Instant(0))
    gang.handle(exited(1, -15, at=1), Instant(1))

    assert gang.tick(Instant(GRACE - 1)) == []
    effects = gang.tick(Instant(GRACE))

    assert effects == [AnnounceKill(0, (2,)), *signal_orders(SIGKILL, [2])]
    assert gang.phase is GangPhase.KILLING
    assert gang.next_deadline == GRACE + PATIENCE
    assert gang.handle(exited(2, -9, at=GRACE), Instant(GRACE + 1)) == [Sweep(0)]


def test_without_grace_a_failure_kills_the_others_at_once() -> None:
    gang = running_gang(size=3, grace=Duration(0))

    effects = gang.handle(exited(1, 1, at=5), Instant(5))

    assert effects == [AnnounceKill(0, (0, 2)), *signal_orders(SIGKILL, [0, 2])]


def test_a_process_that_survives_sigkill_is_given_up_and_named() -> None:
    gang = running_gang(size=2, grace=Duration(0), sweep_timeout=PATIENCE)
    gang.handle(exited(0, 1, at=5), Instant(5))

    assert gang.tick(Instant(5 + PATIENCE)) == [Sweep(0)]
    gang.handle(Swept(0, survivors=(pid_of(1),)), Instant(6 + PATIENCE))

    outcome = outcome_of(gang)
    assert outcome.status is OutcomeStatus.FAILED
    assert outcome.survivors == (pid_of(1),)
    assert [(f.local_rank, f.cause, f.detail) for f in outcome.failures] == [
        (0, FailureCause.EXITED, ""),
        (1, FailureCause.STOPPED, "process 1001 survives SIGKILL: it is stuck in the kernel"),
    ]


def test_a_given_up_process_that_the_sweep_does_end_is_no_survivor() -> None:
    gang = running_gang(size=2, grace=Duration(0), sweep_timeout=PATIENCE)
    gang.handle(exited(0, 1, at=5), Instant(5))
    gang.tick(Instant(5 + PATIENCE))

    assert gang.handle(exited(1, -9, at=7), Instant(7 + PATIENCE)) == []
    gang.handle(Swept(0), Instant(8 + PATIENCE))

    assert outcome_of(gang).survivors == ()


def test_a_success_names_the_strays_that_live_on() -> None:
    gang = sweeping_gang(size=1)

    effects = gang.handle(Swept(0, survivors=(77, 78)), Instant(1))

    assert effects == [
        Finish(Outcome(status=OutcomeStatus.SUCCEEDED, attempts=1, survivors=(77, 78)))
    ]


def test_a_sweep_that_does_not_end_does_not_hold_up_a_success() -> None:
    gang = sweeping_gang(size=1, sweep_timeout=PATIENCE)

    assert gang.tick(Instant(PATIENCE - 1)) == []
    effects = gang.tick(Instant(PATIENCE))

    assert effects == [Finish(Outcome(status=OutcomeStatus.SUCCEEDED, attempts=1))]


def test_a_sweep_that_does_not_end_names_the_survivors_that_are_known() -> None:
    gang = running_gang(size=2, grace=Duration(0), sweep_timeout=PATIENCE)
    gang.handle(exited(0, 1, at=0), Instant(0))
    gang.tick(Instant(PATIENCE))

    gang.tick(Instant(2 * PATIENCE))

    assert outcome_of(gang).survivors == (pid_of(1),)


LATE_FACTS: list[Stimulus] = [
    spawned(0),
    WorkerRefused(0, 0, "late"),
    reported(0),
    exited(0, 1),
    Swept(0),
    StopRequested(15),
    ProgressLooked(0, Instant(0)),
    StacksDumped(0),
    GuardianLost("late"),
]


@pytest.mark.parametrize("fact", LATE_FACTS, ids=lambda fact: type(fact).__name__)
def test_a_finished_gang_is_silent(fact: Stimulus) -> None:
    gang = sweeping_gang(size=1)
    gang.handle(Swept(0), Instant(1))

    assert gang.handle(fact, Instant(2)) == []
    assert gang.tick(Instant(10**15)) == []
    assert gang.outcome == Outcome(status=OutcomeStatus.SUCCEEDED, attempts=1)
