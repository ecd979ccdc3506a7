"""The gang machine between one attempt and the next."""

import pytest

from rankwise.base.backoff import Backoff
from rankwise.base.failure import ExitStatus, Failure, FailureCause, OutcomeStatus
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.gang.state import Phase
from rankwise.core.gang.vocabulary import AnnounceRestart, GangSpec, Swept
from rankwise.testing.gangs import pid_of, spawn_orders, starting_gang, sweeping_gang

PATIENCE = Duration(10 * SECOND)


def failure_of(local_rank: int, attempt: int, at: int) -> Failure:
    return Failure(
        local_rank=local_rank,
        attempt=attempt,
        cause=FailureCause.EXITED,
        at=Instant(at),
        exit=ExitStatus(1),
        pid=pid_of(local_rank, attempt),
    )


def test_the_first_restart_is_announced_and_immediate() -> None:
    gang = sweeping_gang(size=2, code=1, restarts_max=2)

    effects = gang.handle(Swept(0), Instant(9))

    failures = (failure_of(0, 0, at=0), failure_of(1, 0, at=0))
    assert effects == [AnnounceRestart(0, 1, Duration(0), failures), *spawn_orders(2, attempt=1)]
    assert gang.phase is Phase.STARTING
    assert gang.next_deadline == 9 + gang.spec.spawn_timeout
    assert all(worker.pid is None for worker in gang.workers)


def test_the_second_restart_backs_off() -> None:
    backoff = Backoff(initial=Duration(3 * SECOND))
    gang = sweeping_gang(size=1, code=1, attempt=1, restarts_max=2, backoff=backoff)

    effects = gang.handle(Swept(1), Instant(0))

    assert effects == [AnnounceRestart(1, 0, Duration(3 * SECOND), (failure_of(0, 1, at=0),))]
    assert gang.phase is Phase.BACKING_OFF
    assert gang.tick(Instant(3 * SECOND - 1)) == []
    assert gang.tick(Instant(3 * SECOND)) == spawn_orders(1, attempt=2)


def test_the_restarts_are_used_up_and_then_the_gang_has_failed() -> None:
    gang = sweeping_gang(size=1, code=1, attempt=2)

    gang.handle(Swept(2), Instant(5 * SECOND))

    assert gang.outcome is not None
    assert gang.outcome.status is OutcomeStatus.FAILED
    assert gang.outcome.attempts == 3
    assert [failure.attempt for failure in gang.outcome.failures] == [2]
    assert gang.outcome.detail == ""


def test_a_success_after_a_restart_has_no_failures() -> None:
    gang = sweeping_gang(size=2, code=0, attempt=1)

    gang.handle(Swept(1), Instant(5))

    assert gang.outcome is not None
    assert gang.outcome.status is OutcomeStatus.SUCCEEDED
    assert (gang.outcome.attempts, gang.outcome.failures) == (2, ())


def test_only_failures_spend_restarts() -> None:
    gang = sweeping_gang(size=1, code=0, restarts_max=2)

    gang.handle(Swept(0), Instant(1))

    assert gang.restarts_left == 2


def test_nothing_restarts_over_a_process_that_survives_sigkill() -> None:
    gang = sweeping_gang(size=1, code=1, restarts_max=2)

    gang.handle(Swept(0, survivors=(71, 72)), Instant(1))

    assert gang.outcome is not None
    assert gang.outcome.status is OutcomeStatus.FAILED
    assert gang.outcome.survivors == (71, 72)
    assert gang.outcome.detail == (
        "not restarted: SIGKILL does not end what the gang left behind (pids 71, 72)"
    )


def test_nothing_restarts_while_it_is_unknown_what_is_left() -> None:
    gang = sweeping_gang(size=1, code=1, restarts_max=2, sweep_timeout=PATIENCE)

    gang.tick(Instant(PATIENCE))

    assert gang.outcome is not None
    assert gang.outcome.status is OutcomeStatus.FAILED
    assert gang.outcome.detail == (
        "not restarted: what the gang left behind was not swept within 10 s"
    )


def test_a_survivor_is_no_excuse_when_no_restart_was_left_anyway() -> None:
    gang = sweeping_gang(size=1, code=1)

    gang.handle(Swept(0, survivors=(71,)), Instant(1))

    assert gang.outcome is not None
    assert gang.outcome.detail == ""


def test_starting_again_begins_with_workers_of_whom_nothing_is_known() -> None:
    gang = starting_gang(size=2, attempt=1)

    assert gang.attempt == 1
    assert [(w.pid, w.error, w.exit, w.ended_at) for w in gang.workers] == [(None,) * 4] * 2


@pytest.mark.parametrize(
    ("restart", "seconds"), [(1, 0), (2, 1), (3, 2), (4, 4), (7, 32), (8, 60), (10_000, 60)]
)
def test_pauses_double_up_to_the_longest(restart: int, seconds: int) -> None:
    assert Backoff().before_restart(restart) == seconds * SECOND


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 0}, "size is 0"),
        ({"restarts_max": -1}, "restarts_max is -1"),
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


@pytest.mark.parametrize("changes", [{"initial": -1}, {"longest": -1}, {"factor": 0}])
def test_a_back_off_that_cannot_be_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="back-off"):
        Backoff(**changes)  # type: ignore[arg-type]
