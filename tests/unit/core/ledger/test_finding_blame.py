"""Who is to blame, by the call records of ranks: examples, and programs of all kinds."""

import random
from collections.abc import Callable, Mapping, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.base.failure import Mismatch, MismatchKind
from rankwise.base.units import Instant
from rankwise.core.ledger import (
    Blame,
    Call,
    CallRecord,
    Fate,
    Group,
    Stage,
    find_blame,
    find_disagreement,
    find_past_disagreement,
    waits_of,
)
from rankwise.core.ledger.sentences import wait_in_words
from rankwise.core.matching import NO_RANK, CallSignature, TensorForm

WORLD = "world"


def of(
    operation: str,
    reduction: str = "",
    shape: tuple[int, ...] = (),
    *,
    root: int = NO_RANK,
    dtype: str = "float32",
    tag: int = 0,
) -> CallSignature:
    return CallSignature(operation, reduction, root, (TensorForm(shape, dtype),), tag=tag)


def call(number: int, stage: Stage = Stage.WAITING, **changes: object) -> Call:
    made = Call(
        group=WORLD,
        number=number,
        signature=of("all_reduce", "sum", (4,)),
        match=1,
        place="train.py:88",
        begun_at=Instant(number),
        stage=stage,
    )
    return msgspec.structs.replace(made, **changes)


def record(rank: int, *calls: Call, fate: Fate = Fate.LIVES, size: int = 3) -> CallRecord:
    groups = {WORLD: Group(size=size, members=tuple(range(size)))}
    counts = {WORLD: max((each.number for each in calls), default=0)}
    return CallRecord(rank=rank, groups=groups, counts=counts, calls=calls, fate=fate)


def test_a_rank_that_lives_is_to_blame_only_when_patience_is_over() -> None:
    records = [record(0, call(201)), record(1, call(200, Stage.DONE)), record(2, call(201))]

    assert find_blame(records, patience_is_over=False) is None
    verdict = find_blame(records, patience_is_over=True)

    assert verdict is not None
    assert (verdict.blamed, verdict.waiting, verdict.is_certain) == ((1,), (0, 2), False)
    assert verdict.mismatch == Mismatch(MismatchKind.ABSENCE)
    assert verdict.text == (
        "rank 1 has not come to all_reduce #201 (sum) of (4,) float32 (train.py:88), "
        "in which ranks 0, 2 wait"
    )


def test_calls_of_which_the_library_has_different_numbers_do_not_meet() -> None:
    """Rank 0 has made its first call where it is not entered, and stands in its second one."""
    barrier = call(1, match=2, signature=CallSignature("barrier"))
    eager = (call(1, Stage.DONE), msgspec.structs.replace(barrier, number=2))
    unknown = [record(0, barrier), record(1, *eager), record(2, call(1, Stage.DONE))]
    calls = [(eager[0], 1), (eager[1], 2)]
    numbered = [msgspec.structs.replace(each, library_number=number) for each, number in calls]
    told = [
        record(0, msgspec.structs.replace(barrier, library_number=2)),
        record(1, *numbered),
        record(2, numbered[0]),
    ]

    assert find_blame(unknown, patience_is_over=False) is not None
    assert find_blame(told, patience_is_over=False) is None
    verdict = find_blame(told, patience_is_over=True)

    assert verdict is not None
    assert verdict.blamed == (2,), "and not rank 0, which has entered as few calls"
    assert verdict.waiting == (0, 1), "in one call, of which they have different numbers"


def test_calls_of_which_the_library_has_one_number_meet() -> None:
    records = [
        record(0, call(1, match=2, library_number=7)),
        record(1, call(1, library_number=7)),
        record(2, call(1)),
    ]

    verdict = find_blame(records, patience_is_over=False)

    assert verdict is not None
    assert (verdict.blamed, verdict.is_certain) == ((0,), True)


