"""The gang machine from `Started` until every worker runs."""

import pytest
from gangs import (
    exited,
    pid_of,
    running_gang,
    signal_orders,
    spawned,
    starting_gang,
)

from rankwise.base.errors import LocalProtocolError
from rankwise.base.failure import ExitStatus, Failure, FailureCause, Outcome, OutcomeStatus
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import (
    Finish,
    GangSpec,
    LookForProgress,
    ProgressLooked,
    SpawnWorker,
    Started,
    StopRequested,
    Suspended,
    Sweep,
    Swept,
    WorkerRefused,
)

SIGTERM, SIGKILL = 15, 9
PATIENCE = Duration(5 * SECOND)


def test_an_idle_gang_wants_nothing() -> None:
    gang = Gang(GangSpec(size=2))

    assert gang.next_deadline is None
    assert gang.tick(Instant(10**12)) == []
    assert gang.outcome is None


def test_starting_orders_every_worker_once_and_by_rank() -> None:
    gang = Gang(GangSpec(size=3))

    effects = gang.handle(Started(), Instant(7))

    assert effects == [SpawnWorker(0, 0), SpawnWorker(1, 0), SpawnWorker(2, 0)]
    assert gang.phase is GangPhase.STARTING
    assert gang.next_deadline == 7 + gang.spec.spawn_timeout


def test_a_gang_lives_once() -> None:
    gang = running_gang()

    with pytest.raises(LocalProtocolError, match="Started came while the gang was running"):
        gang.handle(Started(), Instant(1))


def test_nothing_happens_to_a_gang_before_it_is_started() -> None:
    with pytest.raises(LocalProtocolError, match="StopRequested came while the gang was idle"):
        Gang(GangSpec(size=1)).handle(StopRequested(2), Instant(1))


def test_a_gang_runs_when_its_last_worker_is_there() -> None:
    gang = starting_gang(size=2)

    assert gang.handle(spawned(1), Instant(3)) == []
    assert gang.tick(Instant(3)) == []
    assert gang.handle(spawned(0), Instant(4)) == []

    assert (gang.phase, gang.next_deadline) == (GangPhase.RUNNING, None)
    assert [worker.pid for worker in gang.workers] == [pid_of(0), pid_of(1)]


def test_a_worker_may_succeed_before_the_others_are_there() -> None:
    gang = starting_gang(size=2)
    gang.handle(spawned(0), Instant(1))

    assert gang.handle(exited(0, at=2), Instant(2)) == []
    gang.handle(spawned(1), Instant(3))

    assert gang.phase is GangPhase.RUNNING
    assert gang.handle(exited(1, at=4), Instant(4)) == [Sweep(0)]


def test_a_gang_of_one_that_is_over_before_it_runs_is_swept() -> None:
    gang = starting_gang(size=1)

    gang.handle(spawned(0), Instant(1))

    assert gang.handle(exited(0, at=2), Instant(2)) == [Sweep(0)]


def test_a_refusal_stops_those_that_are_there_and_those_yet_to_come() -> None:
    gang = starting_gang(size=3)
    gang.handle(spawned(0), Instant(1))

    effects = gang.handle(WorkerRefused(1, 0, "no memory"), Instant(2))

    assert effects == signal_orders(SIGTERM, [0])
    assert gang.phase is GangPhase.STOPPING
    assert gang.handle(spawned(2), Instant(3)) == signal_orders(SIGTERM, [2])


def test_a_refusal_of_the_only_worker_fails_the_gang() -> None:
    gang = starting_gang(size=1)

    assert gang.handle(WorkerRefused(0, 0, "no such file"), Instant(5)) == [Sweep(0)]
    effects = gang.handle(Swept(0), Instant(6))

    failure = Failure(
        local_rank=0,
        attempt=0,
        cause=FailureCause.NOT_STARTED,
        at=Instant(5),
        detail="no such file",
    )
    assert effects == [
        Finish(Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=(failure,)))
    ]


def test_refusals_of_all_end_the_attempt_when_the_last_is_heard() -> None:
    gang = starting_gang(size=2)

    assert gang.handle(WorkerRefused(1, 0, "no"), Instant(1)) == []
    assert gang.handle(WorkerRefused(0, 0, "no"), Instant(2)) == [Sweep(0)]


def test_a_failure_before_the_others_are_there_ends_the_attempt() -> None:
    gang = starting_gang(size=3)
    gang.handle(spawned(0), Instant(1))
    gang.handle(spawned(1), Instant(1))

    effects = gang.handle(exited(0, 3, at=2), Instant(2))

    assert effects == signal_orders(SIGTERM, [1])


def test_a_worker_that_comes_up_while_the_others_are_killed_is_killed_too() -> None:
    gang = starting_gang(size=2, grace=Duration(0))
    gang.handle(WorkerRefused(0, 0, "no"), Instant(1))
    assert gang.phase is GangPhase.KILLING

    assert gang.handle(spawned(1), Instant(2)) == signal_orders(SIGKILL, [1])


