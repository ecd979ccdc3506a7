"""What nodes ask each other about their ranks' calls, with a keyspace that answers at once."""

import itertools
from typing import TypeVar

from table_of_nodes import KEYS, Table

from rankwise.base.failure import (
    BlameIdentity,
    CallOfRanks,
    Failure,
    FailureCause,
    Mismatch,
    MismatchKind,
)
from rankwise.base.units import MILLISECOND, SECOND, Duration
from rankwise.core.rendezvous.configuration import RendezvousConfig, RestartPolicy
from rankwise.core.rendezvous.records import LateRank, Trouble
from rankwise.core.rendezvous.vocabulary import (
    CallRecordsReported,
    CallRecordsWanted,
    Commit,
    GangEnded,
    GangFailing,
    InquiryAnswered,
    InquiryJudged,
    Left,
    Notification,
    Order,
    RanksFound,
    Settled,
    SheetsGathered,
    TroubleReported,
)

Kind = TypeVar("Kind", bound=Notification)
TEXT = "rank 3 has not come to barrier #1"
ABSENT = Mismatch(MismatchKind.ABSENCE)
LATE = LateRank(rank=1, last=1.0, waited=Duration(SECOND), text="rank 1 came last")


def test_a_run_whose_calls_move_asks_nothing() -> None:
    table = running()

    table.pass_time(60 * SECOND)

    assert writes_of_inquiries(table) == []


def test_who_waits_after_a_time_out_is_told_what_the_call_records_of_all_nodes_say() -> None:
    table = running()

    table.tell("b", TroubleReported(0, Trouble.TIMED_OUT))
    inquiry = answer_all(table, Trouble.TIMED_OUT)
    gathered = told(table, "a", SheetsGathered)
    table.tell("a", InquiryJudged(inquiry, (1,), TEXT, mismatch=ABSENT))

    [sheets] = gathered
    assert (sheets.inquiry, sheets.trouble) == (inquiry, Trouble.TIMED_OUT)
    assert sheets.sheets == {"a": b"sheet of a", "b": b"sheet of b"}
    for node in ("a", "b"):
        assert told(table, node, RanksFound) == [RanksFound(0, (1,), TEXT, ABSENT)]


def test_a_node_that_is_done_learns_who_has_made_others_wait_and_nobody_is_accused() -> None:
    table = running()

    asked_at = table.now
    table.tell("b", TroubleReported(0, Trouble.DONE))
    inquiry = answer_all(table, Trouble.DONE)
    [gathered] = told(table, "a", SheetsGathered)
    table.tell("a", InquiryJudged(inquiry, late=LATE))

    assert (gathered.asked_at, gathered.received_at) == (asked_at, {"a": table.now, "b": table.now})
    assert told(table, "b", InquiryAnswered) == [InquiryAnswered(0, late=LATE)]
    assert told(table, "a", RanksFound) == []


def test_nodes_that_are_done_one_after_the_other_ask_once_a_second() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.DONE))
    table.tell("a", InquiryJudged(answer_all(table, Trouble.DONE), late=LATE))
    written = len(writes_of_inquiries(table))

    table.tell("a", TroubleReported(0, Trouble.DONE))
    at_once, written_since = told(table, "a", InquiryAnswered), writes_of_inquiries(table)[written:]
    table.pass_time(SECOND)
    table.tell("a", TroubleReported(0, Trouble.DONE))
    table.tell("a", InquiryJudged(answer_all(table, Trouble.DONE)))

    assert (at_once, written_since) == ([InquiryAnswered(0, late=LATE)], [])
    assert told(table, "a", InquiryAnswered) == [*at_once, InquiryAnswered(0)]


def test_a_node_that_is_done_while_another_is_told_who_was_late_is_told_it_too() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.DONE))
    inquiry = answer_all(table, Trouble.DONE)

    table.tell("a", TroubleReported(0, Trouble.DONE))
    table.tell("a", InquiryJudged(inquiry, late=LATE))

    for node in ("a", "b"):
        assert told(table, node, InquiryAnswered) == [InquiryAnswered(0, late=LATE)]
        assert len(told(table, node, CallRecordsWanted)) == 1


def test_nobody_waits_for_the_call_records_of_a_node_that_was_done_and_has_gone() -> None:
    table = running()
    table.tell("b", GangEnded(round=0, is_done=True))
    table.tell("b", Left())

    table.tell("a", TroubleReported(0, Trouble.DONE))
    inquiry = told(table, "a", CallRecordsWanted)[-1].inquiry
    table.tell("a", CallRecordsReported(inquiry, b"sheet of a"))
    table.tell("a", InquiryJudged(inquiry, late=LATE))

    assert told(table, "a", SheetsGathered)[0].sheets == {"a": b"sheet of a"}
    assert told(table, "a", InquiryAnswered) == [InquiryAnswered(0, "", ("b",), late=LATE)]


