"""Find the ranks that keep the others waiting, from the call records of all ranks.

Theory of operation
===================

The n-th call of a group on one member meets the n-th of each other: so has every backend that there
is. A rank that stands in a call *awaits* the members whose count of that group is lower. Who awaits
whom is a graph, and who is to blame is where its ways end:

    disagreement   members have come to one call with different things, and one of them stands in it
    departure      a way ends at a rank that has left: it can never come
    absence        a way ends at a rank that lives and stands in no call
    circle         all ways lead back: ranks called the operations of groups in different orders

Of ranks that disagree, what more than half have called is taken for right, and the others are to
blame. Without such a majority, as always between two ranks, which of them is right is unknown: all
of them are blamed together.

A disagreement is looked for first, since those who disagree often wait for each other next. The
first, second and fourth are *certain*: no patience would help. An absence is what every rank shows
that is a little behind, so it counts only for those who know that patience is over: after a
time-out.

A way that ends at a rank which has failed by itself needs no blame: its own failure tells more.

A rank may make calls that it does not enter, as a function under `torch.compile` does where other
ranks run it as it is: then the n-th entry of one rank is not the n-th of another. Where the library
has told its own numbers, calls of different numbers do not meet, whatever is entered.

Missing knowledge accuses no rank. A member without a call record, on another node perhaps, is not
awaited; a way that ends at a rank which stands in a call that all have come to (its data is on its
way, or a rank elsewhere is late) blames none.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rankwise.base.failure import BlameIdentity, CallOfRanks, Mismatch, MismatchKind
from rankwise.core.ledger import sentences
from rankwise.core.ledger.call_records import INIT_GROUP, NO_PEER, Call, CallRecord, Fate, Stage
from rankwise.core.matching import behind, parties


class Wait(msgspec.Struct, frozen=True):
    """A rank stands in a call, and these have not come to it."""

    rank: int
    call: Call
    awaited: tuple[int, ...]


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that are to blame.

    Attributes:
        blamed: these ranks; several are so together, and none of them more than the others.
        text: what they did, in a sentence: for people, and never compared. See `identity`.
        mismatch: the same as a value, where calls were compared.
        calls: the calls that it is about.
        is_certain: whether it will never be otherwise; else they may come yet.
        waiting: the ranks that wait because of that.
        is_of_a_part: whether members of which nothing is known here may tell who is right.
        late: ranks that live and have not come to the call, by which they may tell who is right.
    """

    blamed: tuple[int, ...]
    text: str
    is_certain: bool
    mismatch: Mismatch | None = None
    calls: tuple[CallOfRanks, ...] = ()
    waiting: tuple[int, ...] = ()
    is_of_a_part: bool = False
    late: tuple[int, ...] = ()

    @property
    def identity(self) -> BlameIdentity:
        """The values that identify this blame."""
        return BlameIdentity(self.blamed, self.mismatch, self.calls)


def waits_of(records: Iterable[CallRecord]) -> dict[int, Wait]:
    """What each rank waits for that stands in a call."""
    by_rank = {record.rank: record for record in records}
    waits: dict[int, Wait] = {}
    for rank, record in sorted(by_rank.items()):
        standing = [Wait(rank, call, _awaited(record, call, by_rank)) for call in record.standing]
        if standing:
            waits[rank] = next((wait for wait in standing if wait.awaited), standing[0])
    return waits


def find_blame(
    records: Iterable[CallRecord], *, patience_is_over: bool, issued_is_waiting: bool = False
) -> Blame | None:
    """Find the ranks that keep others waiting; None if there are none, or they are unknown.

    Args:
        records: those of all ranks that are known, read at one moment.
        patience_is_over: whether ranks have waited for so long that a merely late rank is to blame.
        issued_is_waiting: whether a rank that stands in a call may yet do something else, since the
            library carries the call out. A circle is none then.
    """
    by_rank = {record.rank: record for record in records}
    waits = waits_of(by_rank.values())
    # The oldest call first: what disagrees later may follow from it.
    for wait in _oldest_first(waits.values()):
        if (blame := _disagreement(wait, by_rank)) is not None:
            return blame
    ends = _ends(waits)
    # Such a rank has a failure of its own, which tells more than that others wait for it.
    if any(by_rank[rank].fate in (Fate.RAISED, Fate.DIED) for rank in ends):
        return None
    gone = sorted(rank for rank in ends if by_rank[rank].fate is Fate.LEFT)
    if gone:
        wait, waiting = _wait_for(gone, waits, by_rank)
        if wait.call.group == INIT_GROUP and not patience_is_over:
            # Another process may come in its place, such as a child that it has left.
            return None
        text = sentences.departure_in_words(gone, wait, waiting, by_rank)
        calls = [_call_of(waiting, wait.call)]
        if (last := by_rank[gone[0]].latest(wait.call.group)) is not None:
            calls.append(_call_of(gone[:1], last))
        return Blame(
            blamed=tuple(gone),
            text=text,
            is_certain=True,
            mismatch=Mismatch(MismatchKind.DEPARTURE),
            calls=tuple(calls),
            waiting=waiting,
        )
    if ends:
        # They live, and may still come.
        if not patience_is_over:
            return None
        wait, waiting = _wait_for(sorted(ends), waits, by_rank)
        absent = tuple(rank for rank in wait.awaited if rank in ends)
        text = sentences.absence_in_words(absent, wait, waiting, by_rank[wait.rank])
        return Blame(
            blamed=absent,
            text=text,
            is_certain=False,
            mismatch=Mismatch(MismatchKind.ABSENCE),
            calls=(_call_of(waiting, wait.call),),
            waiting=waiting,
        )
    if not issued_is_waiting and (circle := _circle(waits)):
        blamed = tuple(sorted(wait.rank for wait in circle))
        misfit = _misfit(circle)
        text = (
            sentences.circle_in_words(circle, by_rank)
            if misfit is None
            else sentences.misfit_in_words(*misfit)
        )
        kind = MismatchKind.CIRCLE if misfit is None else MismatchKind.MISFIT
        mismatch = Mismatch(kind, tuple(wait.call.signature.operation for wait in circle))
        return Blame(
            blamed=blamed,
            text=text,
            is_certain=True,
            mismatch=mismatch,
            calls=tuple(_call_of((wait.rank,), wait.call) for wait in circle),
            waiting=blamed,
        )
    return None


