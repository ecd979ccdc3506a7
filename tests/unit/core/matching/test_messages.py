"""Which ends of messages meet: a send and a receive of one tag, each of the other's rank."""

from typing import NamedTuple

import pytest

from rankwise.core.matching import ANY_RANK, GroupMessages, ends_meet, missing_peer


class End(NamedTuple):
    rank: int
    peer: int
    tag: int = 0
    is_send: bool = True


def receive(rank: int, peer: int, tag: int = 0) -> End:
    return End(rank, peer, tag, is_send=False)


def test_a_send_meets_the_receive_of_its_rank_and_tag() -> None:
    assert ends_meet(End(0, 1), receive(1, 0))
    assert ends_meet(receive(1, 0), End(0, 1))
    assert ends_meet(End(0, 1), receive(1, ANY_RANK))


@pytest.mark.parametrize(
    "other",
    [receive(1, 0, tag=7), receive(1, 2), receive(2, 0), End(1, 0)],
    ids=["another tag", "from another rank", "of another rank", "another send"],
)
def test_an_end_meets_no_end_of_another_message(other: End) -> None:
    assert not ends_meet(End(0, 1), other)
    assert not ends_meet(other, End(0, 1))


def test_messages_of_one_pair_and_tag_keep_their_order() -> None:
    messages = GroupMessages[End]((0, 1))
    first, second, tagged = End(0, 1), End(0, 1), End(0, 1, tag=7)
    for send in (first, second, tagged):
        assert messages.join(send) is None

    assert messages.join(receive(1, 0, tag=7)) is tagged
    assert messages.join(receive(1, 0)) is first
    assert messages.join(receive(1, 0)) is second
    assert messages.open == []


def test_each_member_numbers_its_own_messages_from_1() -> None:
    messages = GroupMessages[End]((0, 1))

    assert [messages.begin(rank) for rank in (0, 1, 0, 0)] == [1, 1, 2, 3]


def test_a_receive_from_any_rank_takes_the_first_message_of_any() -> None:
    messages = GroupMessages[End]((0, 1, 2))
    messages.join(End(2, 0))
    messages.join(End(1, 0))

    taken = messages.join(receive(0, ANY_RANK))

    assert taken is not None
    assert taken.rank == 2


def test_receives_from_any_rank_stay_open_while_other_orders_are_explored() -> None:
    messages = GroupMessages[End]((0, 1, 2))
    sends = [End(2, 0), End(1, 0), End(2, 0)]
    any_rank = receive(0, ANY_RANK)
    for end in (*sends, any_rank):
        assert messages.join(end, is_choice_open=True) is None

    found = messages.choices()
    assert found is not None
    messages.close(found.sends[1], found.receive)

    assert (found.receive, found.sends) == (any_rank, [sends[0], sends[1]])
    assert messages.open == [sends[0], sends[2]]
    assert messages.choices() is None


def test_messages_to_named_ranks_meet_at_once_while_other_orders_are_explored() -> None:
    messages = GroupMessages[End]((0, 1))
    send = End(0, 1)
    messages.join(send, is_choice_open=True)

    assert messages.join(receive(1, 0), is_choice_open=True) is send


def test_the_peer_of_an_end_is_missing_unless_any_rank_will_do() -> None:
    assert missing_peer(End(0, 1)) == [1]
    assert missing_peer(receive(0, ANY_RANK)) == []


def test_the_latest_and_the_open_ends_of_a_member_are_remembered() -> None:
    messages = GroupMessages[End]((0, 1))
    first, second, other = End(0, 1), End(0, 1, tag=1), receive(1, 0, tag=2)
    for end in (first, second, other):
        messages.join(end)

    assert messages.latest == {0: second, 1: other}
    assert messages.open_ends_of(0) == [first, second]