def test_who_has_failed_for_another_node_is_heard_of_after_that_one() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.TIMED_OUT))
    inquiry = answer_all(table, Trouble.TIMED_OUT)

    table.tell("a", InquiryJudged(inquiry, (1,), TEXT))
    before = told(table, "b", InquiryAnswered)
    table.tell("a", GangFailing(0, ()))

    assert before == []
    assert told(table, "b", InquiryAnswered) == [InquiryAnswered(0, TEXT)]


def test_who_keeps_its_own_node_waiting_is_told_at_once() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.TIMED_OUT))
    inquiry = answer_all(table, Trouble.TIMED_OUT)

    table.tell("a", InquiryJudged(inquiry, (2,), TEXT))

    assert told(table, "b", InquiryAnswered) == [InquiryAnswered(0, TEXT)]


def test_a_silent_node_is_waited_for_no_longer_than_a_second() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.FAILED))
    inquiry = told(table, "a", CallRecordsWanted)[-1].inquiry
    table.tell("b", CallRecordsReported(inquiry, b"sheet of b"))

    table.pass_time(SECOND)
    table.tell("a", InquiryJudged(inquiry))

    assert told(table, "a", SheetsGathered)[0].sheets == {"b": b"sheet of b"}
    assert told(table, "b", InquiryAnswered) == [InquiryAnswered(0, "", ("a",))]


def test_who_hears_nothing_from_the_leader_goes_on_by_itself() -> None:
    table = running()
    table.is_reached = lambda order: not _is_about_call_records(order)

    table.tell("b", TroubleReported(0, Trouble.FAILED))
    table.pass_time(2 * SECOND)

    assert told(table, "b", InquiryAnswered) == [InquiryAnswered(0, in_time=False)]


def test_ranks_that_only_stand_are_accused_when_two_inquiries_agree() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.STANDS))
    first = answer_all(table, Trouble.STANDS)
    table.tell("a", InquiryJudged(first, (1,), TEXT, is_certain=True))
    after_one = told(table, "a", RanksFound)

    table.pass_time(250 * MILLISECOND)
    second = answer_all(table, Trouble.STANDS)
    table.tell("a", InquiryJudged(second, (1,), TEXT, is_certain=True))

    assert after_one == []
    assert second != first
    assert told(table, "a", RanksFound) == [RanksFound(0, (1,), TEXT)]
    wanted = [each.with_recorders for each in told(table, "a", CallRecordsWanted)]
    assert wanted == [False, True], "the library may know that they have made the same calls"


def test_inquiries_that_blame_for_two_calls_in_one_sentence_do_not_agree() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.STANDS))

    for number in (1, 2):
        inquiry = answer_all(table, Trouble.STANDS)
        table.tell(
            "a", InquiryJudged(inquiry, (1,), TEXT, is_certain=True, identity=identity(number))
        )
        table.pass_time(250 * MILLISECOND)
    after_two = told(table, "a", RanksFound)
    inquiry = answer_all(table, Trouble.STANDS)
    table.tell("a", InquiryJudged(inquiry, (1,), TEXT, is_certain=True, identity=identity(2)))

    assert after_two == []
    assert told(table, "a", RanksFound) == [RanksFound(0, (1,), TEXT)]


def test_inquiries_that_blame_for_one_call_in_two_sentences_agree() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.STANDS))

    for text in ("rank 1 has not come", TEXT):
        inquiry = answer_all(table, Trouble.STANDS)
        table.tell("a", InquiryJudged(inquiry, (1,), text, is_certain=True, identity=identity(1)))
        table.pass_time(250 * MILLISECOND)

    assert told(table, "a", RanksFound) == [RanksFound(0, (1,), TEXT)]


def test_a_question_is_answered_with_what_tells_the_blame_from_other_blame() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.WHY))
    inquiry = answer_all(table, Trouble.WHY)

    table.tell("a", InquiryJudged(inquiry, (1,), TEXT, identity=identity(1)))

    assert told(table, "b", InquiryAnswered) == [InquiryAnswered(0, TEXT, identity=identity(1))]


def test_nobody_is_accused_of_being_late_while_ranks_only_stand() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.STANDS))

    for _ in range(4):
        table.tell("a", InquiryJudged(answer_all(table, Trouble.STANDS), (1,), TEXT))
        table.pass_time(60 * SECOND)

    assert told(table, "a", RanksFound) == []


def test_pauses_between_inquiries_double_while_the_same_ranks_stand() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.STANDS))
    asked_at = []

    for _ in range(5):
        asked_at.append(table.now // SECOND)
        table.tell("a", InquiryJudged(answer_all(table, Trouble.STANDS)))
        while told(table, "a", CallRecordsWanted)[-1].inquiry == table_inquiry(table):
            table.pass_time(SECOND)

    wanted = told(table, "a", CallRecordsWanted)
    pauses = [later - sooner for sooner, later in itertools.pairwise(asked_at)]
    assert pauses == [1, 2, 4, 8]
    assert [each.with_recorders for each in wanted] == [False] + 5 * [True]


def test_ranks_that_move_again_are_asked_no_more() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.STANDS))
    table.tell("a", InquiryJudged(answer_all(table, Trouble.STANDS)))

    table.tell("b", TroubleReported(0, Trouble.NONE))
    table.pass_time(120 * SECOND)

    assert len(told(table, "a", CallRecordsWanted)) == 1


