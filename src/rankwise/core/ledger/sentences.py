"""How calls, and who is to blame, are said."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rankwise.base.units import Duration
from rankwise.base.wording import ranks_in_words
from rankwise.core.ledger.call_records import INIT_GROUP, Call, CallRecord, Group
from rankwise.core.matching import describe_call

if TYPE_CHECKING:
    from rankwise.core.ledger.blame import Wait
    from rankwise.core.ledger.lateness import Delay
    from rankwise.core.ledger.sampled import Straggler

Party = Sequence[tuple[int, Call]]
"""Ranks that have called the same, each with its call."""
_TWO = 2
_NEARLY_ALL = 0.9
_MACHINES_SHARE = 0.5
"""Of what a rank costs: if it had no CPU for so long, the machine is named."""
_SINCE = "of the time since the first call"
_LINKS_SHOWN = 3
"""Of a longer circle two are told, and where it closes."""


def call_in_words(call: Call, group: Group | None) -> str:
    """`all_reduce #201 (sum) of (4096,) float32 in group dp (train.py:88)`."""
    text = describe_call(call.signature, call.shown_number)
    if group is not None and group.label:
        text += f" in group {group.label}"
    return f"{text} ({call.place})" if call.place else text


def wait_in_words(wait: "Wait", record: CallRecord) -> str:
    """What a rank waits in, and for whom: `barrier #1 (train.py:9): rank 2 has not come`."""
    text = call_in_words(wait.call, record.groups.get(wait.call.group))
    if not wait.awaited or not wait.call.group:
        return text
    return f"{text}: {ranks_in_words(wait.awaited)} {_have(wait.awaited)} not come"


def absence_in_words(
    absent: Sequence[int], wait: "Wait", waiting: Iterable[int], record: CallRecord
) -> str:
    """Ranks that live and keep others waiting."""
    where = call_in_words(wait.call, record.groups.get(wait.call.group))
    who, others = ranks_in_words(absent), sorted(waiting)
    if not wait.call.group:
        return f"{who} {_have(absent)} not answered rank {others[0]} in {where}"
    verb = "waits" if len(others) == 1 else "wait"
    return f"{who} {_have(absent)} not come to {where}, in which {ranks_in_words(others)} {verb}"


def departure_in_words(
    gone: Sequence[int], wait: "Wait", waiting: Iterable[int], records: Mapping[int, CallRecord]
) -> str:
    """Ranks that have ended while others wait for them; the first one's last call is told."""
    record = records[gone[0]]
    last = record.latest(wait.call.group)
    group = record.groups.get(wait.call.group)
    after = " without a call of that group" if wait.call.group else ""
    if last:
        after = f" after {call_in_words(last, group)}"
    where = call_in_words(wait.call, records[wait.rank].groups.get(wait.call.group))
    others = sorted(waiting)
    verb = "waits" if len(others) == 1 else "wait"
    if wait.call.group == INIT_GROUP and not last:
        rank = ranks_in_words(gone)
        return f"{rank} ended without {where}, in which {ranks_in_words(others)} {verb}"
    who = f"{ranks_in_words(gone)} {'was' if len(gone) == 1 else 'were'} done{after}"
    return f"{who}, while {ranks_in_words(others)} {verb} in {where}"


def minority_in_words(minority: Sequence[Party], majority: Party, group: Group) -> str:
    """Ranks that have called something else than most, party by party; then those."""
    parties = [*minority, majority]
    return f"{_number_in_words(parties, group)}: {_calls_in_words(parties)}"


def disagreement_in_words(parties: Sequence[Party], group: Group) -> str:
    """Ranks that have called different things, where which of them is right is unknown."""
    ranks = sorted(rank for party in parties for rank, _ in party)
    who = "ranks {} and {}".format(*ranks) if len(ranks) == _TWO else ranks_in_words(ranks)
    return f"{_number_in_words(parties, group)}: {who} disagree: {_calls_in_words(parties)}"


def _number_in_words(parties: Iterable[Party], group: Group) -> str:
    """The number of a call, of which some ranks may not have entered one before it."""
    number = max(call.number for party in parties for _, call in party)
    return f"call #{number}{f' of group {group.label}' if group.label else ''}"


