"""A gang whose workers can be called again outlives the failure of one of them."""

from gangs import exited, running_gang, signal_orders, spawned, starting_gang

from rankwise.base.failure import FailureCause, OutcomeStatus
from rankwise.base.machine import Ticked
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.state import GangPhase, RecallState
from rankwise.core.gang.vocabulary import (
    AnnounceStuck,
    Pause,
    RecallRequested,
    RecoveryMessage,
    RecoveryMessageSent,
    RecoveryOrder,
    Resumed,
    SignalWorker,
    SpawnWorker,
    StopRequested,
    Sweep,
    Swept,
    TellWorker,
    WorkerSpawned,
)

TIMEOUT = Duration(5 * SECOND)


def said(local_rank: int, word: RecoveryMessage, attempt: int = 0) -> RecoveryMessageSent:
    return RecoveryMessageSent(local_rank, attempt, word, TIMEOUT)


def tell(word: RecoveryOrder, local_ranks: list[int], attempt: int = 0) -> list[TellWorker]:
    return [TellWorker(local_rank, attempt, word) for local_rank in local_ranks]


def recoverable_gang(size: int = 3, offering: tuple[int, ...] = (0, 1, 2)) -> Gang:
    gang = running_gang(size)
    gang.recovers = True
    for local_rank in offering:
        gang.handle(said(local_rank, RecoveryMessage.OFFERS), Instant(0))
    return gang


def paused_gang() -> Gang:
    """Of three workers, the one in the middle has died."""
    gang = recoverable_gang()
    gang.handle(exited(1, -9, at=1), Instant(1))
    for local_rank in (0, 2):
        gang.handle(said(local_rank, RecoveryMessage.YIELDED), Instant(2))
    gang.handle(Swept(0, (), (0, 2)), Instant(3))
    assert gang.phase is GangPhase.PAUSED
    return gang


def test_a_death_recalls_those_that_can_be_called_again_and_stops_the_others() -> None:
    gang = recoverable_gang(offering=(0,))

    effects = gang.handle(exited(1, -9, at=1), Instant(1))

    assert effects == [*tell(RecoveryOrder.RECALL, [0]), SignalWorker(2, 0, 15)]
    assert gang.phase is GangPhase.RECALLING


def test_a_gang_without_restarts_left_is_stopped() -> None:
    gang = recoverable_gang()
    gang.recovers = False

    assert gang.handle(exited(1, -9, at=1), Instant(1)) == signal_orders(15, [0, 2])


def test_a_gang_in_which_nobody_offers_is_stopped() -> None:
    gang = recoverable_gang(offering=())

    assert gang.handle(exited(1, -9, at=1), Instant(1)) == signal_orders(15, [0, 2])


def test_a_worker_whose_function_has_returned_cannot_be_called_again() -> None:
    gang = recoverable_gang()
    for local_rank in (0, 2):
        gang.handle(said(local_rank, RecoveryMessage.WITHDRAWS), Instant(0))

    assert gang.handle(exited(1, -9, at=1), Instant(1)) == signal_orders(15, [0, 2])


def test_when_all_have_yielded_what_the_dead_left_is_swept_and_the_gang_pauses() -> None:
    gang = recoverable_gang()
    gang.handle(exited(1, -9, at=1), Instant(1))

    assert gang.handle(said(0, RecoveryMessage.YIELDED), Instant(2)) == []
    assert gang.handle(said(2, RecoveryMessage.YIELDED), Instant(2)) == [Sweep(0, (0, 2))]
    (pause,) = gang.handle(Swept(0, (), (0, 2)), Instant(3))

    assert isinstance(pause, Pause)
    assert pause.kept == (0, 2)
    assert [failure.local_rank for failure in pause.outcome.failures] == [1]
    assert gang.next_deadline is None


def test_a_paused_gang_goes_on_with_those_that_are_left_and_new_ones() -> None:
    gang = paused_gang()

    effects = gang.handle(Resumed(1, recovers=True), Instant(4))

    assert effects == [*tell(RecoveryOrder.AGAIN, [0, 2], attempt=1), SpawnWorker(1, 1)]
    gang.handle(WorkerSpawned(1, 1, 77), Instant(5))
    assert gang.phase is GangPhase.RUNNING
    assert gang.failures_so_far == ()


