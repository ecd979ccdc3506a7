"""What the exit watch passes on at once, what it holds back, and how each hold ends."""

import pytest
from gangs import error_record, exited, reported, running_gang

from rankwise.base.machine import Ticked
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant
from rankwise.core.gang.vocabulary import (
    LookForProgress,
    ProgressLooked,
    RanksBlamed,
    Stimulus,
    StopRequested,
    Suspended,
    Swept,
    WorkerExited,
    WorkerReported,
    WorkerSpawned,
)
from rankwise.core.rendezvous.records import Trouble
from rankwise.core.watch.machine import (
    ANSWER_PATIENCE,
    LOOK_PATIENCE,
    NODES_PATIENCE,
    STOP_WINDOW,
    STRAGGLE,
    ExitWatch,
)
from rankwise.core.watch.vocabulary import (
    AskNodes,
    AskRanks,
    AwaitedFound,
    CallsBegan,
    CallsJudged,
    EndLooked,
    FindAwaited,
    HeldExit,
    HoldReason,
    HoldStep,
    JudgeCalls,
    LookAtEnd,
    LookAtPast,
    NodesAnswered,
    NoteHold,
    Passed,
    PassOn,
    PastLooked,
    RanksAnswered,
    WatchEffect,
    WatchSpec,
)

SIGABRT, SIGKILL, SIGTERM = 6, 9, 15
GRACE = Duration(30 * SECOND)
HANG = Duration(60 * SECOND)
PEER_GONE = "Connection closed by peer"
BLAMED = RanksBlamed((2,), 0, "rank 2 has not come to all_reduce #3", (2,))


def watch_of(
    size: int = 3, *, makes_calls: bool = True, asks_about_hangs: bool = False
) -> ExitWatch:
    """A watch of a running gang."""
    spec = WatchSpec(stop_signals=(SIGTERM,), asks_about_hangs=asks_about_hangs)
    watch = ExitWatch(spec, grace=GRACE, hang_timeout=HANG)
    watch.gang = running_gang(size)
    if makes_calls:
        watch.handle(CallsBegan(0), Instant(0))
    return watch


def asking(fact: Stimulus, *, trouble: Trouble = Trouble.FAILED) -> ExitWatch:
    """A watch that has just asked the ranks about an end."""
    watch = watch_of()
    watch.handle(fact, Instant(0))
    is_over = trouble is Trouble.TIMED_OUT
    assert watch.handle(EndLooked(0, 0, is_over_limit=is_over), Instant(0)) == [AskRanks(0)]
    return watch


def hold_of(
    reason: HoldReason,
    held: list[tuple[int, int]],
    awaited: list[HoldStep],
    *,
    accused: tuple[int, ...] = (),
    is_stop: bool = False,
) -> NoteHold:
    """The note of a hold for rank 0's sake; exits by rank, with nanoseconds."""
    exits = tuple(HeldExit(rank, Duration(for_ns)) for rank, for_ns in held)
    return NoteHold(0, 0, reason, exits, tuple(awaited), accused, is_stop)


@pytest.mark.parametrize(
    "fact",
    [exited(0, 0), exited(0, 3), reported(0), Swept(0), ProgressLooked(0, Instant(0)), BLAMED],
    ids=lambda fact: type(fact).__name__,
)
def test_without_calls_and_signals_facts_pass_at_once(fact: Stimulus) -> None:
    watch = watch_of(makes_calls=False)

    assert watch.handle(fact, Instant(1)) == [PassOn(fact)]
    assert not watch.awaits_gang


def test_exit_that_tells_of_itself_passes_when_the_call_records_were_read() -> None:
    watch = watch_of()

    assert watch.handle(exited(0, 3), Instant(0)) == [LookAtEnd(0, 0, has_exited=True)]
    assert watch.handle(EndLooked(0, 0), Instant(1)) == [PassOn(exited(0, 3))]
    assert watch.next_deadline is None