def test_a_rank_that_is_aborted_after_its_call_was_given_data_that_did_not_fit() -> None:
    other = call(1, match=2, signature=of("all_reduce", "sum", (9,)))
    aborted = record(0, call(1, Stage.DONE), fate=Fate.DIED)
    records = [aborted, record(1, other), record(2)]

    verdict = find_disagreement(records, 0)

    assert find_blame(records, patience_is_over=False) is not None  # rank 1 stands in it
    assert verdict is not None
    assert (verdict.blamed, verdict.is_certain) == ((0, 1), True)
    assert find_disagreement([aborted, record(1, call(1)), record(2)], 0) is None
    decided = find_disagreement([aborted, record(1, other), record(2, call(1))], 0)
    assert decided is not None
    assert (decided.blamed, decided.waiting) == ((1,), (0, 2))
    assert find_disagreement([aborted], 2) is None
    assert find_disagreement([record(0, fate=Fate.DIED), record(1, other)], 0) is None


def test_a_rank_that_has_left_can_never_come() -> None:
    gone = record(1, call(200, Stage.DONE), fate=Fate.LEFT)
    late = record(2, call(200, Stage.DONE))

    verdict = find_blame([record(0, call(201)), gone, late], patience_is_over=False)

    assert verdict is not None
    assert (verdict.blamed, verdict.is_certain) == ((1,), True)
    assert verdict.mismatch == Mismatch(MismatchKind.DEPARTURE)
    assert verdict.text == (
        "rank 1 was done after all_reduce #200 (sum) of (4,) float32 (train.py:88), while rank 0 "
        "waits in all_reduce #201 (sum) of (4,) float32 (train.py:88)"
    )


def test_blame_in_two_groups_of_one_name_has_one_sentence_and_two_identities() -> None:
    def blame_in(key: str) -> Blame:
        groups = {key: Group(label="dp", size=2, members=(0, 1))}
        waiting = CallRecord(rank=0, groups=groups, counts={key: 2}, calls=(call(2, group=key),))
        gone = CallRecord(rank=1, groups=groups, fate=Fate.LEFT)
        found = find_blame([waiting, gone], patience_is_over=False)
        assert found is not None
        return found

    first, second = blame_in("torch 0 5"), blame_in("torch 0 6")

    assert first.text == second.text
    assert first.identity != second.identity
    assert first.identity == blame_in("torch 0 5").identity


@pytest.mark.parametrize(
    "records",
    [
        lambda: [record(0, call(1)), record(1, call(1, match=2)), record(2)],
        lambda: [record(0, call(2)), record(1, call(1, Stage.DONE), fate=Fate.LEFT), record(2)],
        lambda: [record(0, call(2)), record(1, call(1, Stage.DONE)), record(2, call(2))],
        lambda: [message(0, 1), message(1, 0)],
    ],
    ids=["disagreement", "departure", "absence", "circle"],
)
@pytest.mark.parametrize(
    "change",
    [
        {"place": "train.py:99"},
        {"signature": of("all_reduce", "sum", (5,))},
        {"signature": of("broadcast", "sum", (4,))},
    ],
    ids=["line", "shape", "operation"],
)
def test_every_kind_of_blame_is_told_from_that_of_another_call(
    records: Callable[[], list[CallRecord]], change: dict[str, object]
) -> None:
    other_calls = [changed(each, change) for each in records()]

    before, again, other = (
        find_blame(each, patience_is_over=True) for each in (records(), records(), other_calls)
    )

    assert before is not None
    assert again is not None
    assert other is not None
    assert before.identity == again.identity
    assert before.identity != other.identity


def changed(given: CallRecord, change: dict[str, object]) -> CallRecord:
    """The same rank with other calls."""
    calls = tuple(msgspec.structs.replace(each, **change) for each in given.calls)
    return msgspec.structs.replace(given, calls=calls)


def message(rank: int, peer: int) -> CallRecord:
    """A rank that waits for another one to receive its message."""
    return record(rank, call(0, group="", peer=peer, signature=of("send", root=peer)))


