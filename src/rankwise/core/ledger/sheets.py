"""Call records of one node's ranks, packed for the others, and those of all put together.

A *sheet* holds what it takes to blame ranks, and no more: the calls that a rank stands in, and of
each group the latest few. Ranks of one node do alike, so sheets are compressed; one that is still
too large is made again with fewer calls. Clocks of nodes differ: a sheet holds ages instead of
instants, so what two nodes tell is off by what their messages took.

A node knows which of its own ranks are in a group, so the members are those that all nodes together
know of. A group as large as the job has every rank, also those that have called nothing yet.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import msgspec

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.units import Instant
from rankwise.core.ledger.call_records import Call, CallRecord, Group, Stage

SHEET_BYTES_MAX = 32 * 1024
_UNPACKED_BYTES_MAX = 16 * 1024 * 1024
_CALLS_OF_GROUP = (8, 2, 1, 0)


class Sheet(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one node knows of its ranks.

    Attributes:
        seen: the call records that they keep.
        recorded: what torch's flight recorder has, of those that were asked and told.
    """

    seen: tuple[CallRecord, ...] = ()
    recorded: tuple[CallRecord, ...] = ()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Sheet)


def pack(sheet: Sheet, now: Instant, bytes_max: int = SHEET_BYTES_MAX) -> bytes:
    """Make bytes of a sheet, of at most that size; one that nothing makes so small is empty."""
    for calls_of_group in _CALLS_OF_GROUP:
        few = _mapped(sheet, partial(_without_old, calls_of_group=calls_of_group))
        kept = _mapped(few, partial(_aged, now=now))
        packed = zlib.compress(_ENCODER.encode(kept), 1)
        if len(packed) <= bytes_max:
            return packed
    return zlib.compress(_ENCODER.encode(Sheet()), 1)


def unpack(data: bytes, now: Instant) -> Sheet:
    """Read a sheet.

    Raises:
        RemoteProtocolError: it is none, or far too long.
    """
    try:
        sheet = _DECODER.decode(opened(data))
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(
            f"a node's sheet of calls cannot be read: {error}",
            hint="run the same version of rankwise on every node",
        ) from error
    return _mapped(sheet, partial(_aged, now=now))


def opened(data: bytes) -> bytes:
    """What was compressed, as far as it is no longer than anything that nodes tell."""
    return zlib.decompressobj().decompress(data, _UNPACKED_BYTES_MAX)


def with_all_members(records: Iterable[CallRecord], world_size: int) -> list[CallRecord]:
    """The same call records, with the members of their groups on all nodes."""
    records = list(records)
    whole = union_of_members((record.groups for record in records), world_size)
    return [
        msgspec.structs.replace(record, groups={key: whole[key] for key in record.groups})
        for record in records
    ]


def union_of_members(groups: Iterable[Mapping[str, Group]], world_size: int) -> dict[str, Group]:
    """Groups of which each node knows its own members, with those of all nodes."""
    members: dict[str, set[int]] = {}
    known: dict[str, Group] = {}
    for of_rank in groups:
        for key, group in of_rank.items():
            known.setdefault(key, group)
            is_of_all = group.size == world_size
            members.setdefault(key, set()).update(range(world_size) if is_of_all else group.members)
    return {
        key: msgspec.structs.replace(group, members=tuple(sorted(members[key])))
        for key, group in known.items()
    }


def _mapped(sheet: Sheet, change: Callable[[CallRecord], CallRecord]) -> Sheet:
    return Sheet(tuple(map(change, sheet.seen)), tuple(map(change, sheet.recorded)))


def _without_old(record: CallRecord, calls_of_group: int) -> CallRecord:
    return msgspec.structs.replace(
        record, calls=tuple(reversed([*_latest(record, calls_of_group)]))
    )


def _latest(record: CallRecord, calls_of_group: int) -> Iterator[Call]:
    left = dict.fromkeys(record.groups, calls_of_group)
    for place, call in enumerate(reversed(record.calls)):
        count = left.get(call.group, 0)
        left[call.group] = count - 1
        if count > 0 or place == 0 or call.stage is Stage.WAITING:
            yield call


def _aged(record: CallRecord, now: Instant) -> CallRecord:
    """Ages for instants, or instants for ages."""
    return msgspec.structs.replace(
        record,
        calls=tuple(
            msgspec.structs.replace(
                call,
                begun_at=Instant(now - call.begun_at),
                ended_at=Instant(now - call.ended_at if call.ended_at else 0),
            )
            for call in record.calls
        ),
    )