def test_exception_that_may_be_anothers_passes_and_the_next_exit_waits_for_the_ranks_answers() -> (
    None
):
    watch = watch_of()
    now = Instant(200 * MILLISECOND)

    told = watch.handle(reported(0, PEER_GONE), Instant(0))
    assert told == [PassOn(reported(0, PEER_GONE)), LookAtEnd(0, 0, has_exited=False)]
    assert watch.handle(EndLooked(0, 0), Instant(0)) == [AskRanks(0)]
    assert watch.handle(exited(1, 1), Instant(0)) == []
    judge = JudgeCalls(0, 0, has_exited=False, trouble=Trouble.FAILED)
    assert watch.handle(RanksAnswered(0), now) == [judge]
    note = hold_of(
        HoldReason.ERROR, [(1, 200 * MILLISECOND)], [HoldStep.ASKING_RANKS], accused=(2,)
    )
    # The gang hears whom to blame first, and the exit when it has taken that in.
    assert watch.handle(CallsJudged(0, 0, BLAMED), now) == [PassOn(BLAMED), note]
    assert watch.awaits_gang
    assert watch.handle(Passed(), now) == [LookAtEnd(0, 1, has_exited=True)]
    assert watch.handle(EndLooked(0, 1), now) == [PassOn(exited(1, 1))]


def test_exception_of_the_program_holds_nothing_back() -> None:
    watch = watch_of()

    assert watch.handle(reported(0, "loss is NaN"), Instant(0)) == [
        PassOn(reported(0, "loss is NaN"))
    ]


def test_ranks_that_may_yet_come_to_the_call_are_waited_for_before_any_rank_is_asked() -> None:
    watch = watch_of()
    watch.handle(reported(0, PEER_GONE), Instant(0))

    assert watch.handle(EndLooked(0, 0, may_come=True, is_ending=True), Instant(0)) == []
    assert watch.next_deadline == Instant(STRAGGLE)
    assert watch.tick(Instant(STRAGGLE)) == [LookAtEnd(0, 0, has_exited=False)]
    # One that is done by its call record may tell how it ends; it has a second for that.
    assert watch.handle(EndLooked(0, 0, may_come=True, is_ending=True), Instant(STRAGGLE)) == []
    late = Instant(5 * STRAGGLE)
    watch.tick(late)
    assert watch.handle(EndLooked(0, 0, may_come=True, is_ending=True), late) == [AskRanks(0)]


def test_other_nodes_are_asked_if_the_ranks_here_do_not_know_and_the_own_finding_serves() -> None:
    watch = asking(reported(0, PEER_GONE))
    watch.handle(exited(1, 1), Instant(0))
    watch.handle(RanksAnswered(0), Instant(0))

    judged = CallsJudged(0, 0, BLAMED, is_open=True)
    assert watch.handle(judged, Instant(0)) == [AskNodes(Trouble.FAILED)]
    awaited = [HoldStep.ASKING_RANKS, HoldStep.ASKING_NODES]
    note = hold_of(HoldReason.ERROR, [(1, SECOND)], awaited, accused=(2,))
    assert watch.handle(NodesAnswered(), Instant(SECOND)) == [PassOn(BLAMED), note]


@pytest.mark.parametrize("fact", [reported(0, PEER_GONE), exited(0, -SIGKILL)])
def test_exit_is_let_go_when_no_answer_comes(fact: Stimulus) -> None:
    watch = asking(fact, trouble=Trouble.TIMED_OUT)
    watch.handle(exited(1, 0), Instant(0))
    has_exited = isinstance(fact, WorkerExited)

    asked = watch.tick(Instant(ANSWER_PATIENCE))
    assert asked == [JudgeCalls(0, 0, has_exited=has_exited, trouble=Trouble.TIMED_OUT)]
    judged = CallsJudged(0, 0, is_open=True)
    assert watch.handle(judged, Instant(ANSWER_PATIENCE)) == [AskNodes(Trouble.TIMED_OUT)]
    end = Instant(ANSWER_PATIENCE + NODES_PATIENCE)
    note, passed = watch.tick(end)
    assert isinstance(note, NoteHold)
    assert passed == PassOn(fact if has_exited else exited(1, 0))


def test_ranks_are_asked_once_in_an_attempt_and_again_in_the_next() -> None:
    watch = asking(reported(0, PEER_GONE))
    watch.handle(RanksAnswered(0), Instant(0))
    watch.handle(CallsJudged(0, 0), Instant(0))

    watch.handle(reported(1, PEER_GONE), Instant(0))
    judge = JudgeCalls(0, 1, has_exited=False, trouble=Trouble.FAILED)
    assert watch.handle(EndLooked(0, 1), Instant(0)) == [judge]
    assert watch.handle(CallsJudged(0, 1, is_open=True), Instant(0)) == []

    watch.gang = running_gang(3, attempt=1)
    watch.handle(CallsBegan(1), Instant(0))
    watch.handle(reported(0, PEER_GONE, attempt=1), Instant(0))
    assert watch.handle(EndLooked(1, 0), Instant(0)) == [AskRanks(1)]


