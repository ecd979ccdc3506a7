"""The gang machine when a worker tells of its exception and then does not end."""

from gangs import exited, reported, running_gang, signal_orders, starting_gang

from rankwise.base.failure import FailureCause, OutcomeStatus
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import LookForProgress, Sweep, Swept

SIGTERM = 15
PATIENCE = Duration(10 * SECOND)
TOO_LATE = Instant(PATIENCE)


def end_everybody(gang: Gang, code: int = -SIGTERM) -> None:
    for worker in gang.workers:
        gang.handle(exited(worker.local_rank, code, at=PATIENCE + 1), Instant(PATIENCE + 1))


def test_it_is_waited_for_and_then_the_attempt_ends_as_if_it_had() -> None:
    gang = running_gang(size=3, exit_timeout=PATIENCE)

    assert gang.handle(reported(1), Instant(0)) == []

    assert gang.next_deadline == TOO_LATE
    assert gang.tick(Instant(PATIENCE - 1)) == []
    assert gang.tick(Instant(PATIENCE)) == signal_orders(SIGTERM, [0, 1, 2])
    assert gang.phase is GangPhase.STOPPING


def test_it_is_the_root_cause_though_we_have_ended_it() -> None:
    gang = running_gang(size=2, exit_timeout=PATIENCE)
    gang.handle(reported(1), Instant(0))
    gang.tick(Instant(PATIENCE))
    end_everybody(gang)

    gang.handle(Swept(0), Instant(PATIENCE + 2))

    assert gang.outcome is not None
    assert gang.outcome.status is OutcomeStatus.FAILED
    root, other = gang.outcome.failures
    assert (root.local_rank, root.cause) == (1, FailureCause.RAISED)
    assert root.detail == "it had not ended 10 s after its exception"
    assert (other.cause, other.detail) == (FailureCause.STOPPED, "")


def test_one_that_ends_in_time_is_a_failure_like_any_other() -> None:
    gang = running_gang(size=2, exit_timeout=PATIENCE)
    gang.handle(reported(1), Instant(0))

    assert gang.handle(exited(1, 1, at=5), Instant(5)) == signal_orders(SIGTERM, [0])

    assert gang.next_deadline == 5 + gang.spec.grace


def test_one_that_ends_well_after_all_is_forgotten() -> None:
    gang = running_gang(size=2, exit_timeout=PATIENCE)
    gang.handle(reported(1), Instant(0))
    gang.handle(exited(1, 0, at=5), Instant(5))

    assert gang.tick(Instant(PATIENCE)) == []

    assert gang.next_deadline is None
    assert gang.handle(exited(0), Instant(PATIENCE)) == [Sweep(0)]


def test_each_has_its_own_time() -> None:
    gang = running_gang(size=2, exit_timeout=PATIENCE)
    gang.handle(reported(0), Instant(0))
    gang.handle(reported(1), Instant(3))
    gang.handle(reported(1), Instant(7))
    gang.handle(exited(0, 0, at=5), Instant(5))

    assert gang.tick(Instant(PATIENCE)) == []
    assert gang.next_deadline == PATIENCE + 3
    assert gang.tick(Instant(PATIENCE + 3)) == signal_orders(SIGTERM, [1])


def test_hangs_are_looked_for_all_the_same() -> None:
    gang = running_gang(size=2, exit_timeout=PATIENCE, hang_timeout=Duration(4))
    gang.handle(reported(1), Instant(0))

    assert gang.next_deadline == 4
    assert gang.tick(Instant(4)) == [LookForProgress(0)]
    assert gang.next_deadline == TOO_LATE


def test_a_gang_that_is_still_starting_ends_too() -> None:
    gang = starting_gang(size=2, exit_timeout=PATIENCE, spawn_timeout=Duration(2 * PATIENCE))
    gang.handle(reported(1), Instant(0))

    gang.tick(Instant(PATIENCE))

    assert gang.phase is GangPhase.STOPPING
