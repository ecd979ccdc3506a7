"""The rules of matching, as functions of counts, signatures and members.

There are four: how calls are numbered, when two calls agree, which members are missing, and when
members have different orders over groups. `matcher` keeps the state of a world that sees every
arrival, and decides by these functions. A transport that reads what its peers have published keeps
the count of its own member in `MemberCalls`, and applies the same functions to what it reads.
"""

from collections.abc import Container, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

Party = TypeVar("Party", bound=Hashable)


class OrderBreak(NamedTuple):
    """Two ranks come to a call, and have done differently much in another group that they share."""

    group: str
    first: int
    done_by_first: int
    rank: int
    done_by_rank: int


def next_number(begun: int) -> int:
    """Number the next call of a member, which has begun so many in the group: from 1 on."""
    return begun + 1


def agree(signature: Any, other: Any) -> bool:
    """Whether two members' calls of one number may meet.

    Signatures may be values, or bytes that are equal only for equal values.
    """
    if signature is other:
        return True
    are_equal: bool = signature == other
    return are_equal


def missing(members: Iterable[int], come: Container[int]) -> list[int]:
    """The members that have not come to a call, in their order."""
    return [rank for rank in members if rank not in come]


def behind(members: Iterable[int], counts: Mapping[int, int], number: int) -> list[int]:
    """The members that have not come to a call, by how many calls each has begun.

    A member without a count is unknown, and is not counted as missing.
    """
    come = {rank for rank, begun in counts.items() if begun >= number}
    return missing((rank for rank in members if rank in counts), come)


def parties(calls: Iterable[tuple[int, Party]]) -> dict[Party, list[int]]:
    """The ranks that call the same, by what they call, in the order in which they are given."""
    found: dict[Party, list[int]] = {}
    for rank, call in calls:
        found.setdefault(call, []).append(rank)
    return found


def order_break(group: str, first: tuple[int, int], present: tuple[int, int]) -> OrderBreak | None:
    """Compare what two members of a call have done in another group that they share.

    Each is a rank with the number of calls that it has begun there.
    """
    return None if first[1] == present[1] else OrderBreak(group, *first, *present)


class MemberCalls:
    """The calls of one member, for a transport that sees the other members in snapshots only.

    Attributes:
        begun: how many calls the member has begun.
        signature: its present call, in the form that the transport compares.
    """

    __slots__ = ("begun", "signature")

    def __init__(self, begun: int = 0) -> None:
        self.begun = begun
        self.signature: Any = None

    def begin(self, signature: Any) -> int:
        """The member begins its next call; return the call's number."""
        self.signature = signature
        self.begun = next_number(self.begun)
        return self.begun

    def agree_with(self, signature: Any) -> bool:
        """Whether a peer's call of this number is the member's own."""
        return agree(self.signature, signature)