def test_rank_that_aborts_waits_for_the_others_of_its_call_and_then_for_no_answer() -> None:
    watch = watch_of()
    watch.handle(exited(0, -SIGABRT), Instant(0))

    open_ = EndLooked(0, 0, blamed=BLAMED, is_undecided=True)
    assert watch.handle(open_, Instant(0)) == []
    assert watch.tick(Instant(STRAGGLE)) == [LookAtEnd(0, 0, has_exited=True)]
    note = hold_of(HoldReason.ABORT, [(0, STRAGGLE)], [HoldStep.STRAGGLING], accused=(2,))
    told = watch.handle(EndLooked(0, 0, blamed=BLAMED), Instant(STRAGGLE))
    assert told == [PassOn(BLAMED), note]
    assert watch.handle(Passed(), Instant(STRAGGLE)) == [PassOn(exited(0, -SIGABRT))]


def test_last_success_of_a_node_waits_until_the_others_tell_who_was_late() -> None:
    watch = watch_of(size=2)
    assert watch.gang is not None
    assert watch.handle(exited(1, 0), Instant(0)) == [PassOn(exited(1, 0))]
    watch.gang.handle(exited(1, 0), Instant(0))

    assert watch.handle(exited(0, 0), Instant(0)) == [LookAtPast(0)]
    looked = PastLooked(0, asks_who_is_late=True)
    assert watch.handle(looked, Instant(0)) == [AskNodes(Trouble.DONE)]
    note = hold_of(HoldReason.LATENESS, [(0, SECOND)], [HoldStep.ASKING_NODES])
    assert watch.handle(NodesAnswered(), Instant(SECOND)) == [note, PassOn(exited(0, 0))]


def test_rank_that_dies_of_a_signal_to_the_run_waits_for_the_stop_and_follows_it() -> None:
    watch = watch_of(makes_calls=False)
    assert watch.gang is not None
    assert watch.handle(exited(0, -SIGTERM), Instant(0)) == []
    assert watch.handle(exited(1, 128 + SIGTERM), Instant(5)) == []

    assert watch.handle(StopRequested(SIGTERM), Instant(10)) == []
    assert not watch.awaits_gang  # other nodes may have to agree
    watch.gang.handle(StopRequested(SIGTERM), Instant(20))
    assert watch.awaits_gang
    note = hold_of(HoldReason.STOP, [(0, 20), (1, 15)], [HoldStep.AWAITING_STOP], is_stop=True)
    told = watch.handle(Passed(), Instant(20))
    assert told == [note, PassOn(exited(0, -SIGTERM, at=21))]
    assert watch.handle(Passed(), Instant(20)) == [PassOn(exited(1, 128 + SIGTERM, at=21))]


def test_gang_that_is_stopped_hears_of_births_before_the_exits_that_were_held_back() -> None:
    watch = watch_of(makes_calls=False)  # seed 7369: else it swept rank 1 without its grace
    assert watch.gang is not None
    spawned = WorkerSpawned(1, 0, 101)
    watch.handle(exited(0, -SIGTERM), Instant(0))
    assert watch.handle(spawned, Instant(5)) == []
    watch.handle(StopRequested(SIGTERM), Instant(10))
    watch.gang.handle(StopRequested(SIGTERM), Instant(10))

    note = hold_of(HoldReason.STOP, [(0, 10)], [HoldStep.AWAITING_STOP], is_stop=True)
    assert watch.handle(Passed(), Instant(10)) == [note, PassOn(spawned)]
    assert watch.handle(Passed(), Instant(10)) == [PassOn(exited(0, -SIGTERM, at=11))]


def test_without_a_stop_such_a_death_is_a_failure_after_the_window() -> None:
    watch = watch_of(makes_calls=False)
    watch.handle(exited(0, -SIGTERM), Instant(0))
    watch.handle(Swept(0), Instant(1))

    assert watch.next_deadline == Instant(STOP_WINDOW)
    note = hold_of(HoldReason.STOP, [(0, STOP_WINDOW)], [HoldStep.AWAITING_STOP])
    assert watch.tick(Instant(STOP_WINDOW)) == [note, PassOn(exited(0, -SIGTERM))]
    assert watch.handle(Passed(), Instant(STOP_WINDOW)) == [PassOn(Swept(0))]