def test_those_that_were_called_again_can_be_recalled_at_once() -> None:
    gang = paused_gang()
    gang.handle(Resumed(1, recovers=True), Instant(4))
    gang.handle(WorkerSpawned(1, 1, 77), Instant(5))

    effects = gang.handle(exited(1, -9, at=6, attempt=1), Instant(6))

    assert effects == tell(RecoveryOrder.RECALL, [0, 2], attempt=1)


def test_a_late_fact_about_the_attempt_before_changes_nothing() -> None:
    gang = paused_gang()
    gang.handle(Resumed(1, recovers=True), Instant(4))

    assert gang.handle(exited(0, -9, at=4, attempt=0), Instant(4)) == []


def test_a_round_that_another_node_ends_recalls_ranks_none_of_which_has_failed() -> None:
    gang = recoverable_gang()

    assert gang.handle(RecallRequested(), Instant(1)) == tell(RecoveryOrder.RECALL, [0, 1, 2])
    assert gang.handle(RecallRequested(), Instant(1)) == []  # asked for twice
    for local_rank in (0, 1, 2):
        gang.handle(said(local_rank, RecoveryMessage.YIELDED), Instant(2))
    (pause,) = gang.handle(Swept(0, (), (0, 1, 2)), Instant(3))

    assert isinstance(pause, Pause)
    assert pause.kept == (0, 1, 2)
    assert (pause.outcome.status, pause.outcome.failures) == (OutcomeStatus.STOPPED, ())


def test_a_gang_that_goes_on_with_all_its_workers_runs_at_once() -> None:
    gang = recoverable_gang()
    gang.handle(RecallRequested(), Instant(1))
    for local_rank in (0, 1, 2):
        gang.handle(said(local_rank, RecoveryMessage.YIELDED), Instant(2))
    gang.handle(Swept(0, (), (0, 1, 2)), Instant(3))

    effects = gang.handle(Resumed(1, recovers=True), Instant(4))

    assert effects == tell(RecoveryOrder.AGAIN, [0, 1, 2], attempt=1)
    assert gang.phase is GangPhase.RUNNING
    gang.handle(exited(1, -9, at=6, attempt=1), Instant(6))
    assert [failure.local_rank for failure in gang.failures_so_far] == [1]


def test_what_fails_after_another_node_has_ended_the_round_is_no_failure_of_this_one() -> None:
    gang = recoverable_gang()
    gang.handle(RecallRequested(), Instant(1))
    for local_rank in (0, 2):
        gang.handle(said(local_rank, RecoveryMessage.YIELDED), Instant(2))
    gang.handle(exited(1, 1, at=3), Instant(3))
    (pause,) = gang.handle(Swept(0, (), (0, 2)), Instant(4))

    assert isinstance(pause, Pause)
    assert pause.outcome.status is OutcomeStatus.STOPPED
    assert [failure.cause for failure in pause.outcome.failures] == [FailureCause.STOPPED]


def test_a_round_that_another_node_ends_stops_a_gang_that_cannot_be_called_again() -> None:
    for gang in (recoverable_gang(offering=()), recoverable_gang()):
        gang.recovers = bool(gang.workers[0].recall_state is RecallState.BOUND)

        assert gang.handle(RecallRequested(), Instant(1)) == signal_orders(15, [0, 1, 2])


def test_a_recall_while_ranks_are_made_waits_until_all_exist() -> None:
    gang = starting_gang(2)
    gang.recovers = True
    gang.handle(spawned(0), Instant(0))
    gang.handle(said(0, RecoveryMessage.OFFERS), Instant(0))

    assert gang.handle(RecallRequested(), Instant(1)) == []
    effects = gang.handle(spawned(1), Instant(2))

    assert effects == [*tell(RecoveryOrder.RECALL, [0]), SignalWorker(1, 0, 15)]
    assert gang.phase is GangPhase.RECALLING


def test_who_does_not_leave_its_function_in_time_is_killed_and_replaced() -> None:
    gang = recoverable_gang()
    gang.handle(exited(1, -9, at=1), Instant(1))
    gang.handle(said(0, RecoveryMessage.YIELDED), Instant(2))

    late = Instant(1 + TIMEOUT)
    assert gang.next_deadline == late
    assert gang.handle(Ticked(), late) == [AnnounceStuck(0, (2,)), SignalWorker(2, 0, 9)]
    assert gang.handle(exited(2, -9, at=late), late) == [Sweep(0, (0,))]
    (pause,) = gang.handle(Swept(0, (), (0,)), late)

    assert isinstance(pause, Pause)
    causes = {failure.local_rank: failure.cause for failure in pause.outcome.failures}
    assert causes == {1: FailureCause.SIGNALED, 2: FailureCause.STOPPED}