def judge(
    seen: Iterable[CallRecord], recorded: Iterable[CallRecord], *, patience_is_over: bool
) -> Blame | None:
    """Tell who is to blame: by what is sure of call records, by recorders, by the rest.

    Args:
        seen: the call records that ranks keep themselves.
        recorded: those of what C++ has called, of ranks that were asked and told.
        patience_is_over: see `find_blame`.
    """
    recorded = list(recorded)
    by_call_records = find_blame(seen, patience_is_over=patience_is_over)
    if by_call_records is not None and by_call_records.is_certain:
        return by_call_records
    blame = find_blame(recorded, patience_is_over=patience_is_over, issued_is_waiting=True)
    if (
        blame is None
        and by_call_records is not None
        and not (waits_of(recorded).keys() & {*by_call_records.blamed})
    ):
        return by_call_records
    # A rank that has ended told nothing of its recorder, and is no less among those who waited.
    if (
        blame is not None
        and by_call_records is not None
        and by_call_records.blamed == blame.blamed
        and {*by_call_records.waiting} > {*blame.waiting}
    ):
        return by_call_records
    return blame  # none, if those that are absent by the call records wait in what C++ has called


def find_disagreement(
    records: Iterable[CallRecord], rank: int, at: Call | None = None
) -> Blame | None:
    """Find the ranks that have come to a call of a rank with something else; None without any.

    By default it is the last call: for a rank that its library has ended, which a backend does in
    C++ and also after the call.
    """
    by_rank = {record.rank: record for record in records}
    calls = by_rank[rank].calls[-1:] if rank in by_rank else ()
    calls = calls if at is None else (at,)
    return _disagreement(Wait(rank, calls[0], ()), by_rank) if calls else None


def find_past_disagreement(records: Iterable[CallRecord]) -> Blame | None:
    """Tell who has called something else in a call that is over: another operation or reduction.

    gloo adds for one rank what it takes the largest of for another, without an error. Compared are
    calls to which all known members have come at one time, under a number that the library has
    told. Sizes and types are not: an operation that only moves bytes may be right all the same.
    """
    by_rank: dict[int, CallRecord] = {}
    together: dict[tuple[str, int], dict[int, Call]] = {}
    for record in records:
        over = [_by_operation(call) for call in record.calls if _is_known_to_be_over(call)]
        by_rank[record.rank] = msgspec.structs.replace(record, calls=tuple(over))
        for call in over:
            together.setdefault((call.group, call.library_number), {})[record.rank] = call
    for (group, _), calls in together.items():
        rank, call = next(iter(calls.items()))
        members = [each for each in by_rank[rank].groups[group].members if each in by_rank]
        if len(calls) < len(members) or len({each.match for each in calls.values()}) < 2:
            continue
        if max(each.begun_at for each in calls.values()) > min(
            each.ended_at for each in calls.values()
        ):
            continue  # no member can be done before all have come: they are not one call
        blame = _disagreement(Wait(rank, call, ()), by_rank)
        if blame is not None and blame.is_certain:
            return blame
    return None


def _is_known_to_be_over(call: Call) -> bool:
    """Whether the program has waited for it at once, and the library has told its number."""
    return call.stage is Stage.DONE and bool(call.library_number) and not call.of_handle


def _by_operation(call: Call) -> Call:
    """The call, with what its members must agree on without sizes and types."""
    return msgspec.structs.replace(call, match=call.signature.in_kind().checksum)


