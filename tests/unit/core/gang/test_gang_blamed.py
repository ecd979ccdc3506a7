"""Workers for which others wait in vain: found out by those who can read their call records."""

from gangs import error_record, exited, running_gang

from rankwise.base.failure import FailureCause, Mismatch, MismatchKind, OutcomeStatus
from rankwise.base.units import Duration, Instant
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import (
    DumpStacks,
    Finish,
    RanksBlamed,
    SignalWorker,
    StacksDumped,
    Sweep,
    Swept,
    WorkerReported,
)

SIGTERM = 15
REASON = "rank 1 has not come to barrier #2, in which ranks 0, 2 wait"
ABSENT = Mismatch(MismatchKind.ABSENCE)


def test_all_show_where_they_stand_before_anybody_is_told_to_stop() -> None:
    gang = running_gang(size=3, stacks_timeout=Duration(7))

    shown = gang.handle(RanksBlamed((1,), 0, REASON), Instant(5))
    deadline = gang.next_deadline
    stopped = gang.handle(StacksDumped(0), Instant(6))

    assert shown == [DumpStacks(0)]
    assert deadline == Instant(12)
    assert stopped == [SignalWorker(rank, 0, SIGTERM) for rank in range(3)]


def test_who_is_to_blame_is_the_root_cause_though_others_failed_before() -> None:
    gang = running_gang(size=2)
    gang.handle(WorkerReported(0, 0, error_record("Timed out", raised_at=3)), Instant(4))

    gang.handle(RanksBlamed((1,), 0, REASON, (1,), ABSENT), Instant(5))
    gang.handle(exited(0, 1, at=6), Instant(6))
    gang.handle(StacksDumped(0), Instant(7))
    gang.handle(exited(1, -SIGTERM, at=8), Instant(8))
    (finish,) = gang.handle(Swept(0), Instant(9))

    assert isinstance(finish, Finish)
    told = [(each.local_rank, each.cause, each.at) for each in finish.outcome.failures]
    assert told == [
        (1, FailureCause.OUT_OF_STEP, Instant(5)),
        (0, FailureCause.RAISED, Instant(3)),
    ]
    assert (finish.outcome.failures[0].detail, finish.outcome.failures[0].mismatch) == (
        REASON,
        ABSENT,
    )
    assert not finish.outcome.failures[0].is_shared


def test_who_is_to_blame_comes_first_though_another_one_has_ended_before() -> None:
    gang = running_gang(size=2)
    gang.handle(RanksBlamed((1,), 0, REASON), Instant(5))
    gang.handle(StacksDumped(0), Instant(6))

    gang.handle(exited(0, 1, at=7), Instant(7))

    assert [failure.local_rank for failure in gang.failures_so_far][:1] == [1]


def test_what_a_rank_raises_after_it_was_blamed_says_less_than_where_it_stood() -> None:
    gang = running_gang(size=2)

    gang.handle(RanksBlamed((1,), 0, REASON), Instant(5))
    gang.handle(WorkerReported(1, 0, error_record("Connection closed", raised_at=6)), Instant(6))
    for rank in range(2):
        gang.handle(exited(rank, 1, at=7), Instant(7))
    (finish,) = gang.handle(Swept(0), Instant(9))

    assert isinstance(finish, Finish)
    assert (finish.outcome.failures[0].local_rank, finish.outcome.failures[0].error) == (1, None)


def test_ranks_that_are_accused_together_all_count_as_the_root_cause() -> None:
    gang = running_gang(size=3)

    gang.handle(RanksBlamed((0, 1), 0, "ranks 4 and 5 disagree", (4, 5)), Instant(5))
    gang.handle(StacksDumped(0), Instant(6))
    for rank in range(3):
        gang.handle(exited(rank, -SIGTERM, at=8), Instant(8))
    (finish,) = gang.handle(Swept(0), Instant(9))

    assert isinstance(finish, Finish)
    root, *others = finish.outcome.failures
    assert [each.is_as_much_to_blame_as(root) for each in others] == [True, False]
    assert root.accused == (4, 5)


def test_a_worker_that_had_ended_well_has_failed_if_others_waited_for_it() -> None:
    gang = running_gang(size=2)
    gang.handle(exited(1, 0, at=2), Instant(2))

    gang.handle(RanksBlamed((1,), 0, REASON), Instant(5))
    effects = gang.handle(exited(0, 1, at=6), Instant(6))
    (finish,) = gang.handle(Swept(0), Instant(9))

    assert effects == [Sweep(0)]
    assert isinstance(finish, Finish)
    assert finish.outcome.status is OutcomeStatus.FAILED
    assert finish.outcome.failures[0].local_rank == 1


def test_nobody_is_accused_of_another_attempt_or_when_all_are_being_stopped() -> None:
    gang = running_gang(size=2)

    early = gang.handle(RanksBlamed((1,), 7, REASON), Instant(1))
    gang.handle(exited(0, 3, at=2), Instant(2))
    late = gang.handle(RanksBlamed((1,), 0, REASON), Instant(3))

    assert (early, late) == ([], [])
    assert gang.phase is GangPhase.STOPPING
    assert not gang.workers[1].blame


def test_who_is_missed_by_another_node_has_failed_though_all_here_had_ended_well() -> None:
    gang = running_gang(size=2)
    gang.handle(exited(0, 0, at=2), Instant(2))
    gang.handle(exited(1, 0, at=3), Instant(3))

    effects = gang.handle(RanksBlamed((1,), 0, REASON), Instant(4))
    (finish,) = gang.handle(Swept(0), Instant(9))

    assert effects == []
    assert isinstance(finish, Finish)
    assert finish.outcome.status is OutcomeStatus.FAILED
    assert finish.outcome.failures[0].cause is FailureCause.OUT_OF_STEP