def test_exits_are_let_go_at_once_when_the_gang_is_stopped_during_a_hold() -> None:
    watch = asking(reported(0, PEER_GONE))
    assert watch.gang is not None
    watch.handle(exited(1, 1), Instant(0))
    assert not watch.awaits_gang

    watch.gang.handle(StopRequested(SIGTERM), Instant(SECOND))
    assert watch.awaits_gang
    # They keep their instants: they have ended before the stop, by themselves.
    note = hold_of(HoldReason.ERROR, [(1, SECOND)], [HoldStep.ASKING_RANKS], is_stop=True)
    assert watch.handle(Passed(), Instant(SECOND)) == [note, PassOn(exited(1, 1))]
    assert watch.next_deadline is None
    assert watch.handle(RanksAnswered(0), Instant(SECOND)) == []


def test_time_in_which_the_node_was_suspended_is_no_time_that_late_ranks_had() -> None:
    watch = watch_of()
    watch.handle(exited(0, -SIGABRT), Instant(0))
    undecided = EndLooked(0, 0, blamed=BLAMED, is_undecided=True)
    watch.handle(undecided, Instant(0))
    watch.handle(Suspended(Duration(5 * SECOND)), Instant(5 * SECOND))
    now = Instant(5 * SECOND + STRAGGLE)
    assert watch.tick(now) == [LookAtEnd(0, 0, has_exited=True)]

    assert watch.handle(undecided, now) == []  # it goes on waiting for them
    assert watch.next_deadline == now + STRAGGLE


def test_hang_is_passed_on_with_the_ranks_that_are_awaited() -> None:
    watch = watch_of(asks_about_hangs=True)
    looked = ProgressLooked(0, Instant(0))

    assert watch.handle(looked, Instant(HANG)) == [FindAwaited(0)]
    told = ProgressLooked(0, Instant(0), awaited=(1,), accused=(1,))
    assert watch.handle(AwaitedFound(0, (1,), (1,)), Instant(HANG)) == [PassOn(told)]


def test_hang_that_the_host_cannot_explain_is_looked_at_again_after_the_nodes_were_asked() -> None:
    watch = watch_of(asks_about_hangs=True)
    looked = ProgressLooked(0, Instant(0))
    watch.handle(looked, Instant(HANG))

    assert watch.handle(AwaitedFound(0), Instant(HANG)) == [AskNodes(Trouble.TIMED_OUT)]
    # Nothing else waits meanwhile.
    assert watch.handle(Swept(0), Instant(HANG)) == [PassOn(Swept(0))]
    assert watch.handle(NodesAnswered(), Instant(HANG)) == [LookForProgress(0)]
    assert watch.handle(looked, Instant(HANG)) == [PassOn(looked)]


def test_deadlines_do_not_count_the_time_in_which_the_node_was_suspended() -> None:
    watch = asking(reported(0, PEER_GONE))

    assert watch.handle(Suspended(Duration(SECOND)), Instant(SECOND)) == []
    assert watch.next_deadline == SECOND + ANSWER_PATIENCE


def test_blame_that_comes_during_a_hold_is_heard_at_once() -> None:
    watch = asking(reported(0, PEER_GONE))
    watch.handle(exited(1, 1), Instant(0))

    assert watch.handle(BLAMED, Instant(1)) == [PassOn(BLAMED)]


@pytest.mark.parametrize(
    "late",
    [EndLooked(0, 1), EndLooked(1, 0), RanksAnswered(0), CallsJudged(0, 0), PastLooked(0)],
    ids=lambda late: type(late).__name__,
)
def test_answers_that_are_not_awaited_change_nothing(
    late: EndLooked | RanksAnswered | CallsJudged | PastLooked,
) -> None:
    watch = watch_of()
    watch.handle(exited(0, -SIGABRT), Instant(0))

    assert watch.handle(late, Instant(0)) == []
    assert watch.next_deadline == Instant(LOOK_PATIENCE)


def test_an_early_tick_changes_nothing() -> None:
    watch = watch_of()
    watch.handle(exited(0, 1), Instant(0))

    assert watch.tick(Instant(LOOK_PATIENCE - 1)) == []
    assert watch.handle(Ticked(), Instant(LOOK_PATIENCE - 1)) == []
    told: list[WatchEffect] = watch.tick(Instant(LOOK_PATIENCE))
    assert told[-1] == PassOn(exited(0, 1))


def test_a_time_out_is_no_reason_to_wait_for_ranks_that_are_late() -> None:
    watch = watch_of()
    error = error_record("Timed out waiting 1800000ms for recv operation to complete")
    watch.handle(WorkerReported(0, 0, error), Instant(0))

    assert watch.handle(EndLooked(0, 0, may_come=True), Instant(0)) == [AskRanks(0)]