def _awaited(record: CallRecord, call: Call, records: Mapping[int, CallRecord]) -> tuple[int, ...]:
    if not call.group:
        return (call.peer,) if call.peer != NO_PEER and call.peer in records else ()
    group = record.groups.get(call.group)
    members = () if group is None else group.members
    counts = {rank: records[rank].counts.get(call.group, 0) for rank in members if rank in records}
    return tuple(
        rank
        for rank in behind(members, counts, call.number)
        if not (call.library_number and _has_come_by_library(records[rank], call))
    )


def _has_come_by_library(record: CallRecord, call: Call) -> bool:
    return any(
        own.group == call.group and own.library_number >= call.library_number
        for own in record.calls
    )


def _oldest_first(waits: Iterable[Wait]) -> list[Wait]:
    return sorted(waits, key=lambda wait: (wait.call.begun_at, wait.rank))


def _disagreement(wait: Wait, records: Mapping[int, CallRecord]) -> Blame | None:
    """Members that have come to the call of a rank with something else, if there are any."""
    if not wait.call.group:
        return None
    group = records[wait.rank].groups[wait.call.group]
    calls = {
        rank: call
        for rank in group.members
        if rank in records and (call := records[rank].call_that_meets(wait.call)) is not None
    }
    by_match = parties((rank, call.match) for rank, call in calls.items())
    if len(by_match) < 2:
        return None
    all_parties = [[(rank, calls[rank]) for rank in ranks] for ranks in by_match.values()]
    come = [rank for party in all_parties for rank, _ in party]
    *minority, largest = sorted(all_parties, key=len)
    late: tuple[int, ...] = ()
    # More than half are taken to be right. Otherwise those that have not come may decide it.
    if 2 * len(largest) > len(come):
        waiting = tuple(rank for rank, _ in largest)
        text = sentences.minority_in_words(minority, largest, group)
    else:
        waiting = ()
        text = sentences.disagreement_in_words(all_parties, group)
        awaited = _awaited(records[wait.rank], wait.call, records)
        late = tuple(rank for rank in awaited if records[rank].fate is Fate.LIVES)
    blamed = tuple(sorted(rank for rank in come if rank not in waiting))
    known = sum(rank in records for rank in group.members)
    is_of_a_part = known < group.size and 2 * len(largest) <= group.size
    return Blame(
        blamed=blamed,
        text=text,
        is_certain=not is_of_a_part,
        mismatch=Mismatch(MismatchKind.DISAGREEMENT),
        calls=tuple(_call_of([rank for rank, _ in each], each[0][1]) for each in all_parties),
        waiting=waiting,
        is_of_a_part=is_of_a_part,
        late=late,
    )


def _call_of(ranks: Iterable[int], call: Call) -> CallOfRanks:
    """A call as blame is told apart by: not by the library's number, which may be learnt later."""
    called = call.signature
    return CallOfRanks(
        tuple(ranks),
        call.group,
        call.number,
        called.operation,
        called.checksum,
        call.place,
        call.peer,
    )


def _ends(waits: Mapping[int, Wait]) -> set[int]:
    """The ranks that are awaited and stand in no call."""
    return {rank for wait in waits.values() for rank in wait.awaited if rank not in waits}


def _wait_for(
    ranks: Sequence[int], waits: Mapping[int, Wait], records: Mapping[int, CallRecord]
) -> tuple[Wait, tuple[int, ...]]:
    """The oldest call in which one of these is awaited, and who stands in it, or did."""
    wait = _oldest_first(
        wait for wait in waits.values() if any(rank in wait.awaited for rank in ranks)
    )[0]
    if not wait.call.group:
        return wait, (wait.rank,)
    latest = {rank: wait.call for rank, wait in waits.items()}
    for rank, record in records.items():  # who has failed in it may not have told yet why
        if record.calls and record.calls[-1].stage is Stage.FAILED:
            latest.setdefault(rank, record.calls[-1])
    return wait, tuple(rank for rank, call in sorted(latest.items()) if call.meets(wait.call))


def _misfit(circle: Sequence[Wait]) -> tuple[Wait, Wait] | None:
    """The send and the receive of a circle of two whose sizes or types differ."""
    ends = {
        wait.call.signature.operation: wait
        for wait in circle
        if wait.call.signature.is_of_one_tensor and wait.call.group == ""
    }
    if len(circle) != 2 or ends.keys() != {"send", "recv"}:
        return None
    sender, receiver = ends["send"], ends["recv"]
    sent, taken = sender.call.signature, receiver.call.signature
    # With another tag it is another message: its size says nothing.
    if sent.tag != taken.tag or sent.tensors[0].flat() == taken.tensors[0].flat():
        return None
    return sender, receiver


def _circle(waits: Mapping[int, Wait]) -> list[Wait]:
    """Ranks each of which awaits the next, the last one the first; empty if there are none.

    Only looked for where no way ends. A rank that awaits none is on its way: those that await it
    are no circle.
    """
    for start in sorted(waits):
        path = [start]
        while (following := [rank for rank in waits[path[-1]].awaited if rank in waits]) != []:
            if following[0] in path:
                return [waits[rank] for rank in path[path.index(following[0]) :]]
            path.append(following[0])
    return []
