"""The gang machine when somebody asks it to stop, in every phase."""

import pytest
from gangs import (
    exited,
    reported,
    running_gang,
    signal_orders,
    spawned,
    starting_gang,
    sweeping_gang,
)

from rankwise.base.failure import TIME_LIMIT_SIGNAL, FailureCause, OutcomeStatus
from rankwise.base.units import SECOND, Duration, Instant, after
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import (
    AnnounceKill,
    DumpStacks,
    Finish,
    ProgressLooked,
    StacksDumped,
    StopRequested,
    Suspended,
    Sweep,
    Swept,
)

SIGINT, SIGTERM, SIGKILL = 2, 15, 9
GRACE = Duration(30 * SECOND)


def status_of(gang: Gang) -> OutcomeStatus:
    assert gang.outcome is not None
    return gang.outcome.status


@pytest.mark.parametrize(
    ("asked_by", "sent"),
    [(SIGINT, SIGINT), (SIGTERM, SIGTERM), (None, SIGTERM), (TIME_LIMIT_SIGNAL, SIGTERM)],
)
def test_a_stop_passes_its_signal_on_to_every_worker(asked_by: int | None, sent: int) -> None:
    gang = running_gang(size=3, grace=GRACE)

    effects = gang.handle(StopRequested(asked_by), Instant(5))

    assert effects == signal_orders(sent, [0, 1, 2])
    assert gang.next_deadline == 5 + GRACE


def test_a_stopped_gang_ends_as_stopped_with_its_signal() -> None:
    gang = running_gang(size=2)
    gang.handle(StopRequested(SIGINT), Instant(5))
    gang.handle(exited(0, 0, at=6), Instant(6))

    assert gang.handle(exited(1, -2, at=7), Instant(7)) == [Sweep(0)]
    effects = gang.handle(Swept(0), Instant(8))

    assert gang.outcome is not None
    assert effects == [Finish(gang.outcome)]
    assert gang.outcome.status is OutcomeStatus.STOPPED
    assert gang.outcome.stop_signal == SIGINT
    assert [(f.local_rank, f.cause) for f in gang.outcome.failures] == [(1, FailureCause.STOPPED)]


def test_a_second_stop_kills_at_once() -> None:
    gang = running_gang(size=2)
    gang.handle(StopRequested(SIGINT), Instant(5))

    effects = gang.handle(StopRequested(SIGINT), Instant(6))

    assert effects == [AnnounceKill(0, (0, 1), asked_again=True), *signal_orders(SIGKILL, [0, 1])]
    assert gang.phase is GangPhase.KILLING


def test_a_third_stop_adds_nothing() -> None:
    gang = running_gang(size=2)
    gang.handle(StopRequested(SIGINT), Instant(5))
    gang.handle(StopRequested(SIGINT), Instant(6))
    deadline = gang.next_deadline

    assert gang.handle(StopRequested(SIGINT), Instant(7)) == []
    assert gang.next_deadline == deadline


def test_without_grace_the_first_stop_kills() -> None:
    gang = running_gang(size=1, grace=Duration(0))

    effects = gang.handle(StopRequested(SIGTERM), Instant(5))

    assert effects == [AnnounceKill(0, (0,)), *signal_orders(SIGKILL, [0])]


def test_a_stop_while_starting_reaches_those_that_come_up_later() -> None:
    gang = starting_gang(size=2)
    gang.handle(spawned(0), Instant(1))

    assert gang.handle(StopRequested(SIGINT), Instant(2)) == signal_orders(SIGINT, [0])
    assert gang.handle(spawned(1), Instant(3)) == signal_orders(SIGINT, [1])
    assert gang.handle(exited(0, -2, at=4), Instant(4)) == []
    assert gang.handle(exited(1, -2, at=5), Instant(5)) == [Sweep(0)]
    gang.handle(Swept(0), Instant(6))

    assert status_of(gang) is OutcomeStatus.STOPPED


def test_a_stop_after_a_failure_leaves_it_a_failure() -> None:
    gang = running_gang(size=2)
    gang.handle(exited(0, 1, at=1), Instant(1))

    assert gang.handle(StopRequested(SIGINT), Instant(2)) == []
    gang.handle(exited(1, -15, at=3), Instant(3))
    gang.handle(Swept(0), Instant(4))

    assert gang.outcome is not None
    assert gang.outcome.status is OutcomeStatus.FAILED
    assert gang.outcome.attempts == 1
    assert gang.outcome.stop_signal == SIGINT


def test_a_second_stop_after_a_failure_kills() -> None:
    gang = running_gang(size=2)
    gang.handle(exited(0, 1, at=1), Instant(1))
    gang.handle(StopRequested(SIGINT), Instant(2))

    effects = gang.handle(StopRequested(SIGINT), Instant(3))

    assert effects == [AnnounceKill(0, (1,), asked_again=True), *signal_orders(SIGKILL, [1])]


