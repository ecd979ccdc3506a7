from hypothesis import given
from hypothesis import strategies as st

from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.records import NodeRecord
from rankwise.core.rendezvous.view import active_count, in_static_order, ranked

NODES = st.lists(st.sampled_from("abcdefghij"), unique=True)


def record(host: str = "h", topology: str = "", static_rank: int | None = None) -> NodeRecord:
    return NodeRecord(host=host, address=host, slots=1, topology=topology, static_rank=static_rank)


@given(candidates=NODES, previous=NODES, data=st.data())
def test_ranks_are_distinct_and_survivors_in_range_keep_theirs(
    candidates: list[str], previous: list[str], data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, len(candidates)))

    members = ranked(dict.fromkeys(candidates, record()), previous, count)

    assert len(set(members)) == len(members) == count
    assert set(members) <= set(candidates)
    for rank, node in enumerate(previous[:count]):
        if node in candidates:
            assert members[rank] == node


@given(candidates=NODES, previous=NODES, data=st.data())
def test_nobody_who_ran_is_left_out_for_a_newcomer(
    candidates: list[str], previous: list[str], data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, len(candidates)))

    members = ranked(dict.fromkeys(candidates, record()), previous, count)

    has_newcomer = bool(set(members) - set(previous))
    assert not has_newcomer or set(candidates) & set(previous) <= set(members)


def test_newcomers_are_ordered_by_network_then_host_with_numbers_as_numbers() -> None:
    candidates = {
        "a": record("h2", "rack10"),
        "b": record("h10", "rack2"),
        "c": record("h9", "rack2"),
        "d": record("h1", "rack2"),
    }

    assert ranked(candidates, (), 4) == ("d", "c", "b", "a")


def test_seats_are_taken_by_their_owners_and_a_missing_one_settles_nothing() -> None:
    both = {"a": record(static_rank=1), "b": record(static_rank=0)}

    assert in_static_order(both, 2) == ("b", "a")
    assert in_static_order({"a": record(static_rank=1)}, 2) is None
    assert in_static_order(both | {"c": record(static_rank=1)}, 2) is None


def test_spares_are_kept_only_beyond_the_minimum() -> None:
    config = RendezvousConfig(nodes_min=2, nodes_max=3, spares=1)

    assert [active_count(config, ready) for ready in range(7)] == [0, 0, 2, 2, 3, 3, 3]
