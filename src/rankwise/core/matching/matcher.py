"""Which calls meet: the n-th call of a group on one member meets the n-th of each other.

Theory of operation
===================

A group numbers the calls of each member from 1, for each member by itself. Calls of one number are
a *match*. A match is in one of these states:

    open        some members have come; `missing` tells the others
    complete    all have come with equal signatures: the transport carries the operation out
    disagreed   two have come with signatures that differ: the transport tells their callers

A transport feeds `begin` (a member has begun its next call: the number) and `join` (it has come,
with its entry), and learns the state from the match that comes back. What an entry is belongs to
the transport: it must have a `signature`, which is compared, and nothing else is looked at. A
transport that finds a disagreement tolerable, such as other shapes of equal size, says so itself.

The order of arrivals decides the order of `entries` alone: which calls meet, who is missing and
whether members agree is the same for every interleaving of the members' calls.

Groups that share two members have an order: both members must have done as much in the one group
when they come to a call of the other. `order_breaks` finds the first pair of members that differs.

The rules are pure functions: `next_number`, `agree`, `missing` and `behind`, `order_break`. The
classes keep the state of a world that sees every arrival, and decide by these functions. Some
transports see no arrivals, but read what others have published: how far each has come and what it
calls. They keep the count of their own member in `MemberCalls`, and apply the same functions to
what they read. So does the ledger of real ranks (`core.ledger`).
"""

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar


class HasSignature(Protocol):
    """A member's call, as its transport keeps it."""

    @property
    def signature(self) -> Any:
        """What members must agree on."""
        ...


Entry = TypeVar("Entry", bound=HasSignature)
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


class Match(Generic[Entry]):
    """The calls of one number in a group.

    Attributes:
        key: the group's.
        number: which call of the group it is, from 1.
        members: the ranks that must come.
        entries: the calls of those that have come, by rank, the first to come first.
        is_agreed: whether these have equal signatures.
        signature: what the first member to come calls.
        carrier: what the transport keeps for it.
    """

    __slots__ = (
        "_order", "carrier", "entries", "is_agreed", "key", "members", "number", "signature",
    )  # fmt: skip

    def __init__(self, key: str, number: int, members: tuple[int, ...], signature: Any) -> None:
        self.key = key
        self.number = number
        self.members = members
        self.signature = signature
        self.carrier: Any = None
        self.entries: dict[int, Entry] = {}
        self.is_agreed = True
        self._order: dict[str, tuple[int, int]] = {}

    @property
    def have_all_come(self) -> bool:
        """Whether all members have come, whatever they call."""
        return len(self.entries) == len(self.members)

    @property
    def last(self) -> int:
        """The member that came last."""
        return next(reversed(self.entries))

    def missing(self) -> list[int]:
        """The members that have not come."""
        return missing(self.members, self.entries)


class GroupCalls(Generic[Entry]):
    """The calls of one group.

    Attributes:
        key: stands for the group.
        members: its ranks, in the order of their ranks in the group.
        present: those that must come: a transport may let others stand for the rest.
        latest: what each member has come to last.
        open: matches that some members have come to and not all, or not with equal calls.
    """

    __slots__ = ("_all_open", "_begun", "key", "latest", "members", "open", "present")

    def __init__(
        self,
        key: str,
        members: tuple[int, ...],
        all_open: "dict[tuple[str, int], Match[Entry]] | None" = None,
        present: tuple[int, ...] | None = None,
    ) -> None:
        self.key = key
        self.members = members
        self.present = members if present is None else present
        self.latest: dict[int, Entry] = {}
        self.open: dict[int, Match[Entry]] = {}
        self._begun = dict.fromkeys(members, 0)
        self._all_open = {} if all_open is None else all_open

    def begin(self, rank: int) -> int:
        """A member begins its next call; return the call's number."""
        number = self._begun[rank] = next_number(self._begun[rank])
        return number

    def join(self, rank: int, number: int, entry: Entry) -> "Match[Entry]":
        """A member has come to a call that it has begun."""
        match = self.open.get(number)
        signature = entry.signature
        if match is None:
            match = Match(self.key, number, self.present, signature)
            self.open[number] = self._all_open[self.key, number] = match
        elif not agree(match.signature, signature):
            match.is_agreed = False
        match.entries[rank] = self.latest[rank] = entry
        return match

    def close(self, match: "Match[Entry]") -> None:
        """The transport has carried a match out, or has told its members that it failed."""
        del self.open[match.number], self._all_open[self.key, match.number]
        match.carrier = None  # it often refers to the match: a circle would outlive its callers

    def begun_by(self, rank: int) -> int:
        """How many calls a member has begun."""
        return self._begun.get(rank, 0)

    def open_entries_of(self, rank: int) -> "list[tuple[Entry, Match[Entry]]]":
        """What a member has come to that is open, in the order of the numbers."""
        matches = (match for match in self.open.values() if rank in match.entries)
        return [(match.entries[rank], match) for match in matches]


class Matcher(Generic[Entry]):
    """The calls of all groups of a world.

    Attributes:
        groups: by key.
        open: the open matches of all groups, by key and number, the first to be begun first.
    """

    def __init__(self) -> None:
        self.groups: dict[str, GroupCalls[Entry]] = {}
        self.open: dict[tuple[str, int], Match[Entry]] = {}
        self._overlaps: dict[tuple[str, int], tuple[GroupCalls[Entry], ...]] = {}

    def clear(self) -> None:
        """Forget all groups and calls: the ranks are gone."""
        self.groups.clear()
        self.open.clear()
        self._overlaps.clear()

    def group(
        self, key: str, members: tuple[int, ...], present: tuple[int, ...] | None = None
    ) -> GroupCalls[Entry]:
        """The group with this key, made if it is new; see `GroupCalls.present`."""
        found = self.groups.get(key)
        if found is None:
            found = self.groups[key] = GroupCalls(key, members, self.open, present)
            self._overlaps.clear()
        return found

    def overlapping(self, group: GroupCalls[Entry], rank: int) -> tuple[GroupCalls[Entry], ...]:
        """The other groups of a rank that share another member, too, with this one."""
        found = self._overlaps.get((group.key, rank))
        if found is None:
            members = set(group.members)
            found = self._overlaps[group.key, rank] = tuple(
                other
                for other in self.groups.values()
                if other is not group
                and rank in other.members
                and len(members & {*other.members}) > 1
            )
        return found

    def order_breaks(
        self, match: Match[Entry], rank: int, others: Iterable[GroupCalls[Entry]]
    ) -> Iterator[OrderBreak]:
        """A member has come to a match: had those before it done as much in overlapping groups?"""
        for other in others:
            done = (rank, other.begun_by(rank))
            first = match._order.setdefault(other.key, done)  # noqa: SLF001  # one machine
            if (found := order_break(other.key, first, done)) is not None:
                yield found


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
