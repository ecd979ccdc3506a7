"""The call that each worker began last, and whom it waits for, from their call records.

`call_rings` reads whole call records, to judge them. An onlooker, as `rankwise top` is every
second, needs one entry of each, and the table of groups.
"""

import os
from collections.abc import Mapping

import msgspec

from rankwise.base.units import MILLISECOND, Duration, Instant, between
from rankwise.core.ledger import UNNUMBERED
from rankwise.core.matching import CallSignature, behind, describe_call
from rankwise.drivers.real.call_rings import calls_begun, groups_of, head_of, words_in
from rankwise.drivers.real.segments import Segment
from rankwise.drivers.real.worker.call_ring import (
    ENTRIES,
    ENTRY_BYTES,
    ENTRY_HEAD,
    HEAD_WAITS,
    RING_AT,
)

NOTABLE_WAIT = Duration(500 * MILLISECOND)
"""Ranks that wait for less are not looked into: in every healthy run some do."""


class LastCall(msgspec.Struct, frozen=True, kw_only=True):
    """The call that a worker began last.

    Attributes:
        sequence: how many calls it has begun in all, without waits for those that it has issued.
        signature: what is called.
        group: how people call the group; empty for the group of all ranks.
        key: the group's key, the same on all its members; empty for a message to one rank.
        number: the call's number in the group.
        place: the line of the program, such as `train.py:88`.
        begun_at: when the worker came to it.
        is_standing: whether the worker is still in it.
    """

    sequence: int
    signature: CallSignature
    group: str
    key: str
    number: int
    place: str
    begun_at: Instant
    is_standing: bool

    @property
    def text(self) -> str:
        """What is called, for people, with its number in the group."""
        return describe_call(self.signature, self.shown_number)

    @property
    def shown_number(self) -> int | None:
        """Its number for people; None where calls are not numbered."""
        return None if self.key in UNNUMBERED else self.number


def last_call(segment: Segment, local_rank: int) -> LastCall | None:
    """The last call of a worker; None where it has made none, or makes the next one right now."""
    sequence = calls_begun(segment, local_rank)
    if not sequence:
        return None
    at = segment.area_of_calls(local_rank) + RING_AT + sequence % ENTRIES * ENTRY_BYTES
    entry = os.pread(segment.fd, ENTRY_BYTES, at)
    found, number, begun_at, end, slot, *_ = ENTRY_HEAD.unpack_from(entry)
    keys, groups, _ = groups_of(segment, local_rank) if slot >= 0 else ([], {}, {})
    if found != sequence or slot >= len(keys):
        return None
    key = keys[slot] if slot >= 0 else ""
    signature, place = words_in(entry[ENTRY_HEAD.size :])
    return LastCall(
        sequence=sequence - head_of(segment, local_rank)[HEAD_WAITS],
        signature=signature,
        group=groups[key].label if key else "",
        key=key,
        number=number,
        place=place,
        begun_at=Instant(begun_at),
        is_standing=not end,
    )


def awaited(
    segment: Segment, calls: Mapping[int, LastCall], now: Instant
) -> dict[int, tuple[int, Instant]]:
    """The workers for which others wait in calls: how many wait, and since when the first does.

    A worker that stands in a call itself is not awaited: it waits. So is one of a group that it
    shares with none of those that wait.
    """
    standing = {
        rank: call
        for rank, call in calls.items()
        if call.is_standing and call.key and between(call.begun_at, now) >= NOTABLE_WAIT
    }
    if not standing:
        return {}
    waiting: dict[str, list[LastCall]] = {}
    for call in standing.values():
        waiting.setdefault(call.key, []).append(call)
    members = {
        call.key: groups_of(segment, rank)[1][call.key].members for rank, call in standing.items()
    }
    found: dict[int, tuple[int, Instant]] = {}
    for rank in range(segment.worker_count):
        known = calls.get(rank)
        if known is not None and known.is_standing:
            continue
        _, _, counts = groups_of(segment, rank)
        missed = [
            call
            for key, calls_there in waiting.items()
            if rank in members[key]
            for call in calls_there
            if behind((rank,), {rank: counts.get(key, 0)}, call.number)
        ]
        if missed:
            found[rank] = len(missed), min(call.begun_at for call in missed)
    return found
