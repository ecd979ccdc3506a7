"""The agent's side of ranks' call records: areas of the node's segment, read as values.

A rank may write while we read. Its count of a group only grows, so one that was read a moment too
early accuses a rank that is late by that moment; a judge looks at ranks that have waited for long.
Of the ring the oldest entry is left out: it may be half another by now. The format is told in
`rankwise.drivers.real.worker.call_ring`.
"""

import os
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from rankwise.base.units import Instant
from rankwise.core.ledger import Arrival, Call, CallRecord, Fate, Group, Stage
from rankwise.core.matching import NO_RANK, CallSignature, TensorForm
from rankwise.drivers.real.segments import Segment
from rankwise.drivers.real.worker.call_ring import (
    ENTRIES,
    ENTRY_BYTES,
    ENTRY_HEAD,
    FIELD_END,
    GROUP_BYTES,
    GROUP_HEAD,
    GROUP_KEY_BYTES,
    GROUP_LABEL_BYTES,
    HEAD_BYTES,
    HEAD_CALLS,
    HEAD_DONE,
    HEAD_GROUPS,
    HEAD_OVER,
    HEAD_PID,
    HEAD_POLLS,
    OF_HANDLE,
    OF_OTHER_THREAD,
    RING_AT,
    STAGE_BITS,
    TEXT_BYTES,
)

_HEAD = struct.Struct("=8Q")
_STAGE_MASK = (1 << STAGE_BITS) - 1
_END, _SLOT = 3, 4
_FIELDS = 5
"""Of a signature, without those of tensors."""
_CUT = "..."
"""Stands for a tensor for which an entry has no room."""
SAFE_ENTRIES = ENTRIES - 6
"""So many of the latest can be read before a rank could write over the first of them."""


def calls_begun(segment: Segment, local_rank: int) -> int:
    """How many calls a worker has entered by now, and waits for them."""
    return head_of(segment, local_rank)[HEAD_CALLS]


def has_ended_well(segment: Segment, local_rank: int) -> bool:
    """Whether a worker's program is over, though its process may not be."""
    head = head_of(segment, local_rank)
    return head[HEAD_OVER] == head[HEAD_CALLS] + 1


def polls_in_vain(segment: Segment, local_rank: int) -> int:
    """How often a worker has asked a handle whether its call is over, and it was not."""
    return head_of(segment, local_rank)[HEAD_POLLS]


def read_call_record(segment: Segment, local_rank: int, first_rank: int) -> CallRecord | None:
    """What a worker has entered, as a call record of a rank that lives or is done.

    None for one that enters nothing: a rank that has made no call may yet make one.
    """
    head = head_of(segment, local_rank)
    if not head[HEAD_PID]:
        return None
    at, group_count = segment.area_of_calls(local_rank), head[HEAD_GROUPS]
    table = os.pread(segment.fd, HEAD_BYTES + group_count * GROUP_BYTES, at)
    ring = os.pread(segment.fd, ENTRIES * ENTRY_BYTES, at + RING_AT)
    keys, groups, counts = _read_groups(table, group_count, first_rank)
    return CallRecord(
        rank=first_rank + local_rank,
        groups=groups,
        counts=counts,
        calls=tuple(_read_calls(ring, keys)),
        fate=Fate.LEFT if head[HEAD_DONE] == head[HEAD_CALLS] + 1 else Fate.LIVES,
    )


class SeenCall(NamedTuple):
    """A call as it stands in a ring: `words` are its text and place, as the rank has fitted them.

    `slot` is that of its group, -1 for a message; `ended_at` is 0 while the rank is in it; a wait
    for an issued call is `of_handle`; `match` is equal where members agree.
    """

    slot: int
    number: int
    begun_at: int
    ended_at: int
    stage: int
    words: bytes
    of_handle: bool
    match: int