def test_who_survives_that_kill_ends_the_gang() -> None:
    gang = recoverable_gang()
    gang.handle(exited(1, -9, at=1), Instant(1))
    gang.handle(said(0, RecoveryMessage.YIELDED), Instant(2))
    gang.handle(Ticked(), Instant(1 + TIMEOUT))
    later = gang.next_deadline
    assert later is not None

    gang.handle(Ticked(), later)

    assert gang.phase is GangPhase.KILLING


def test_a_death_in_the_pause_is_swept_after_before_the_gang_goes_on() -> None:
    gang = paused_gang()

    assert gang.handle(exited(2, -9, at=4), Instant(4)) == [Sweep(0, (0,))]
    assert gang.handle(Resumed(1, recovers=True), Instant(5)) == []
    assert gang.handle(Swept(0, (), (0, 2)), Instant(6)) == []  # an answer to an earlier sweep
    assert gang.handle(Swept(0, (), (0,)), Instant(7)) == [
        *tell(RecoveryOrder.AGAIN, [0], attempt=1), SpawnWorker(1, 1), SpawnWorker(2, 1),
    ]  # fmt: skip


def test_when_all_die_while_they_are_recalled_the_gang_has_failed() -> None:
    gang = recoverable_gang()
    gang.handle(exited(1, -9, at=1), Instant(1))
    gang.handle(exited(0, -9, at=2), Instant(2))

    assert gang.handle(exited(2, -9, at=2), Instant(2)) == [Sweep(0)]
    assert gang.phase is GangPhase.SWEEPING


def test_a_stop_in_the_pause_kills_those_that_wait_and_the_failure_stays_one() -> None:
    gang = paused_gang()

    assert gang.handle(StopRequested(2), Instant(4)) == signal_orders(9, [0, 2])
    for local_rank in (0, 2):
        gang.handle(exited(local_rank, -9, at=5), Instant(5))
    gang.handle(Swept(0), Instant(6))

    assert gang.outcome is not None
    assert gang.outcome.status == "failed"
    own = [each for each in gang.outcome.failures if each.cause is not FailureCause.STOPPED]
    assert [failure.local_rank for failure in own] == [1]


def test_an_exception_is_held_until_a_death_explains_it() -> None:
    gang = recoverable_gang()

    assert gang.handle(said(0, RecoveryMessage.EXCEPTION_HELD), Instant(1)) == []
    effects = gang.handle(exited(1, -9, at=2), Instant(2))

    assert effects == tell(RecoveryOrder.RECALL, [0, 2])


def test_exceptions_that_no_death_explains_are_released_together() -> None:
    gang = recoverable_gang()
    gang.handle(said(0, RecoveryMessage.EXCEPTION_HELD), Instant(1))
    gang.handle(said(2, RecoveryMessage.EXCEPTION_HELD), Instant(5))

    assert gang.next_deadline == Instant(1 + gang.spec.exception_timeout)
    assert gang.handle(Ticked(), gang.next_deadline) == tell(RecoveryOrder.RELEASE, [0, 2])


def test_without_restarts_an_exception_is_released_at_once() -> None:
    gang = recoverable_gang()
    gang.recovers = False

    assert gang.handle(said(0, RecoveryMessage.EXCEPTION_HELD), Instant(1)) == tell(
        RecoveryOrder.RELEASE, [0]
    )


def test_a_rank_that_returns_while_it_is_recalled_is_killed_since_it_is_late() -> None:
    gang = recoverable_gang()
    gang.handle(exited(1, -9, at=1), Instant(1))

    assert gang.handle(said(0, RecoveryMessage.WITHDRAWS), Instant(2)) == [SignalWorker(0, 0, 9)]


def test_a_death_while_workers_are_being_made_waits_until_all_of_them_exist() -> None:
    gang = starting_gang(2)
    gang.recovers = True
    gang.handle(spawned(0), Instant(0))
    gang.handle(said(0, RecoveryMessage.OFFERS), Instant(0))
    gang.handle(Resumed(1, recovers=True), Instant(0))  # it is not for a gang that runs
    assert gang.phase is GangPhase.STARTING

    gang.handle(spawned(1), Instant(1))
    assert gang.handle(exited(1, -9, at=1), Instant(1)) == tell(RecoveryOrder.RECALL, [0])