def test_a_stop_before_anybody_is_born_waits_for_nobody() -> None:
    gang = starting_gang(size=2)

    assert gang.handle(StopRequested(SIGINT), Instant(2)) == [Sweep(0)]
    gang.handle(Swept(0), Instant(3))

    assert status_of(gang) is OutcomeStatus.STOPPED


def test_a_stop_waits_for_nobody_unborn_once_the_born_have_ended() -> None:
    gang = starting_gang(size=2)
    gang.handle(spawned(0), Instant(1))
    gang.handle(StopRequested(SIGINT), Instant(2))

    assert gang.handle(exited(0, -2, at=3), Instant(3)) == [Sweep(0)]


def test_a_stop_while_sweeping_leaves_a_success_a_success() -> None:
    gang = sweeping_gang(size=1)

    assert gang.handle(StopRequested(SIGINT), Instant(1)) == []
    gang.handle(Swept(0), Instant(2))

    assert status_of(gang) is OutcomeStatus.SUCCEEDED


def test_a_stop_while_sweeping_after_a_failure_leaves_it_a_failure() -> None:
    gang = sweeping_gang(size=1, code=1)

    gang.handle(StopRequested(SIGINT), Instant(1))
    gang.handle(Swept(0), Instant(2))

    assert status_of(gang) is OutcomeStatus.FAILED


def test_a_stop_while_killing_changes_nothing() -> None:
    gang = running_gang(size=2, grace=Duration(0))
    gang.handle(exited(0, 1, at=1), Instant(1))
    deadline = gang.next_deadline

    assert gang.handle(StopRequested(SIGINT), Instant(2)) == []
    assert (gang.phase, gang.next_deadline) == (GangPhase.KILLING, deadline)


def test_a_stop_while_stacks_are_printed_ends_the_printing_and_the_hang_remains_the_cause() -> None:
    gang = running_gang(size=2, hang_timeout=Duration(10))
    gang.tick(Instant(10))
    assert gang.handle(ProgressLooked(0, Instant(0)), Instant(10)) == [DumpStacks(0)]

    assert gang.handle(StopRequested(SIGINT), Instant(11)) == signal_orders(SIGINT, [0, 1])
    assert gang.handle(StacksDumped(0), Instant(12)) == []
    gang.handle(exited(0, -2, at=13), Instant(13))
    gang.handle(exited(1, -2, at=13), Instant(13))
    gang.handle(Swept(0), Instant(14))

    assert gang.outcome is not None
    assert gang.outcome.status is OutcomeStatus.FAILED
    assert [f.cause for f in gang.outcome.failures] == [FailureCause.HUNG, FailureCause.HUNG]


def test_what_was_heard_first_decides_even_if_a_worker_had_died_before() -> None:
    gang = running_gang(size=2)
    gang.handle(StopRequested(SIGTERM), Instant(10))

    gang.handle(exited(0, -15, at=9), Instant(11))
    gang.handle(exited(1, -15, at=12), Instant(12))
    gang.handle(Swept(0), Instant(13))

    assert status_of(gang) is OutcomeStatus.STOPPED


def test_an_exception_from_before_the_stop_is_told_with_it() -> None:
    gang = running_gang(size=1)
    gang.handle(reported(0, raised_at=5), Instant(6))
    gang.handle(StopRequested(SIGINT), Instant(10))
    gang.handle(exited(0, 1, at=11), Instant(11))
    gang.handle(Swept(0), Instant(12))

    assert gang.outcome is not None
    assert [f.cause for f in gang.outcome.failures] == [FailureCause.RAISED]


def test_a_worker_that_survives_the_kill_after_a_stop_is_given_up() -> None:
    gang = running_gang(size=1, grace=Duration(100), sweep_timeout=Duration(50))
    gang.handle(StopRequested(SIGINT), Instant(0))

    assert gang.tick(Instant(100)) == [AnnounceKill(0, (0,)), *signal_orders(SIGKILL, [0])]
    assert gang.tick(Instant(150)) == [Sweep(0)]
    gang.tick(Instant(200))

    assert gang.outcome is not None
    assert gang.outcome.status is OutcomeStatus.STOPPED
    assert gang.outcome.survivors == (1000,)
    assert gang.outcome.detail == ""


def test_no_deadline_counts_the_time_in_which_everybody_stood_still() -> None:
    gang = running_gang(size=2, grace=GRACE)
    gang.handle(StopRequested(SIGTERM), Instant(5))
    stood = Duration(3600 * SECOND)

    assert gang.handle(Suspended(stood), after(Instant(6), stood)) == []

    assert gang.next_deadline == 5 + stood + GRACE
    assert gang.tick(after(Instant(6), stood)) == []