class CallReader:
    """Reads all calls of one worker with their words, each once, for the record of the run.

    Args:
        segment: where its call record is.
        local_rank: whose call record it is.
        first_rank: the rank of the node's first worker.
    """

    def __init__(self, segment: Segment, local_rank: int, first_rank: int) -> None:
        self._segment = segment
        self._local_rank = local_rank
        self._first_rank = first_rank
        self._area = segment.area_of_calls(local_rank)
        self._seen = 0
        self.keys: list[str] = []
        self.groups: dict[str, Group] = {}

    def read_calls(self, most: int, *, is_last: bool = False) -> tuple[list[SeenCall], int]:
        """Its calls since the last look as far as they have ended, of many the latest.

        Args:
            most: how many to read.
            is_last: whether there is no other look, so that one it is in is read as well.

        Returns:
            The calls, and how many were lost before them.
        """
        head = head_of(self._segment, self._local_rank)
        last = head[HEAD_CALLS]
        if head[HEAD_GROUPS] != len(self.keys):
            self.keys, self.groups, _ = groups_of(self._segment, self._local_rank, self._first_rank)
        if last == self._seen:
            return [], 0
        first = max(self._seen, last - min(most, SAFE_ENTRIES)) + 1
        lost, calls = first - self._seen - 1, []
        for sequence, entry in self._entries(first, last):
            found, number, begun_at, end, slot, match, _, flags = ENTRY_HEAD.unpack_from(entry)
            if found == sequence and not end and not is_last:
                break  # the rank is in it: read on from here the next time
            self._seen = sequence
            if found == sequence and slot < len(self.keys):
                ended_at, stage = end >> STAGE_BITS, end & _STAGE_MASK
                words = entry[ENTRY_HEAD.size :]
                of_handle = bool(flags & OF_HANDLE)
                calls.append(
                    SeenCall(slot, number, begun_at, ended_at, stage, words, of_handle, match)
                )
        return calls, lost

    def _entries(self, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        """Those entries, read as the one or two stretches of memory that they lie in."""
        while first <= last:
            index = first % ENTRIES
            count = min(last - first + 1, ENTRIES - index)
            at = self._area + RING_AT + index * ENTRY_BYTES
            stretch = os.pread(self._segment.fd, count * ENTRY_BYTES, at)
            for offset in range(count):
                begin = offset * ENTRY_BYTES
                yield first + offset, stretch[begin : begin + ENTRY_BYTES]
            first += count


class ArrivalReader(CallReader):
    """Reads the calls of one worker as lateness needs them, each once.

    Attributes:
        matches: of the calls read last, by group and number, what is equal where members agree.
    """

    matches: dict[tuple[str, int], int]

    @property
    def is_standing(self) -> bool:
        """Whether the rank is in the call that it began last."""
        return self.group_waited_in is not None

    @property
    def group_waited_in(self) -> str | None:
        """The group of the call that the rank began last, if it is in it; empty for a message."""
        last = head_of(self._segment, self._local_rank)[HEAD_CALLS]
        if not last:
            return None
        ((_, entry),) = self._entries(last, last)
        head = ENTRY_HEAD.unpack_from(entry)
        if head[_END]:
            return None
        slot = head[_SLOT]
        return self.keys[slot] if 0 <= slot < len(self.keys) else ""

    def read(self, most: int) -> list[Arrival]:
        """Its calls in groups since the last look as far as they have ended, of many the latest."""
        calls, _ = self.read_calls(most)
        self.matches = {
            (self.keys[call.slot], call.number): call.match
            for call in calls
            if call.slot >= 0 and not call.of_handle
        }
        return [
            Arrival(self.keys[call.slot], call.number, call.begun_at, call.ended_at, call.of_handle)
            for call in calls
            if call.slot >= 0
        ]


def words_in(words: bytes) -> tuple[CallSignature, str]:
    """What was called, and the line that called it."""
    return signature_in(words[:TEXT_BYTES]), text_in(words[TEXT_BYTES:])


@lru_cache(maxsize=1024)
def signature_in(data: bytes) -> CallSignature:
    """What was called, as `call_ring.signature_text` has written it; its end may be cut."""
    fields = text_in(data).split(FIELD_END)
    operation, reduction, root, tag, lists, *tensors = fields + [""] * (_FIELDS - len(fields))
    return CallSignature(
        operation,
        reduction,
        int(root) if root else NO_RANK,
        tuple(map(_form_in, tensors)),
        tag=int(tag or 0),
        lists=_numbers_in(lists),
    )


def _form_in(field: str) -> TensorForm:
    shape, is_whole, dtype = field.partition(" ")
    return TensorForm(_numbers_in(shape), dtype) if is_whole else TensorForm(None, _CUT)


def _numbers_in(field: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, field.split(","))))


