"""What torch's flight recorder tells, as call records on which verdicts are found."""

from collections.abc import Iterable

import msgspec

from rankwise.base.units import Instant
from rankwise.core.ledger import Call, CallRecord, Fate, Group, Stage, find_blame
from rankwise.core.matching import CallSignature, TensorForm
from rankwise.drivers.real.call_rings import SAFE_ENTRIES
from rankwise.drivers.real.recorded_calls import (
    FROM_CPP,
    begun_by_cpp,
    recorded_call_record,
    with_library_numbers,
)
from rankwise.drivers.real.report_pipe import (
    RawSignature,
    Recorded,
    ReportedCall,
    ReportedGroup,
)

RANKS = (0, 1, 2)
GROUP = "torch 0 0"
SECOND = 1_000_000_000


def recorded(*calls: ReportedCall, name: str = GROUP) -> Recorded:
    return Recorded(1, (ReportedGroup(name, "", RANKS, calls),))


def of(operation: str) -> RawSignature:
    return operation, "", -1, (((4,), "float32"),)


def call(number: int, operation: str = "all_reduce", *, is_over: bool = True) -> ReportedCall:
    return ReportedCall(number * SECOND, number, of(operation), is_over)


def seen(rank: int, *calls: Call, fate: Fate = Fate.LIVES) -> CallRecord:
    groups = {GROUP: Group(size=3, members=RANKS)}
    return CallRecord(rank=rank, groups=groups, calls=calls, fate=fate)


def sampled(numbers: Iterable[int]) -> Recorded:
    sample = tuple((number, number * SECOND, 0) for number in numbers)
    return Recorded(
        1, (ReportedGroup(GROUP, "", RANKS, (), sample, (("all_reduce", "", -1, ()),)),)
    )


def entered(begun_s: float, ended_s: float, stage: Stage = Stage.DONE) -> Call:
    return Call(
        group=GROUP,
        number=1,
        signature=CallSignature("all_reduce", "max", tensors=(TensorForm((4,), "float32"),)),
        place="train.py:88",
        begun_at=Instant(round(begun_s * SECOND)),
        ended_at=Instant(round(ended_s * SECOND)),
        stage=stage,
    )


def test_a_rank_stands_in_the_first_call_that_is_not_over() -> None:
    calls = (call(1), call(2, is_over=False), call(3, is_over=False))

    record = recorded_call_record(recorded(*calls), seen(0), RANKS)

    assert [each.stage for each in record.calls] == [Stage.DONE, Stage.WAITING, Stage.ISSUED]
    assert record.counts == {GROUP: 3}
    assert [each.number for each in record.standing] == [2]


def test_what_cpp_has_begun_is_what_the_rank_has_not_entered() -> None:
    told = sampled(range(1, 6))
    own = seen(0, entered(1.5, 2.5), entered(3.5, 3.7), entered(4.5, 0, Stage.WAITING))

    assert [call.number for call in begun_by_cpp(told, own)] == [1, 3, 4]
    assert len(begun_by_cpp(told, seen(0))) == 5


def test_a_wait_for_a_handle_hides_nothing_that_cpp_begins_meanwhile() -> None:
    wait = msgspec.structs.replace(entered(1.5, 4.5), of_handle=True)

    calls = begun_by_cpp(sampled([1, 2]), seen(0, wait))

    assert [(call.number, str(call.signature)) for call in calls] == [
        (1, "all_reduce"),
        (2, "all_reduce"),
    ]


def test_what_the_rank_may_have_entered_and_forgotten_is_not_taken_for_what_cpp_has_begun() -> None:
    remembered = [entered(2.5 + at / SAFE_ENTRIES, 0) for at in range(SAFE_ENTRIES)]
    done = [msgspec.structs.replace(call, ended_at=call.begun_at) for call in remembered]

    calls = begun_by_cpp(sampled(range(1, 6)), seen(0, *done))

    assert [call.number for call in calls] == [4, 5]