def test_workers_that_do_not_come_up_in_time_are_given_up() -> None:
    gang = starting_gang(size=2, spawn_timeout=PATIENCE)
    gang.handle(spawned(0), Instant(1))

    assert gang.tick(Instant(PATIENCE - 1)) == []
    assert gang.tick(Instant(PATIENCE)) == signal_orders(SIGTERM, [0])
    assert gang.handle(exited(0, -15, at=PATIENCE + 1), Instant(PATIENCE + 2)) == [Sweep(0)]
    effects = gang.handle(Swept(0), Instant(PATIENCE + 3))

    not_started = Failure(
        local_rank=1,
        attempt=0,
        cause=FailureCause.NOT_STARTED,
        at=Instant(PATIENCE),
        detail="it did not start within 5 s",
    )
    stopped = Failure(
        local_rank=0,
        attempt=0,
        cause=FailureCause.STOPPED,
        at=Instant(PATIENCE + 1),
        exit=ExitStatus(-15),
        pid=pid_of(0),
        ended_by_us=True,
    )
    assert effects == [
        Finish(Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=(not_started, stopped)))
    ]


def test_start_that_makes_no_progress_for_the_hang_timeout_is_given_up() -> None:
    gang = starting_gang(size=2, hang_timeout=PATIENCE)

    assert gang.next_deadline == Instant(PATIENCE)
    assert gang.tick(Instant(PATIENCE)) == [LookForProgress(0)]
    assert gang.handle(ProgressLooked(0, Instant(0)), Instant(PATIENCE)) == [Sweep(0)]
    assert gang.failures_so_far[0].detail == "its start made no progress for 5 s"


def test_start_that_makes_progress_goes_on_until_its_own_limit() -> None:
    limit = Duration(2 * PATIENCE)
    gang = starting_gang(size=2, hang_timeout=PATIENCE, spawn_timeout=limit)
    gang.tick(Instant(PATIENCE))

    assert gang.handle(ProgressLooked(0, Instant(PATIENCE)), Instant(PATIENCE)) == []
    assert gang.next_deadline == Instant(limit)
    assert gang.tick(Instant(limit)) == [Sweep(0)]
    assert gang.failures_so_far[0].detail == "it did not start within 10 s"


def test_start_limit_counts_while_the_answer_about_progress_is_out() -> None:
    limit = Duration(2 * PATIENCE)
    gang = starting_gang(size=2, hang_timeout=PATIENCE, spawn_timeout=limit)

    assert gang.tick(Instant(PATIENCE)) == [LookForProgress(0)]
    assert gang.next_deadline == Instant(limit)
    assert gang.tick(Instant(limit)) == [Sweep(0)]
    assert gang.failures_so_far[0].detail == "it did not start within 10 s"


def test_answer_about_progress_that_comes_after_the_start_limit_ends_the_start() -> None:
    limit = Duration(2 * PATIENCE)
    gang = starting_gang(size=2, hang_timeout=PATIENCE, spawn_timeout=limit)
    gang.tick(Instant(PATIENCE))

    answer = ProgressLooked(0, Instant(limit - 1))  # seed 10881: it came 11 ms after the limit

    assert gang.handle(answer, Instant(limit + 1)) == [Sweep(0)]
    assert gang.failures_so_far[0].detail == "it did not start within 10 s"


def test_start_limit_counts_no_time_in_which_the_run_was_suspended() -> None:
    limit = Duration(2 * PATIENCE)
    gang = starting_gang(size=2, hang_timeout=PATIENCE, spawn_timeout=limit)
    gang.handle(Suspended(limit), Instant(limit + 1))

    assert gang.tick(Instant(limit + PATIENCE)) == [LookForProgress(0)]
    answer = ProgressLooked(0, Instant(limit + PATIENCE))
    assert gang.handle(answer, Instant(limit + PATIENCE)) == []
    assert gang.next_deadline == Instant(2 * limit)


def test_a_worker_that_comes_up_after_it_was_given_up_is_killed() -> None:
    gang = starting_gang(size=2, spawn_timeout=PATIENCE)
    gang.handle(spawned(0), Instant(1))
    gang.tick(Instant(PATIENCE))

    assert gang.handle(spawned(1), Instant(PATIENCE + 1)) == signal_orders(SIGKILL, [1])


def test_a_worker_of_an_earlier_attempt_that_comes_up_late_is_killed() -> None:
    gang = running_gang(attempt=1)

    assert gang.handle(spawned(0, attempt=0), Instant(1)) == signal_orders(SIGKILL, [0])
    assert gang.phase is GangPhase.RUNNING


def test_one_that_was_told_to_stop_and_never_came_up_is_named_as_such() -> None:
    gang = starting_gang(size=2, grace=Duration(SECOND), sweep_timeout=Duration(100 * MILLISECOND))
    gang.handle(WorkerRefused(0, 0, "no"), Instant(0))

    assert gang.tick(Instant(SECOND)) == []
    assert gang.tick(Instant(SECOND + 100 * MILLISECOND)) == [Sweep(0)]
    gang.handle(Swept(0), Instant(2 * SECOND))

    assert gang.outcome is not None
    assert [failure.detail for failure in gang.outcome.failures] == [
        "no",
        "it was asked to stop before it had started",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 0}, "size is 0"),
        ({"grace": -1}, "grace is -1"),
        ({"sweep_timeout": -5}, "sweep_timeout is -5"),
        ({"spawn_timeout": -5}, "spawn_timeout is -5"),
        ({"stacks_timeout": -5}, "stacks_timeout is -5"),
        ({"hang_timeout": 0}, "hang_timeout is 0"),
    ],
)
def test_a_gang_that_cannot_be_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GangSpec(**{"size": 2, **changes})  # type: ignore[arg-type]