def head_of(segment: Segment, local_rank: int) -> tuple[int, ...]:
    """The counts at the beginning of a worker's call record."""
    return _HEAD.unpack(os.pread(segment.fd, HEAD_BYTES, segment.area_of_calls(local_rank)))


def groups_of(
    segment: Segment, local_rank: int, first_rank: int = 0
) -> tuple[list[str], dict[str, Group], dict[str, int]]:
    """The groups of a worker: their keys by slot, and by key what they are and how many calls."""
    count = head_of(segment, local_rank)[HEAD_GROUPS]
    at = segment.area_of_calls(local_rank)
    table = os.pread(segment.fd, HEAD_BYTES + count * GROUP_BYTES, at)
    return _read_groups(table, count, first_rank)


def _read_groups(
    table: bytes, group_count: int, first_rank: int
) -> tuple[list[str], dict[str, Group], dict[str, int]]:
    keys: list[str] = []
    groups: dict[str, Group] = {}
    counts: dict[str, int] = {}
    for slot in range(group_count):
        at = HEAD_BYTES + slot * GROUP_BYTES
        count, size = GROUP_HEAD.unpack_from(table, at)
        at += GROUP_HEAD.size
        key = text_in(table[at : at + GROUP_KEY_BYTES])
        at += GROUP_KEY_BYTES
        label = text_in(table[at : at + GROUP_LABEL_BYTES])
        bits = table[at + GROUP_LABEL_BYTES : HEAD_BYTES + (slot + 1) * GROUP_BYTES]
        here = int.from_bytes(bits, "little")
        members = tuple(first_rank + bit for bit in range(here.bit_length()) if here >> bit & 1)
        keys.append(key)
        groups[key] = Group(label=label, size=size, members=members)
        counts[key] = count
    return keys, groups, counts


def _read_calls(ring: bytes, keys: list[str]) -> Iterator[Call]:
    entries = [
        (*ENTRY_HEAD.unpack_from(ring, at), at + ENTRY_HEAD.size)
        for at in range(0, ENTRIES * ENTRY_BYTES, ENTRY_BYTES)
    ]
    last = max(entry[0] for entry in entries)
    for sequence, number, begun_at, end, slot, match, peer, flags, at in sorted(entries):
        if not sequence or sequence < last - ENTRIES + 2 or slot >= len(keys):
            continue
        if flags & OF_HANDLE and slot < 0:
            continue  # a wait for something unknown tells nothing of others
        yield Call(
            group=keys[slot] if slot >= 0 else "",
            number=number,
            signature=signature_in(ring[at : at + TEXT_BYTES]),
            match=match,
            place=text_in(ring[at + TEXT_BYTES : at - ENTRY_HEAD.size + ENTRY_BYTES]),
            begun_at=Instant(begun_at),
            ended_at=Instant(end >> STAGE_BITS),
            stage=Stage(end & _STAGE_MASK),
            peer=peer,
            is_of_main_thread=not flags & OF_OTHER_THREAD,
            of_handle=bool(flags & OF_HANDLE),
        )


def text_in(data: bytes) -> str:
    """A text as ranks store it, filled up with zeros."""
    return data.rstrip(b"\0").decode(errors="replace")
