"""Call records that travel between nodes, and verdicts on those of several."""

import random

import pytest

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.units import SECOND, Instant
from rankwise.core.ledger import Call, CallRecord, Fate, Group, Sheet, Stage, judge
from rankwise.core.ledger.sheets import SHEET_BYTES_MAX, pack, unpack, with_all_members
from rankwise.core.matching import CallSignature, TensorForm

LONG = CallSignature("all_reduce", "sum", tensors=(TensorForm((4096,), "float32"),))

NOW = Instant(1000 * SECOND)
ELSEWHERE = Instant(7 * SECOND)
"""What a clock of another node shows at that moment."""


def test_a_sheet_arrives_as_it_was_with_the_instants_of_another_clock() -> None:
    call = Call(
        group="g",
        number=3,
        signature=CallSignature("all_reduce"),
        match=7,
        place="train.py:8",
        begun_at=Instant(NOW - 2 * SECOND),
        ended_at=Instant(NOW - SECOND),
        stage=Stage.DONE,
    )
    standing = Call(
        group="g", number=4, signature=CallSignature("barrier"), begun_at=Instant(NOW - SECOND)
    )
    record = CallRecord(
        rank=5,
        groups={"g": Group(label="dp", size=4, members=(5,))},
        counts={"g": 4},
        calls=(call, standing),
        fate=Fate.RAISED,
    )

    arrived = unpack(pack(Sheet((record,), (record,)), NOW), ELSEWHERE)

    (seen,) = arrived.seen
    assert arrived.recorded == arrived.seen
    assert (seen.rank, seen.groups, seen.counts, seen.fate) == (
        record.rank,
        record.groups,
        record.counts,
        record.fate,
    )
    assert [each.begun_at for each in seen.calls] == [5 * SECOND, 6 * SECOND]
    assert [each.ended_at for each in seen.calls] == [6 * SECOND, 0]
    assert [each.stage for each in seen.calls] == [Stage.DONE, Stage.WAITING]


def test_a_sheet_keeps_the_latest_calls_of_each_group_and_the_one_that_is_stood_in() -> None:
    begun = [
        Call(
            group="a" if number < 250 else "b",
            number=number,
            signature=CallSignature("x"),
            stage=Stage.DONE,
        )
        for number in range(1, 257)
    ]
    calls = (Call(group="a", number=0, signature=CallSignature("stood in")), *begun)
    record = CallRecord(
        rank=0, groups={key: Group(size=2, members=(0,)) for key in "ab"}, calls=calls
    )

    (seen,) = unpack(pack(Sheet((record,)), NOW), NOW).seen

    assert [call.number for call in seen.calls if call.group == "a"] == [0, *range(242, 250)]
    assert [call.number for call in seen.calls if call.group == "b"] == list(range(250, 257))


def test_a_sheet_of_many_ranks_that_do_alike_is_small() -> None:
    groups = {f"torch 0 {key}": Group(size=512, members=(*range(64),)) for key in range(3)}
    calls = tuple(
        Call(group=f"torch 0 {number % 3}", number=number, signature=LONG) for number in range(256)
    )
    records = tuple(CallRecord(rank=rank, groups=groups, calls=calls) for rank in range(64))

    assert len(pack(Sheet(records), NOW)) < SHEET_BYTES_MAX // 2


def test_a_sheet_is_never_larger_than_it_may_be() -> None:
    chance = random.Random(1)
    calls = tuple(
        Call(
            group=f"g{number % 64}",
            number=number,
            signature=CallSignature(chance.randbytes(60).hex()),
        )
        for number in range(256)
    )
    groups = {f"g{number}": Group(size=2, members=(0,)) for number in range(64)}
    records = tuple(CallRecord(rank=rank, groups=groups, calls=calls) for rank in range(64))

    sheet = pack(Sheet(records), NOW, 4096)

    assert len(sheet) <= 4096
    assert unpack(sheet, NOW) == Sheet()


def test_a_sheet_that_is_none_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="a node's sheet of calls cannot be read"):
        unpack(b"no sheet", NOW)


def test_the_members_of_a_group_are_those_that_all_nodes_know_of() -> None:
    records = [
        CallRecord(
            rank=0, groups={"tp": Group(size=2, members=(0,)), "": Group(size=4, members=(0, 1))}
        ),
        CallRecord(rank=2, groups={"tp": Group(size=2, members=(2,))}),
    ]

    first, second = with_all_members(records, 4)

    assert first.groups["tp"].members == second.groups["tp"].members == (0, 2)
    assert first.groups[""].members == (0, 1, 2, 3)


def test_ranks_of_two_nodes_that_call_different_things_disagree() -> None:
    records = with_all_members([standing(0, "all_reduce"), standing(1, "broadcast")], 2)

    verdict = judge(records, [], patience_is_over=False)

    assert verdict is not None
    assert verdict.is_certain
    assert verdict.blamed == (0, 1)
    assert verdict.text == (
        "call #1: ranks 0 and 1 disagree: rank 0 called all_reduce, rank 1 called broadcast"
    )


def test_a_rank_of_a_silent_node_is_not_accused() -> None:
    records = with_all_members([standing(0, "all_reduce")], 2)

    assert judge(records, [], patience_is_over=True) is None


def standing(rank: int, operation: str) -> CallRecord:
    call = Call(group="all", number=1, signature=CallSignature(operation), match=len(operation))
    return CallRecord(
        rank=rank,
        groups={"all": Group(size=2, members=(rank,))},
        counts={"all": 1},
        calls=(call,),
    )
