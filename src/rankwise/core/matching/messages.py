"""Which ends of messages meet, for a transport that matches them by source and tag.

A message has two ends, a send and a receive. The first open send meets the first open receive that
names its rank, or any rank, and has its tag: between two ranks and with one tag, messages keep
their order. An end that has no other one yet is *open*. A member's ends are numbered as its calls
are, by `next_number`.

A receive from any rank takes the first send that is there. A transport that explores other orders
lets it stay open (`join`), and chooses among `choices`.

Where messages have no tags, as on the simulated machine, those of a pair are a group of their own
(`GroupCalls`): the n-th send meets the n-th receive.
"""

from typing import Generic, NamedTuple, Protocol, TypeVar

from rankwise.core.matching.matcher import next_number
from rankwise.core.matching.signature import ANY_RANK


class MessageEnd(Protocol):
    """One end of a message, as its transport keeps it."""

    @property
    def rank(self) -> int:
        """Whose end it is."""
        ...

    @property
    def peer(self) -> int:
        """The rank at the other end; `ANY_RANK` for a receive that takes what comes first."""
        ...

    @property
    def tag(self) -> int:
        """Must be equal at both ends."""
        ...

    @property
    def is_send(self) -> bool:
        """True for the end that sends."""
        ...


End = TypeVar("End", bound=MessageEnd)


class MessageChoice(NamedTuple, Generic[End]):
    """A receive from any rank, and the first send of each rank that it may meet."""

    receive: End
    sends: list[End]


def ends_meet(end: MessageEnd, other: MessageEnd) -> bool:
    """True if two ends may be those of one message."""
    return (
        end.tag == other.tag
        and end.is_send != other.is_send
        and end.peer in (other.rank, ANY_RANK)
        and other.peer in (end.rank, ANY_RANK)
    )


def missing_peer(end: MessageEnd) -> list[int]:
    """The rank that has not come to a message; none if it may be any."""
    return [] if end.peer == ANY_RANK else [end.peer]


class GroupMessages(Generic[End]):
    """The messages of one group.

    Attributes:
        open: ends without their other end, the first to come first.
        latest: what each member has come to last.
    """

    __slots__ = ("_begun", "latest", "open")

    def __init__(self, members: tuple[int, ...]) -> None:
        self.open: list[End] = []
        self.latest: dict[int, End] = {}
        self._begun = dict.fromkeys(members, 0)

    def begin(self, rank: int) -> int:
        """A member begins its next message; return the message's number among its own."""
        number = self._begun[rank] = next_number(self._begun[rank])
        return number

    def join(self, end: End, *, is_choice_open: bool = False) -> End | None:
        """A member has come to one end; return the other one, which is open no longer, if any.

        Args:
            end: that.
            is_choice_open: whether receives from any rank stay open, for `choices`.
        """
        self.latest[end.rank] = end
        for place, other in enumerate(self.open):
            if ends_meet(end, other) and not (
                is_choice_open and ANY_RANK in (end.peer, other.peer)
            ):
                del self.open[place]
                return other
        self.open.append(end)
        return None

    def choices(self) -> MessageChoice[End] | None:
        """The first receive from any rank for which there are sends."""
        for receive in self.open:
            if receive.is_send or receive.peer != ANY_RANK:
                continue
            first: dict[int, End] = {}
            for send in self.open:
                if ends_meet(send, receive):
                    first.setdefault(send.rank, send)
            if first:
                return MessageChoice(receive, list(first.values()))
        return None

    def close(self, send: End, receive: End) -> None:
        """The transport lets two open ends meet."""
        self.open.remove(send)
        self.open.remove(receive)

    def open_ends_of(self, rank: int) -> list[End]:
        """The ends of a member that are open, the first to come first."""
        return [end for end in self.open if end.rank == rank]
