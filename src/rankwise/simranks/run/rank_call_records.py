"""The call records of simulated ranks, from where they stand: the ledger tells who is to blame.

A real rank enters its calls as it makes them. A simulated one has come to them in the groups of its
world, which remember the latest call of each member, and each that is not over.
"""

from collections.abc import Iterator, Mapping

from rankwise.base.failure import ErrorRecord
from rankwise.base.root_cause import may_be_of_others
from rankwise.base.units import Instant
from rankwise.core.ledger import NO_PEER, Call, CallRecord, Fate, Group, Stage
from rankwise.simranks.world import collective_groups
from rankwise.simranks.world.ranks import Rank
from rankwise.simranks.world.world import SimulatedWorld


def call_records_of(world: SimulatedWorld, errors: Mapping[int, ErrorRecord]) -> list[CallRecord]:
    """The call records of all ranks of the present attempt.

    Args:
        world: where they live.
        errors: what ranks have told to die of, by number.
    """
    return [
        _call_record(rank, world, errors.get(rank.number))
        for rank in world.scheduler.ranks.values()
    ]


def _call_record(rank: Rank, world: SimulatedWorld, error: ErrorRecord | None) -> CallRecord:
    groups = {name: group for name, group in world.groups.items() if rank.number in group.ranks}
    fate = _fate(rank, error)
    calls = [call for name, group in groups.items() for call in _calls(rank, name, group, fate)]
    return CallRecord(
        rank=rank.number,
        groups={
            name: Group(label=group.label, size=len(group.ranks), members=group.ranks)
            for name, group in groups.items()
        },
        counts={name: group.begun_by(rank.number) for name, group in groups.items()},
        calls=tuple(sorted(calls, key=lambda call: call.begun_at)),
        fate=fate,
    )


def _fate(rank: Rank, error: ErrorRecord | None) -> Fate:
    if error is not None:
        return Fate.RAISED if may_be_of_others(error) else Fate.DIED
    if rank.exit_code is None:
        return Fate.LIVES
    return Fate.LEFT if rank.exit_code == 0 else Fate.DIED


def _calls(
    rank: Rank, name: str, group: collective_groups.CollectiveGroup, fate: Fate
) -> Iterator[Call]:
    """The latest call of a group, and those that wait for others."""
    over = Stage.FAILED if fate is Fate.RAISED else Stage.DONE
    for came, gate in group.calls_of(rank.number):
        has_woken_in_vain = gate is not None and gate.error is not None and fate is Fate.LIVES
        is_awaited = gate is not None and any(each.gate is gate for each in rank.strands)
        if has_woken_in_vain or (is_awaited and gate is not None and not gate.is_open):
            stage = Stage.WAITING
        else:
            stage = over if gate is None or gate.is_open else Stage.ISSUED
        yield Call(
            group="" if came.signature.is_message else name,
            number=came.number,
            signature=came.signature,
            match=group.matched(came.signature).checksum,
            place=_place(came),
            begun_at=Instant(came.order),
            stage=stage,
            peer=_peer(gate),
        )


def _peer(gate: object) -> int:
    """The rank at the other end of a message, if it is known."""
    known = isinstance(gate, collective_groups.Post) and gate.missing()
    return known[0] if known else NO_PEER


def _place(came: collective_groups.Came) -> str:
    """The line as reports have it: `train.py:88`."""
    if came.place is None:
        return ""
    return f"{came.place.code.co_filename.rpartition('/')[2]}:{came.place.line}"
