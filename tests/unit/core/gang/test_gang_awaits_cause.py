"""The gang machine when a worker says that its peer is gone before that one's death is told."""

import pytest
from gangs import exited, reported, running_gang, signal_orders

from rankwise.base.failure import FailureCause, OutcomeStatus
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import (
    DumpsLooked,
    Effect,
    LookForDumps,
    RecallRequested,
    StopRequested,
    Suspended,
    Sweep,
    Swept,
)

SIGTERM, SIGABRT, SIGKILL = 15, 6, 9
GONE = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"


def gang_with_lost_peer(size: int = 2) -> Gang:
    """Rank 0 has failed at 0 s since a peer of it was gone."""
    gang = running_gang(size=size)
    assert fail_of_peer(gang, 0, Instant(0)) == [LookForDumps(0)]
    return gang


def fail_of_peer(gang: Gang, rank: int, at: Instant) -> list[Effect]:
    gang.handle(reported(rank, GONE, raised_at=at), at)
    return gang.handle(exited(rank, 1, at=at), at)


def at(seconds: float) -> Instant:
    return Instant(int(seconds * SECOND))


def root_of(gang: Gang) -> tuple[int, FailureCause]:
    first = gang.failures_so_far[0]
    return first.local_rank, first.cause


def test_rank_that_was_dying_then_and_is_told_of_later_is_the_root_cause() -> None:
    gang = gang_with_lost_peer()
    assert gang.handle(DumpsLooked(0, (1,)), Instant(0)) == []

    assert gang.handle(exited(1, -SIGABRT, at=at(1)), at(1)) == [Sweep(0)]
    gang.handle(Swept(0), at(1))

    assert root_of(gang) == (1, FailureCause.SIGNALED)
    assert gang.outcome is not None
    assert gang.outcome.status is OutcomeStatus.FAILED


def test_rank_that_aborts_later_and_was_not_dying_then_is_no_cause() -> None:
    gang = gang_with_lost_peer()
    gang.handle(DumpsLooked(0), Instant(0))

    gang.handle(exited(1, -SIGABRT, at=at(1)), at(1))

    assert root_of(gang)[0] == 0


@pytest.mark.parametrize("text", ["NCCL error: Duplicate GPU", "Read timed out", "refused"])
def test_exception_that_names_no_lost_connection_stops_the_others_at_once(text: str) -> None:
    gang = running_gang(size=2)
    gang.handle(reported(0, text, raised_at=0), Instant(0))

    assert gang.handle(exited(0, 1, at=0), Instant(0)) == signal_orders(SIGTERM, [1])


@pytest.mark.parametrize("code", [-SIGKILL, 3])
def test_others_are_told_to_stop_when_the_cause_is_known(code: int) -> None:
    gang = gang_with_lost_peer(size=3)

    assert gang.handle(exited(1, code, at=at(1)), at(1)) == signal_orders(SIGTERM, [2])

    assert root_of(gang)[0] == 1


def test_another_that_says_the_same_is_no_cause() -> None:
    gang = gang_with_lost_peer(size=3)

    assert fail_of_peer(gang, 2, at(1)) == []
    assert gang.next_deadline == 2 * SECOND, "the wait does not begin anew"


def test_without_a_dying_rank_the_others_are_told_to_stop_after_two_seconds() -> None:
    gang = gang_with_lost_peer()

    assert gang.tick(at(1.9)) == []
    assert gang.tick(at(2)) == [LookForDumps(0)]
    assert gang.handle(DumpsLooked(0), at(2)) == signal_orders(SIGTERM, [1])
    assert root_of(gang)[0] == 0


def test_rank_that_writes_its_core_is_awaited() -> None:
    gang = gang_with_lost_peer()
    gang.tick(at(2))

    assert gang.handle(DumpsLooked(0, (1,)), at(2)) == []
    assert gang.tick(at(20)) == []
    assert gang.handle(exited(1, -SIGABRT, at=at(21)), at(21)) == [Sweep(0)]
    assert root_of(gang) == (1, FailureCause.SIGNALED)


def test_rank_that_writes_its_core_for_too_long_is_told_to_stop() -> None:
    gang = gang_with_lost_peer()
    gang.tick(at(2))
    gang.handle(DumpsLooked(0, (1,)), at(2))
    gang.tick(at(10))  # by when rank 0 should have ended, as it has

    assert gang.tick(at(30)) == [LookForDumps(0)]
    assert gang.handle(DumpsLooked(0, (1,)), at(30)) == signal_orders(SIGTERM, [1])
    gang.handle(exited(1, -SIGABRT, at=at(31)), at(31))

    assert root_of(gang) == (1, FailureCause.SIGNALED), "it was dying before"


def test_rank_that_is_found_dying_when_it_is_told_to_stop_has_failed_by_itself() -> None:
    gang = running_gang(size=2)
    assert gang.handle(exited(0, 3, at=5), Instant(5)) == signal_orders(SIGTERM, [1])

    assert gang.handle(DumpsLooked(0, (1,)), Instant(6)) == []
    gang.handle(exited(1, -SIGABRT, at=7), Instant(7))

    assert [each.cause for each in gang.failures_so_far] == [
        FailureCause.EXITED,
        FailureCause.SIGNALED,
    ]


def test_dying_rank_that_was_killed_by_us_was_stopped() -> None:
    gang = running_gang(size=2, grace=Duration(0))
    gang.handle(exited(0, 3, at=5), Instant(5))
    gang.handle(DumpsLooked(0, (1,)), Instant(6))
    gang.handle(exited(1, -SIGKILL, at=7), Instant(7))

    assert gang.failures_so_far[1].cause is FailureCause.STOPPED


@pytest.mark.parametrize("stop", [StopRequested(SIGTERM), RecallRequested()])
def test_stop_that_comes_meanwhile_is_not_what_came_first(
    stop: StopRequested | RecallRequested,
) -> None:
    gang = gang_with_lost_peer()

    assert gang.handle(stop, at(1)) == signal_orders(SIGTERM, [1])
    gang.handle(exited(1, -SIGTERM, at=at(1)), at(1))
    gang.handle(Swept(0), at(1))

    assert gang.outcome is not None
    assert gang.outcome.status is OutcomeStatus.FAILED


def test_rank_that_the_stop_signal_reached_before_its_agent_explains_no_lost_peer() -> None:
    gang = gang_with_lost_peer()  # seed 5207: the scheduler signals ranks and agent

    gang.handle(StopRequested(SIGTERM), at(1))
    gang.handle(exited(1, -SIGTERM, at=at(0.96)), at(1.1))

    assert root_of(gang) == (0, FailureCause.RAISED)
    assert gang.failures_so_far[1].cause is FailureCause.STOPPED


def test_exception_of_its_own_stops_the_others_at_once() -> None:
    gang = running_gang(size=2)
    gang.handle(reported(0, "loss is NaN", raised_at=0), Instant(0))

    assert gang.handle(exited(0, 1, at=0), Instant(0)) == signal_orders(SIGTERM, [1])


def test_last_rank_is_waited_for_by_nobody() -> None:
    gang = running_gang(size=1)

    assert fail_of_peer(gang, 0, Instant(0)) == [Sweep(0)]


def test_time_in_which_the_node_stood_still_does_not_count() -> None:
    gang = gang_with_lost_peer()

    gang.handle(Suspended(Duration(5 * SECOND)), at(5))

    assert gang.phase is GangPhase.RUNNING
    assert gang.next_deadline == 7 * SECOND
