"""The gang machine when nobody makes progress."""

import pytest
from gangs import exited, pid_of, running_gang, signal_orders

from rankwise.base.failure import FailureCause, OutcomeStatus
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import (
    DumpStacks,
    Finish,
    LookForProgress,
    ProgressLooked,
    StacksDumped,
    Sweep,
    Swept,
)

SIGTERM = 15
PATIENCE = Duration(60 * SECOND)
STACKS = Duration(2 * SECOND)


def hanging_gang(size: int = 2) -> Gang:
    """A gang that has just ordered its workers to print their stacks."""
    gang = running_gang(size, hang_timeout=PATIENCE, stacks_timeout=STACKS)
    gang.tick(Instant(PATIENCE))
    gang.handle(ProgressLooked(0, Instant(0)), Instant(PATIENCE))
    assert gang.phase is GangPhase.DUMPING
    return gang


def test_a_gang_that_nobody_timed_never_asks() -> None:
    gang = running_gang(hang_timeout=None)

    assert gang.next_deadline is None
    assert gang.tick(Instant(10**18)) == []


def test_it_asks_when_the_timeout_could_have_passed() -> None:
    gang = running_gang(hang_timeout=PATIENCE)

    assert gang.next_deadline == Instant(PATIENCE)
    assert gang.tick(Instant(PATIENCE - 1)) == []
    assert gang.tick(Instant(PATIENCE)) == [LookForProgress(0)]
    assert gang.next_deadline is None


def test_a_sign_of_life_moves_the_deadline_behind_it() -> None:
    gang = running_gang(hang_timeout=PATIENCE)
    gang.tick(Instant(PATIENCE))

    assert gang.handle(ProgressLooked(0, Instant(SECOND)), Instant(PATIENCE)) == []

    assert gang.next_deadline == SECOND + PATIENCE
    assert gang.phase is GangPhase.RUNNING


def test_silence_makes_every_running_worker_print_its_stacks() -> None:
    gang = running_gang(hang_timeout=PATIENCE, stacks_timeout=STACKS)
    gang.tick(Instant(PATIENCE))

    effects = gang.handle(ProgressLooked(0, Instant(0)), Instant(PATIENCE))

    assert effects == [DumpStacks(0)]
    assert gang.next_deadline == PATIENCE + STACKS


def test_they_are_stopped_when_they_have_printed() -> None:
    gang = hanging_gang()

    effects = gang.handle(StacksDumped(0), Instant(PATIENCE + 1))

    assert effects == signal_orders(SIGTERM, [0, 1])


def test_they_are_stopped_when_printing_takes_too_long() -> None:
    gang = hanging_gang()

    assert gang.tick(Instant(PATIENCE + STACKS)) == signal_orders(SIGTERM, [0, 1])


@pytest.mark.parametrize("code", [0, -15, 1])
def test_those_that_hung_are_told_as_hung_however_they_end(code: int) -> None:
    gang = hanging_gang(size=1)
    gang.handle(StacksDumped(0), Instant(PATIENCE + 1))

    assert gang.handle(exited(0, code, at=PATIENCE + 2), Instant(PATIENCE + 2)) == [Sweep(0)]
    gang.handle(Swept(0), Instant(PATIENCE + 3))

    assert gang.outcome is not None
    assert gang.outcome.status is OutcomeStatus.FAILED
    (failure,) = gang.outcome.failures
    assert failure.cause is FailureCause.HUNG
    assert failure.at == Instant(PATIENCE)
    assert failure.detail == "no progress for 1 min"
    assert failure.pid == pid_of(0)


def test_one_that_had_ended_well_did_not_hang() -> None:
    gang = running_gang(size=2, hang_timeout=PATIENCE)
    gang.handle(exited(1, 0, at=1), Instant(1))
    gang.tick(Instant(PATIENCE))
    gang.handle(ProgressLooked(0, Instant(0)), Instant(PATIENCE))

    assert gang.handle(StacksDumped(0), Instant(PATIENCE)) == signal_orders(SIGTERM, [0])
    gang.handle(exited(0, -15, at=PATIENCE), Instant(PATIENCE))
    gang.handle(Swept(0), Instant(PATIENCE))

    assert gang.outcome is not None
    assert [failure.local_rank for failure in gang.outcome.failures] == [0]


def test_all_of_them_ending_while_they_print_goes_straight_to_the_sweep() -> None:
    gang = hanging_gang(size=2)

    assert gang.handle(exited(0, 1, at=PATIENCE), Instant(PATIENCE)) == []
    assert gang.handle(exited(1, 0, at=PATIENCE), Instant(PATIENCE)) == [Sweep(0)]


def test_an_answer_that_comes_after_the_attempt_began_to_end_is_ignored() -> None:
    gang = running_gang(size=2, hang_timeout=PATIENCE)
    gang.tick(Instant(PATIENCE))
    gang.handle(exited(0, 1, at=PATIENCE), Instant(PATIENCE))

    assert gang.handle(ProgressLooked(0, Instant(0)), Instant(PATIENCE)) == []
    assert gang.handle(StacksDumped(0), Instant(PATIENCE)) == []


def test_of_those_that_hang_the_ones_that_the_others_wait_for_are_the_root_cause() -> None:
    gang = running_gang(size=4, hang_timeout=Duration(10))
    looked = ProgressLooked(0, Instant(0), awaited=(1, 3), accused=(5, 7))

    gang.handle(looked, Instant(10))
    gang.handle(StacksDumped(0), Instant(11))
    for local_rank in range(4):
        gang.handle(exited(local_rank, -15, at=12), Instant(12))
    (finish,) = gang.handle(Swept(0), Instant(13))

    assert isinstance(finish, Finish)
    told = [(each.local_rank, each.cause) for each in finish.outcome.failures]
    assert told == [(rank, FailureCause.HUNG) for rank in (1, 3, 0, 2)]
    root, *others = finish.outcome.failures
    assert [each.is_as_much_to_blame_as(root) for each in others] == [True, False, False]
    assert [root.accused, others[-1].accused] == [(5, 7), ()]
    assert not root.is_shared, "all that hang are told together"


def test_who_is_waited_for_comes_first_while_it_still_lives() -> None:
    gang = running_gang(size=2, hang_timeout=Duration(10))
    gang.handle(ProgressLooked(0, Instant(0), awaited=(1,), accused=(1,)), Instant(10))
    gang.handle(StacksDumped(0), Instant(11))

    gang.handle(exited(0, -15, at=12), Instant(12))

    told = [(each.local_rank, each.at, each.exit) for each in gang.failures_so_far]
    assert told[0] == (1, Instant(10), None)
    assert told[1][:2] == (0, Instant(10))
