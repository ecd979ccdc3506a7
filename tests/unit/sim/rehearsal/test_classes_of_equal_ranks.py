"""Which ranks run, so that each class has one, and each group of one that runs has each class."""

from types import SimpleNamespace

import pytest

from rankwise.base.errors import PeerDied
from rankwise.core.matching import CallSignature
from rankwise.simranks.world.collective_groups import CollectiveGroup, Conditions
from rankwise.simranks.world.equals import (
    Division,
    Equals,
    GroupKind,
    NotEqual,
    RankChoice,
    kind_of_group,
)
from rankwise.simranks.world.places import CallSite
from rankwise.simranks.world.scheduler import Scheduler


def wanted_of(equals: Equals) -> RankChoice:
    assert equals.wanted is not None
    return equals.wanted


def mesh(equals: Equals, *sizes: int) -> list[GroupKind]:
    """The kinds of groups of a mesh, which ranks make."""
    kinds, stride = [], 1
    for size in reversed(sizes):
        kinds.append(GroupKind(size, stride))
        equals.note_group(kinds[-1].group_of(0))
        stride *= size
    return kinds


@pytest.mark.parametrize("seed", range(5))
def test_stages_are_classes_and_whole_pipelines_run(seed: int) -> None:
    first = Equals(RankChoice(), 512, seed)
    tensors, shards, stages = mesh(first, 8, 8, 8)

    with pytest.raises(NotEqual):
        first.check_peer(stages.group_of(0), 0, 64, CallSignature("send"))
    choice = wanted_of(first)
    second = Equals(choice, 512, seed)

    assert [len(each.members) for each in second.classes] == [64] * 8
    assert {len(each.simulated) for each in second.classes} == {2}
    for rank in choice.simulated:
        assert choice.simulated.issuperset(stages.group_of(rank))
    second.check_peer(stages.group_of(0), 0, 64, CallSignature("send"))
    for kind in (tensors, shards, stages):
        second.check(kind.group_of(0))
    assert second.wanted is None


def test_group_of_a_rank_that_runs_has_a_rank_of_each_class() -> None:
    last = Division(GroupKind(8, 2), (7,))
    equals = Equals(
        RankChoice(frozenset({0, 3, 14}), kinds=(GroupKind(8, 2),), divisions=(last,)), 16
    )

    equals.check((0, 2, 4, 6, 8, 10, 12, 14))
    with pytest.raises(NotEqual):
        equals.check((1, 3, 5, 7, 9, 11, 13, 15))

    assert 15 in wanted_of(equals).simulated


def test_rank_that_differs_is_divided_from_the_others_and_its_neighbours_run() -> None:
    equals = Equals(RankChoice(simulated=frozenset({0, 9})), 16)

    choice = equals.divided_by({0: b"a", 9: b"b"}, "rank 0 logs, rank 9 does not")

    assert choice is not None
    after = Equals(choice, 16)
    assert [each.members for each in after.classes] == [(0,), tuple(range(1, 16))]
    assert {1, 9, 15} <= after.simulated


def test_difference_is_explained_by_the_kind_of_group_with_the_fewest_cuts() -> None:
    simulated = frozenset({0, 1, 2, 3, 6, 9})
    equals = Equals(RankChoice(simulated, kinds=(GroupKind(2, 1),)), 16)

    choice = equals.divided_by({rank: b"ab"[rank % 2 :] for rank in simulated}, "")

    assert choice is not None
    assert [each.members for each in Equals(choice, 16).classes] == [
        tuple(range(0, 16, 2)), tuple(range(1, 16, 2)),
    ]  # fmt: skip


def test_divisions_end_and_then_all_ranks_run() -> None:
    equals = Equals(RankChoice(frozenset({0, 9}), number=8), 16)

    assert equals.divided_by({0: b"a", 9: b"b"}, "") is None


@pytest.mark.parametrize(
    ("rows", "members"),
    [(50, [12, 1, 3]), (15, [15, 1]), (64, [16]), (3, [3, 13])],
)
def test_uneven_shard_divides_ranks_by_their_rows(rows: int, members: list[int]) -> None:
    equals = Equals(RankChoice(), 16)

    equals.note_shard(tuple(range(16)), rows)

    after = equals if equals.wanted is None else Equals(equals.wanted, 16)
    assert [len(each.members) for each in after.classes] == members


def test_groups_with_other_links_let_all_ranks_run() -> None:
    equals = Equals(RankChoice(), 12)
    equals.price = lambda ranks: len({rank // 6 for rank in ranks})  # nodes of 6

    equals.note_group((0, 1, 2))
    before = equals.difference
    equals.note_group((0, 1, 2, 3))

    assert before == ""
    assert equals.difference == "the links among ranks 0-3 differ from those among ranks 4-7"


def test_rank_that_does_not_run_brings_what_its_class_brings() -> None:
    halves = Division(GroupKind(2, 4), (1,))
    equals = Equals(RankChoice(frozenset({0, 2, 5, 6}), divisions=(halves,)), 8)

    assert equals.representatives(range(8), [0, 2, 5, 6]) == (0, 0, 2, 0, 5, 5, 6, 5)
    assert [equals.weight(rank) for rank in (0, 5)] == [2, 2]


def test_kinds_of_groups_tell_the_groups_of_all_ranks() -> None:
    assert kind_of_group((1, 9)).group_of(4) == (4, 12)
    assert kind_of_group((0, 3, 4)).group_of(1) == ()


def test_choices_end_where_each_run_uses_another_group() -> None:
    equals = Equals(RankChoice(frozenset({0, 9}), number=8), 16)

    with pytest.raises(NotEqual):
        equals.check((0, 3, 4))

    assert equals.wanted is None
    assert equals.difference == "8 choices of ranks did not cover all groups and shards"


def test_line_of_a_read_is_told_from_a_folder_with_the_word_in() -> None:
    equals = Equals(RankChoice(), 16)
    code = compile("", "/home/me/work in progress/train.py", "exec")

    equals.note_read("RANK", CallSite(code, 0))

    assert equals.reads == {("/home/me/work in progress/train.py:1", "RANK"): 1}


def test_end_of_a_rank_that_does_not_run_fails_no_operation() -> None:
    conditions = Conditions()
    conditions.equals = Equals(RankChoice(frozenset({0, 3})), 4)
    scheduler = Scheduler(own_state=SimpleNamespace())
    group = CollectiveGroup(scheduler, "all", (0, 1, 2, 3), conditions)

    group.lose(1, PeerDied("rank 1 has ended"))
    pending = [group.meet(rank, CallSignature("barrier"), None, print) for rank in (0, 3)]

    assert [each.error for each in pending] == [None, None]
    assert pending[0].is_open
