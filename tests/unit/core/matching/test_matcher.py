"""Which calls meet does not depend on the order in which ranks come."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.core.matching import GroupCalls, Match, Matcher, OrderBreak, behind, parties


class Entry(NamedTuple):
    signature: str


class Called(NamedTuple):
    """A call of a rank in a group."""

    rank: int
    group: str
    signature: str


GROUPS = {"all": (0, 1, 2), "left": (0, 1), "right": (1, 2)}


def joined(group: GroupCalls[Entry], rank: int, signature: str) -> Match[Entry]:
    return group.join(rank, group.begin(rank), Entry(signature))


def group_of(*members: int) -> GroupCalls[Entry]:
    return Matcher[Entry]().group("g", members)


def test_calls_of_one_number_meet_whatever_each_member_has_called_before() -> None:
    group = group_of(0, 1)
    first, second = joined(group, 0, "a"), joined(group, 0, "b")

    assert (first.number, second.number) == (1, 2)
    assert joined(group, 1, "a") is first
    assert joined(group, 1, "b") is second
    assert first.have_all_come


def test_members_that_have_not_come_are_missing_in_their_order() -> None:
    group = group_of(3, 1, 2)

    match = joined(group, 1, "a")

    assert match.missing() == [3, 2]
    assert not match.have_all_come


def test_members_that_call_something_else_do_not_agree() -> None:
    group = group_of(0, 1, 2)
    joined(group, 2, "a")
    joined(group, 0, "b")

    match = joined(group, 1, "a")

    assert not match.is_agreed
    assert match.signature == "a"
    assert match.last == 1


def test_only_present_members_must_come() -> None:
    group = Matcher[Entry]().group("g", (0, 1, 2), (0, 2))
    joined(group, 0, "a")

    match = joined(group, 2, "a")

    assert match.have_all_come


def test_closed_match_is_open_nowhere() -> None:
    matcher = Matcher[Entry]()
    group = matcher.group("g", (0, 1))
    match = joined(group, 0, "a")
    assert list(matcher.open) == [("g", 1)]

    group.close(match)

    assert not matcher.open
    assert not group.open
    assert group.begun_by(0) == 1


def test_member_finds_its_open_calls_and_its_latest() -> None:
    group = group_of(0, 1)
    first, second = joined(group, 0, "a"), joined(group, 0, "b")
    joined(group, 1, "a")

    assert [match for _, match in group.open_entries_of(0)] == [first, second]
    assert [match for _, match in group.open_entries_of(1)] == [first]
    assert group.latest == {0: Entry("b"), 1: Entry("a")}


@pytest.mark.parametrize("is_same", [True, False])
def test_ranks_that_use_overlapping_groups_in_another_order_are_found(*, is_same: bool) -> None:
    matcher = Matcher[Entry]()
    one, other = matcher.group("one", (0, 1, 2)), matcher.group("other", (0, 1))
    joined(other, 0, "b")
    if is_same:
        joined(other, 1, "b")
    found: list[OrderBreak] = []
    for rank in (0, 1):
        match = joined(one, rank, "a")
        found += matcher.order_breaks(match, rank, matcher.overlapping(one, rank))

    assert found == ([] if is_same else [OrderBreak("other", 0, 1, 1, 0)])
    assert not matcher.overlapping(one, 2)


def test_groups_that_share_one_rank_have_no_order() -> None:
    matcher = Matcher[Entry]()
    left, right = matcher.group("left", (0, 1)), matcher.group("right", (1, 2))

    assert matcher.overlapping(left, 1) == ()
    assert matcher.overlapping(right, 1) == ()


def test_group_made_later_overlaps_too() -> None:
    matcher = Matcher[Entry]()
    first = matcher.group("first", (0, 1))
    assert matcher.overlapping(first, 0) == ()

    second = matcher.group("second", (0, 1, 2))

    assert matcher.overlapping(first, 0) == (second,)


def test_ranks_whose_count_is_unknown_are_not_behind() -> None:
    assert behind((0, 1, 2, 3), {0: 2, 1: 1, 3: 0}, 2) == [1, 3]


def test_parties_are_those_that_call_the_same() -> None:
    assert parties([(0, "a"), (1, "b"), (2, "a")]) == {"a": [0, 2], "b": [1]}


def outcome(calls: Sequence[Called]) -> dict[tuple[str, int], tuple[dict[int, str], list[int]]]:
    """What comes of calls in this order: for each match, what members call and who is missing."""
    matcher = Matcher[Entry]()
    matches: dict[tuple[str, int], Match[Entry]] = {}
    for rank, key, signature in calls:
        group = matcher.group(key, GROUPS[key])
        match = joined(group, rank, signature)
        matches[key, match.number] = match
        if match.have_all_come:
            group.close(match)
    still_open = {at for at, match in matches.items() if match.missing()}
    assert still_open == matcher.open.keys()
    for match in matches.values():
        assert match.is_agreed == (len({each.signature for each in match.entries.values()}) == 1)
    return {
        at: ({rank: entry.signature for rank, entry in match.entries.items()}, match.missing())
        for at, match in matches.items()
    }


@st.composite
def interleavings(draw: st.DrawFn) -> tuple[list[Called], list[Called]]:
    """The same calls of each rank, in two orders of all."""
    of_ranks = []
    for rank in range(3):
        own = [key for key, members in GROUPS.items() if rank in members]
        call = st.tuples(st.sampled_from(own), st.sampled_from("ab"))
        of_ranks.append([Called(rank, *each) for each in draw(st.lists(call, max_size=5))])
    ranks = [rank for rank, calls in enumerate(of_ranks) for _ in calls]

    def interleaved() -> list[Called]:
        left = [iter(calls) for calls in of_ranks]
        return [next(left[rank]) for rank in draw(st.permutations(ranks))]

    return interleaved(), interleaved()


@given(interleavings())
@settings(max_examples=200, deadline=None)
def test_every_interleaving_gives_the_same_matches_and_missing_members(
    orders: tuple[list[Called], list[Called]],
) -> None:
    one, other = orders

    assert outcome(one) == outcome(other)


@given(interleavings())
@settings(max_examples=100, deadline=None)
def test_snapshot_of_counts_tells_the_same_missing_members(
    orders: tuple[list[Called], list[Called]],
) -> None:
    calls, _ = orders
    counts = {
        key: {rank: sum(each[:2] == (rank, key) for each in calls) for rank in members}
        for key, members in GROUPS.items()
    }

    for (key, number), (_, missing) in outcome(calls).items():
        assert behind(GROUPS[key], counts[key], number) == missing


def test_closed_match_forgets_what_its_transport_kept() -> None:
    group = group_of(0)
    match = joined(group, 0, "barrier")
    match.carrier = match  # as a gate that refers to its match: a circle

    group.close(match)

    assert match.carrier is None