def test_a_question_accuses_nobody() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.WHY))
    inquiry = answer_all(table, Trouble.WHY)

    table.tell("a", InquiryJudged(inquiry, (1,), TEXT, is_certain=True))

    assert told(table, "a", RanksFound) == []
    assert told(table, "b", InquiryAnswered) == [InquiryAnswered(0, TEXT)]


def test_ranks_that_stand_are_not_forgotten_when_somebody_has_asked_why() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.STANDS))
    table.tell("a", InquiryJudged(answer_all(table, Trouble.STANDS)))
    table.tell("b", TroubleReported(0, Trouble.WHY))
    table.tell("a", InquiryJudged(answer_all(table, Trouble.WHY)))

    table.pass_time(SECOND)

    assert answer_all(table, Trouble.STANDS)


def test_ranks_that_begin_to_stand_while_somebody_asks_why_are_told_of_afterwards() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.WHY))
    table.tell("b", TroubleReported(0, Trouble.STANDS))

    table.tell("a", InquiryJudged(answer_all(table, Trouble.WHY)))

    assert answer_all(table, Trouble.STANDS)


def test_a_time_out_of_an_earlier_round_accuses_nobody_who_is_late_in_this_one() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.TIMED_OUT))
    table.tell("a", InquiryJudged(answer_all(table, Trouble.TIMED_OUT)))
    begin_another_round(table)

    table.tell("a", TroubleReported(1, Trouble.STANDS))
    table.tell("a", InquiryJudged(answer_all(table, Trouble.STANDS)))
    table.pass_time(120 * SECOND)

    in_round_1 = [each for each in told(table, "a", CallRecordsWanted) if each.round == 1]
    assert {each.trouble for each in in_round_1} == {Trouble.STANDS}


def test_what_two_nodes_ask_for_at_once_is_answered_by_one_inquiry_or_the_next() -> None:
    table = running()
    table.tell("b", TroubleReported(0, Trouble.TIMED_OUT))
    table.tell("a", TroubleReported(0, Trouble.FAILED))

    table.tell("a", InquiryJudged(answer_all(table, Trouble.TIMED_OUT)))
    after_one = told(table, "a", InquiryAnswered)
    table.tell("a", InquiryJudged(answer_all(table, Trouble.FAILED)))

    assert after_one == []
    assert told(table, "b", InquiryAnswered) == [InquiryAnswered(0)]
    assert told(table, "a", InquiryAnswered) == [InquiryAnswered(0)]


def identity(number: int) -> BlameIdentity:
    """Blame of rank 1 for not coming to that barrier."""
    call = CallOfRanks((0,), "world", number, "barrier", 7, "train.py:9", -1)
    return BlameIdentity((1,), ABSENT, (call,))


def running() -> Table:
    """Two nodes with two ranks each, of which `a` leads."""
    table = Table()
    policy = RestartPolicy(restarts_max=1)
    config = RendezvousConfig(nodes_min=2, nodes_max=2, policy=policy)
    for node in ("a", "b"):
        table.add(node, config)
        table.ready(node)
    table.pass_time(SECOND // 10)
    assert table.nodes["a"].is_leading
    return table


def begin_another_round(table: Table) -> None:
    """A rank of `b` has failed, and all are started again."""
    failure = Failure(local_rank=0, attempt=0, cause=FailureCause.EXITED, at=table.now)
    table.tell("b", GangEnded(round=0, is_done=False, failures=(failure,)))
    table.tell("a", GangEnded(round=0, is_done=False))
    for node in ("a", "b"):
        table.ready(node, 1)
    table.pass_time(SECOND)
    assert told(table, "a", Settled)[-1].world.round == 1


def answer_all(table: Table, trouble: Trouble) -> str:
    """Both nodes answer the last inquiry."""
    wanted = told(table, "a", CallRecordsWanted)[-1]
    assert wanted.trouble is trouble
    for node in ("a", "b"):
        table.tell(node, CallRecordsReported(wanted.inquiry, f"sheet of {node}".encode()))
    return wanted.inquiry


def table_inquiry(table: Table) -> str:
    """The inquiry whose sheets were gathered last."""
    return told(table, "a", SheetsGathered)[-1].inquiry


def told(table: Table, node: str, kind: type[Kind]) -> list[Kind]:
    return [each for each in table.told[node] if isinstance(each, kind)]


def writes_of_inquiries(table: Table) -> list[Order]:
    return [order for order in table.orders if _is_about_call_records(order)]


def _is_about_call_records(order: Order) -> bool:
    return isinstance(order, Commit) and any(
        put.key == KEYS.inquiry or put.key.startswith(KEYS.call_records_notes)
        for put in order.transaction.puts
    )