def test_an_exception_is_about_the_latest_call_if_all_are_over() -> None:
    record = recorded_call_record(recorded(call(1), call(2)), seen(0, fate=Fate.RAISED), RANKS)

    assert [each.number for each in record.standing] == [2]


def test_a_call_that_the_rank_has_entered_itself_is_told_with_its_line() -> None:
    own = seen(0, entered(0.5, 1.5), entered(2.5, 0, Stage.WAITING))
    calls = recorded(call(1), call(2), call(3, is_over=False))

    record = recorded_call_record(calls, own, RANKS)

    assert [each.place for each in record.calls] == ["train.py:88", FROM_CPP, "train.py:88"]
    assert [str(each.signature) for each in record.calls] == [
        "all_reduce (max) of (4,) float32",
        "all_reduce of (4,) float32",
        "all_reduce (max) of (4,) float32",
    ]


def test_a_call_that_has_failed_on_the_rank_is_no_success_though_it_is_over() -> None:
    record = recorded_call_record(
        recorded(call(1), call(2)), seen(0, entered(1.9, 2.5, Stage.FAILED)), RANKS
    )

    assert [each.stage for each in record.calls] == [Stage.DONE, Stage.FAILED]
    assert record.standing == ()


def test_calls_of_another_group_or_operation_lend_nothing() -> None:
    own = seen(0, entered(0.5, 1.5))

    other_group = recorded_call_record(recorded(call(1), name="7"), own, RANKS)
    other_operation = recorded_call_record(recorded(call(1, "broadcast")), own, RANKS)

    assert [each.place for each in other_group.calls] == [FROM_CPP]
    assert [each.place for each in other_operation.calls] == [FROM_CPP]


def test_members_on_other_nodes_are_unknown() -> None:
    record = recorded_call_record(recorded(call(1)), seen(0), (0, 1))

    assert (record.groups[GROUP].size, record.groups[GROUP].members) == (3, (0, 1))


def test_the_rank_that_called_something_else_is_to_blame_not_those_that_wait_in_cpp() -> None:
    waiting = recorded(call(1), call(2, is_over=False))
    records = [
        recorded_call_record(recorded(call(1), call(2, "barrier", is_over=False)), seen(0), RANKS),
        *(recorded_call_record(waiting, seen(rank), RANKS) for rank in (1, 2)),
    ]

    verdict = find_blame(records, patience_is_over=False, issued_is_waiting=True)

    assert verdict is not None
    assert (verdict.blamed, verdict.is_certain) == ((0,), True)


def test_entries_have_torchs_numbers_where_the_recorder_has_the_same_operation() -> None:
    wait = msgspec.structs.replace(entered(3.5, 4.5), of_handle=True)
    other = msgspec.structs.replace(entered(4.6, 5.5), number=2, signature=CallSignature("barrier"))
    latest = msgspec.structs.replace(entered(5.6, 0, Stage.WAITING), number=3)
    own = seen(0, entered(1.5, 2.5), wait, other, latest)

    record = with_library_numbers(own, sampled(range(1, 7)))

    assert [each.library_number for each in record.calls] == [2, 2, 0, 6]
    nothing = Recorded(1, ())
    assert with_library_numbers(own, nothing) == own


def test_a_circle_of_issued_calls_is_none() -> None:
    """Each has issued a call of a group to which the other has yet to come, and goes on."""
    groups = (("0", 0), ("1", 1))
    records = []
    for name, rank in groups:
        other = ReportedGroup("1" if name == "0" else "0", "", RANKS, ())
        issued = ReportedGroup(name, "", RANKS, (call(1, is_over=False),))
        record = recorded_call_record(Recorded(1, (issued, other)), seen(rank), (0, 1))
        records.append(record)

    assert find_blame(records, patience_is_over=True, issued_is_waiting=True) is None
    circle = find_blame(records, patience_is_over=True)
    assert circle is not None
    assert circle.blamed == (0, 1)


def test_what_a_worker_sends_is_read_as_it_was_sent() -> None:
    record = recorded(call(1))
    line = msgspec.json.decode(msgspec.json.encode(record), type=Recorded)

    assert line == record