def _calls_in_words(parties: Iterable[Party]) -> str:
    return ", ".join(
        f"{ranks_in_words(rank for rank, _ in party)} called {_unnumbered(party[0][1])}"
        for party in parties
    )


def circle_in_words(circle: Sequence["Wait"], records: Mapping[int, CallRecord]) -> str:
    """Ranks that wait for each other, one after the other."""
    told = []
    # A rank knows a group from its first call there.
    groups = {key: group for wait in circle for key, group in records[wait.rank].groups.items()}
    for wait in circle:
        where = call_in_words(wait.call, groups.get(wait.call.group))
        where += _among_alike(wait.call.group, groups)
        told.append(f"rank {wait.rank} in {where} for {ranks_in_words(wait.awaited)}")
    if len(told) > _LINKS_SHOWN:
        told[2:] = [
            f"and so on, to rank {circle[-1].rank} for {ranks_in_words(circle[-1].awaited)}"
        ]
    return f"ranks wait for each other: {'; '.join(told)}"


def misfit_in_words(sender: "Wait", receiver: "Wait") -> str:
    """`rank 0 sends 4 elements, rank 1 takes 3: ...`."""
    (sent,), (taken,) = sender.call.signature.tensors, receiver.call.signature.tensors
    unit = "element" if sent.count == 1 else "elements"
    of_sender, of_receiver = f"{sent.count} {unit}", f"{taken.count}"
    if sent.dtype != taken.dtype:
        of_sender, of_receiver = f"{of_sender} of {sent.dtype}", f"{of_receiver} of {taken.dtype}"
    calls = f"{call_in_words(sender.call, None)}, {call_in_words(receiver.call, None)}"
    return (
        f"rank {sender.rank} sends {of_sender}, rank {receiver.rank} takes {of_receiver}: {calls}"
    )


def _among_alike(key: str, groups: Mapping[str, Group]) -> str:
    """Which group it is, of several that are called alike."""
    group = groups.get(key)
    alike = sorted(
        (other for other in groups if group is not None and groups[other].label == group.label),
        key=lambda other: (len(other), other),  # torch numbers its groups
    )
    if len(alike) < 2 or group is None or not group.label:
        return ""
    return f", number {alike.index(key) + 1} of {len(alike)} such groups,"


def delay_in_words(
    delay: "Delay", lasted: Duration, seen: float, *, is_of_a_part: bool = False
) -> str:
    """`rank 3 came last in 92 % of the calls; 14 % of the time since … was spent waiting for it`.

    Args:
        delay: what the rank has cost the others.
        lasted: the time since the first call.
        seen: the share of the calls that were judged.
        is_of_a_part: whether only the ranks of one node are compared, and there are others.
    """
    among = ", of the ranks of its node," if is_of_a_part else ""
    text = (
        f"rank {delay.rank}{among} came last in {_percent(delay.last)} of the calls; "
        f"{_percent(delay.waited / lasted)} {_SINCE} was spent waiting for it"
    )
    return text if seen >= _NEARLY_ALL else f"{text} (of the calls, {_percent(seen)} were seen)"


def with_cpu_wait(text: str, delay: "Delay", cpu_wait: Duration, lasted: Duration) -> str:
    """The same, but that the machine is to blame where the rank had no CPU for so long."""
    if cpu_wait <= _MACHINES_SHARE * delay.waited:
        return text
    # Of a rank of another node, which may have begun to count earlier.
    share = f"{_percent(min(1.0, cpu_wait / lasted))} {_SINCE}"
    return f"{text}; it had to wait for a CPU itself for {share}: the machine is busy"


def straggler_in_words(straggler: "Straggler") -> str:
    """The same of calls that C++ has begun, of which always a part was seen."""
    return (
        f"rank {straggler.rank} came last in {_percent(straggler.last)} of the calls that C++ "
        f"begins, as DDP does; {_percent(straggler.cost)} of that time was spent waiting for "
        f"it (of these calls, {_percent(straggler.seen)} were seen)"
    )


def _percent(share: float) -> str:
    return f"{max(1, round(100 * share))} %"


def _unnumbered(call: Call) -> str:
    text = describe_call(call.signature)
    return f"{text} ({call.place})" if call.place else text


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