def test_who_has_failed_in_a_call_and_not_told_yet_why_has_waited_in_it_too() -> None:
    gone = record(1, call(200, Stage.DONE), fate=Fate.LEFT)
    records = [record(0, call(201)), gone, record(2, call(201, Stage.FAILED))]

    verdict = find_blame(records, patience_is_over=False)

    assert verdict is not None
    assert (verdict.blamed, verdict.waiting) == ((1,), (0, 2))


@pytest.mark.parametrize("fate", [Fate.RAISED, Fate.DIED])
def test_a_rank_that_has_failed_by_itself_needs_no_verdict(fate: Fate) -> None:
    records = [record(0, call(3)), record(1, call(2, Stage.DONE), fate=fate), record(2, call(3))]

    assert find_blame(records, patience_is_over=True) is None


def test_the_rank_on_which_the_call_has_failed_is_one_that_waits() -> None:
    failed = record(2, call(3, Stage.FAILED), fate=Fate.RAISED)
    records = [record(0, call(3)), record(1, call(2, Stage.DONE)), failed]

    verdict = find_blame(records, patience_is_over=True)

    assert verdict is not None
    assert (verdict.blamed, verdict.waiting) == ((1,), (0, 2))


def test_an_exception_that_the_program_has_caught_is_no_wait() -> None:
    records = [record(0, call(3, Stage.FAILED)), record(1, fate=Fate.LEFT), record(2)]

    assert waits_of(records) == {}
    assert find_blame(records, patience_is_over=True) is None


def test_the_fewest_are_to_blame_for_a_disagreement() -> None:
    other = call(17, match=2, signature=of("broadcast", shape=(4,), root=0), place="model.py:40")
    records = [record(rank, other if rank == 3 else call(17), size=5) for rank in range(5)]

    verdict = find_blame(records, patience_is_over=False)

    assert verdict is not None
    assert (verdict.blamed, verdict.waiting, verdict.is_certain) == ((3,), (0, 1, 2, 4), True)
    assert verdict.text == (
        "call #17: rank 3 called broadcast from rank 0 of (4,) float32 (model.py:40), "
        "ranks 0-2, 4 called all_reduce (sum) of (4,) float32 (train.py:88)"
    )


def test_a_disagreement_is_not_certain_while_others_may_tell_who_is_right() -> None:
    """As where the other ranks of a group are on nodes that have not been asked yet."""
    broadcast = call(1, match=2, signature=CallSignature("broadcast"))

    for size, records, is_of_a_part in (
        (2, [record(0, call(1), size=2), record(1, broadcast, size=2)], False),
        (3, [record(0, call(1)), record(1, broadcast)], True),
        (3, [record(0, call(1)), record(1, broadcast), record(2, broadcast)], False),
        (
            6,
            [record(0, call(1), size=6), *(record(rank, broadcast, size=6) for rank in (1, 2))],
            True,
        ),
    ):
        verdict = find_blame(records, patience_is_over=False)

        assert verdict is not None, size
        assert (verdict.is_of_a_part, verdict.is_certain) == (is_of_a_part, not is_of_a_part)


@pytest.mark.parametrize(
    ("matches", "told"),
    [
        ([1, 2], "ranks 0 and 1 disagree: rank 0 called A, rank 1 called B"),
        ([1, 1, 2, 2], "ranks 0-3 disagree: ranks 0-1 called A, ranks 2-3 called B"),
        ([2, 1, 1, 3], "ranks 0-3 disagree: rank 0 called B, ranks 1-2 called A, rank 3 called C"),
    ],
)
def test_without_a_majority_nobody_is_called_the_culprit(matches: list[int], told: str) -> None:
    records = [
        record(
            rank,
            call(2, match=match, signature=CallSignature(" ABC"[match]), place=""),
            size=len(matches),
        )
        for rank, match in enumerate(matches)
    ]

    verdict = find_blame(records, patience_is_over=False)

    assert verdict is not None
    assert (verdict.blamed, verdict.waiting) == (tuple(range(len(matches))), ())
    assert verdict.text == f"call #2: {told}"
    assert verdict.mismatch == Mismatch(MismatchKind.DISAGREEMENT)


def test_a_disagreement_that_stops_nobody_is_none() -> None:
    records = [record(0, call(1, Stage.DONE)), record(1, call(1, Stage.DONE, match=2)), record(2)]

    assert find_blame(records, patience_is_over=True) is None


def test_a_message_is_awaited_from_its_sender() -> None:
    receive = Call(
        group="", number=0, signature=of("recv", shape=(4,), root=1), place="p.py:3", peer=1
    )
    records = [record(0, receive), record(1), record(2)]

    verdict = find_blame(records, patience_is_over=True)

    assert verdict is not None
    assert verdict.blamed == (1,)
    assert (
        verdict.text
        == "rank 1 has not answered rank 0 in recv of (4,) float32 from rank 1 (p.py:3)"
    )


def test_the_culprit_is_at_the_end_of_the_way() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2 elsewhere: rank 2 it is."""
    pair = {"pair": Group(label="tp", size=2, members=(1, 2))}
    waiting = Call(group="pair", number=1, signature=CallSignature("barrier"), place="m.py:1")
    second = record(1)
    second = msgspec.structs.replace(
        second, groups={**second.groups, **pair}, counts={WORLD: 0, "pair": 1}, calls=(waiting,)
    )
    third = msgspec.structs.replace(record(2, call(1)), groups={**record(2).groups, **pair})
    third = msgspec.structs.replace(third, calls=(call(1, Stage.ISSUED),))

    verdict = find_blame([record(0, call(1)), second, third], patience_is_over=True)

    assert verdict is not None
    assert verdict.blamed == (2,)
    assert (
        verdict.text
        == "rank 2 has not come to barrier #1 in group tp (m.py:1), in which rank 1 waits"
    )


def test_groups_that_are_called_alike_are_told_apart_though_no_rank_has_come_to_both() -> None:
    pair = Group(label="[0, 1]", size=2, members=(0, 1))
    records = [
        CallRecord(rank=rank, groups={key: pair}, counts={key: 1}, calls=(call(1, group=key),))
        for rank, key in ((0, "torch 0 10"), (1, "torch 0 9"))
    ]

    verdict = find_blame(records, patience_is_over=False)

    assert verdict is not None
    assert "in group [0, 1] (train.py:88), number 2 of 2 such groups, for rank 1" in verdict.text
    assert "in group [0, 1] (train.py:88), number 1 of 2 such groups, for rank 0" in verdict.text


def test_members_without_a_call_record_are_never_to_blame() -> None:
    records = [record(0, call(1), size=8), record(1, call(1), size=8)]

    assert find_blame(records, patience_is_over=True) is None


def test_a_wait_tells_who_has_not_come() -> None:
    records = [record(0, call(1)), record(1), record(2, call(1))]

    waits = waits_of(records)

    assert wait_in_words(waits[0], records[0]) == (
        "all_reduce #1 (sum) of (4,) float32 (train.py:88): rank 1 has not come"
    )


Step = tuple[str, int]
"""A group, and what is called in it."""


class World:
    """Ranks that run lists of calls: each ends when all members have come to it, and agree."""

    def __init__(
        self, programs: Sequence[Sequence[Step]], groups: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.programs = programs
        self.groups = groups
        self.calls: list[list[Call]] = [[] for _ in programs]
        self.counts: list[dict[str, int]] = [dict.fromkeys(groups, 0) for _ in programs]

    def step(self, rank: int) -> bool:
        """Let a rank go on; whether it could."""
        calls = self.calls[rank]
        if calls and calls[-1].stage is Stage.WAITING:
            last = calls[-1]
            members = self.groups[last.group]
            if any(self.counts[member][last.group] < last.number for member in members):
                return False
            if len({self.what(member, last) for member in members}) > 1:
                return False
            calls[-1] = msgspec.structs.replace(last, stage=Stage.DONE)
            return True
        if len(calls) == len(self.programs[rank]):
            return False
        key, what = self.programs[rank][len(calls)]
        number = self.counts[rank][key] = self.counts[rank][key] + 1
        calls.append(
            Call(group=key, number=number, signature=CallSignature(f"operation {what}"), match=what)
        )
        return True

    def what(self, member: int, call: Call) -> int:
        """What a member calls as the call of this number."""
        return next(
            each.match
            for each in self.calls[member]
            if (each.group, each.number) == (call.group, call.number)
        )

    def is_over(self, rank: int) -> bool:
        calls = self.calls[rank]
        return len(calls) == len(self.programs[rank]) and (
            not calls or calls[-1].stage is Stage.DONE
        )

    def records(self) -> list[CallRecord]:
        return [
            CallRecord(
                rank=rank,
                groups={
                    key: Group(label=key, size=len(members), members=members)
                    for key, members in self.groups.items()
                    if rank in members
                },
                counts=self.counts[rank],
                calls=tuple(self.calls[rank][-8:]),
                fate=Fate.LEFT if self.is_over(rank) else Fate.LIVES,
            )
            for rank in range(len(self.programs))
        ]

    def run(self, chance: random.Random) -> None:
        """Until nobody can go on; at no moment may a healthy rank be accused, see the callers."""
        ready = list(range(len(self.programs)))
        while ready:
            rank = chance.choice(ready)
            ready = list(range(len(self.programs))) if self.step(rank) else [
                each for each in ready if each != rank
            ]  # fmt: skip


@st.composite
def worlds(
    draw: st.DrawFn, *, groups_max: int
) -> tuple[int, dict[str, tuple[int, ...]], list[Step]]:
    size = draw(st.integers(3, 6))
    groups = {"all": tuple(range(size))}
    for name in range(draw(st.integers(0, groups_max - 1))):
        members = draw(st.sets(st.integers(0, size - 1), min_size=2))
        groups[f"g{name}"] = tuple(sorted(members))
    step = st.tuples(st.sampled_from(sorted(groups)), st.integers(0, 2))
    return size, groups, draw(st.lists(step, min_size=1, max_size=12))


def programs_of(
    size: int, groups: Mapping[str, tuple[int, ...]], steps: Sequence[Step]
) -> list[list[Step]]:
    return [[step for step in steps if rank in groups[step[0]]] for rank in range(size)]


@given(worlds(groups_max=3), st.randoms(use_true_random=False))
def test_a_healthy_program_is_never_accused_with_certainty(
    made: tuple[int, dict[str, tuple[int, ...]], list[Step]], chance: random.Random
) -> None:
    size, groups, steps = made
    world = World(programs_of(size, groups, steps), groups)

    for _ in range(200):
        world.step(chance.randrange(size))
        assert find_blame(world.records(), patience_is_over=False) is None
    world.run(chance)

    assert all(world.is_over(rank) for rank in range(size))
    assert find_blame(world.records(), patience_is_over=True) is None


@settings(max_examples=300)
@given(worlds(groups_max=1), st.randoms(use_true_random=False), st.data())
def test_a_rank_that_leaves_out_a_call_or_calls_another_is_the_one_to_blame(
    made: tuple[int, dict[str, tuple[int, ...]], list[Step]],
    chance: random.Random,
    data: st.DataObject,
) -> None:
    size, groups, steps = made
    programs = programs_of(size, groups, steps)
    culprit, at = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, len(steps) - 1))
    if data.draw(st.booleans()):
        del programs[culprit][at]
    else:
        programs[culprit][at] = ("all", 9)
    world = World(programs, groups)

    world.run(chance)
    stuck = [rank for rank in range(size) if not world.is_over(rank)]
    verdict = find_blame(world.records(), patience_is_over=False)

    assert (verdict is None) == (not stuck)
    if verdict is not None:
        assert verdict.is_certain
        assert verdict.blamed == (culprit,)
        assert set(verdict.waiting) == set(range(size)) - {culprit}


@settings(max_examples=300)
@given(worlds(groups_max=3), st.randoms(use_true_random=False), st.data())
def test_whoever_swaps_two_calls_of_overlapping_groups_is_found_out(
    made: tuple[int, dict[str, tuple[int, ...]], list[Step]],
    chance: random.Random,
    data: st.DataObject,
) -> None:
    size, groups, steps = made
    programs = programs_of(size, groups, steps)
    culprit = data.draw(st.integers(0, size - 1))
    own = programs[culprit]
    if len(own) > 1:
        at = data.draw(st.integers(0, len(own) - 2))
        own[at], own[at + 1] = own[at + 1], own[at]
    world = World(programs, groups)

    world.run(chance)
    stuck = [rank for rank in range(size) if not world.is_over(rank)]
    verdict = find_blame(world.records(), patience_is_over=False)

    assert (verdict is None) == (not stuck)
    if verdict is not None:
        assert verdict.is_certain
        assert culprit in {*verdict.blamed, *verdict.waiting}


LARGEST = {"signature": of("all_reduce", "max", (4,)), "match": 2}


def carried_out(number: int, **changes: object) -> Call:
    told = {"library_number": number, "ended_at": Instant(number), **changes}
    return call(number, Stage.DONE, **told)


def test_a_call_that_is_over_is_compared_where_the_library_has_told_its_number() -> None:
    records = [record(rank, carried_out(1), carried_out(2)) for rank in range(2)]
    records.append(record(2, carried_out(1), carried_out(2, **LARGEST)))

    blame = find_past_disagreement(records)

    assert blame is not None
    assert blame.blamed == (2,)
    assert blame.text.startswith("call #2: rank 2 called all_reduce")


def test_calls_that_are_over_are_not_compared_by_the_numbers_of_ranks_alone() -> None:
    shifted = [record(0, carried_out(1), carried_out(2, library_number=3, **LARGEST), size=2)]
    shifted += [record(1, carried_out(1), carried_out(2), carried_out(3, **LARGEST), size=2)]
    unknown = [record(0, carried_out(1, library_number=0)), record(1, carried_out(1, **LARGEST))]

    assert find_past_disagreement(shifted) is None
    assert find_past_disagreement(unknown) is None


def test_what_only_moves_bytes_may_have_another_type_on_each_member() -> None:
    moved = {"signature": of("broadcast", shape=(4,), root=0, dtype="uint8"), "match": 2}
    records = [
        record(
            0, carried_out(1, signature=of("broadcast", shape=(4,), root=0, dtype="bool")), size=2
        )
    ]
    records.append(record(1, carried_out(1, **moved), size=2))

    assert find_past_disagreement(records) is None


def test_what_did_not_happen_at_one_time_or_not_on_all_known_members_is_not_one_call() -> None:
    before = record(0, carried_out(1))
    after = record(1, carried_out(1, begun_at=Instant(2), ended_at=Instant(3), **LARGEST))

    assert find_past_disagreement([before, after]) is None
    assert find_past_disagreement([before, record(1, carried_out(1, **LARGEST)), record(2)]) is None


@pytest.mark.parametrize(
    ("taken", "text"),
    [
        (of("recv", shape=(3,), root=0), "rank 0 sends 4 elements, rank 1 takes 3: "),
        (of("recv", shape=(2, 2), root=0), "ranks wait for each other: "),
        (
            of("recv", shape=(4,), root=0, dtype="int32"),
            "rank 0 sends 4 elements of float32, rank 1 takes 4 of int32: ",
        ),
        (of("recv", shape=(3,), root=0, tag=5), "ranks wait for each other: "),
    ],
)
def test_message_of_another_size_is_told_instead_of_a_circle(
    taken: CallSignature, text: str
) -> None:
    send = Call(group="", number=1, signature=of("send", shape=(4,), root=1), peer=1)
    receive = Call(group="", number=1, signature=taken, peer=0)
    records = [CallRecord(rank=0, calls=(send,)), CallRecord(rank=1, calls=(receive,))]
    kind = MismatchKind.MISFIT if text.startswith("rank 0") else MismatchKind.CIRCLE

    blame = find_blame(records, patience_is_over=False)

    assert blame is not None
    assert blame.text.startswith(text)
    assert blame.mismatch == Mismatch(kind, ("send", "recv"))
