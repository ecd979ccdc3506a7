"""What torch's flight recorder tells of a rank, as a call record of the ledger.

The recorder has every collective, also those that C++ begins by itself, but neither lines nor
reductions nor roots: a call that the rank has entered in its own call record too is told as it is
there. The numbers are torch's, which count all calls of a group.
"""

from bisect import bisect_right
from collections.abc import Collection

import msgspec

from rankwise.base.units import MICROSECOND, Instant
from rankwise.core.ledger import Begun, Call, CallRecord, Fate, Group, Stage
from rankwise.core.matching import CallSignature, TensorForm
from rankwise.drivers.real.call_rings import SAFE_ENTRIES
from rankwise.drivers.real.report_pipe import (
    RawSignature,
    Recorded,
    ReportedCall,
    ReportedGroup,
)
from rankwise.drivers.real.worker.torch_calls import OF_ONE_SIZE

FROM_CPP = "begun by C++"
_SLACK = 20 * MICROSECOND
"""Torch records by the other clock."""


def recorded_call_record(
    recorded: Recorded, seen: CallRecord, ranks: Collection[int]
) -> CallRecord:
    """The call record of a rank by the recorder.

    Args:
        recorded: what it has.
        seen: what the rank has entered itself; its fate is the rank's.
        ranks: those of this node.
    """
    entries = sorted(
        ((call, group) for group in recorded.groups for call in group.calls),
        key=lambda entry: entry[0].begun_at,
    )
    # It stands in the first that is not over. Later ones are issued.
    first = next((call.begun_at for call, _ in entries if not call.is_over), None)
    if first is None and seen.fate is Fate.RAISED and entries:
        first = entries[-1][0].begun_at
    return CallRecord(
        rank=seen.rank,
        groups=groups_of(recorded, ranks),
        counts={group.name: group.calls[-1].number for group in recorded.groups if group.calls},
        calls=tuple(_call(call, group, seen, first) for call, group in entries),
        fate=seen.fate,
    )


def with_library_numbers(record: CallRecord, recorded: Recorded) -> CallRecord:
    """The rank's own call record, with torch's number for each call that the recorder has."""
    by_name = {group.name: group for group in recorded.groups}
    numbers = {
        (call.group, call.number): _number_in(by_name[call.group], call)
        for call in record.calls
        if call.group in by_name and not call.of_handle
    }
    calls = tuple(
        msgspec.structs.replace(call, library_number=numbers.get((call.group, call.number), 0))
        for call in record.calls
    )
    return msgspec.structs.replace(record, calls=calls)


def _number_in(group: ReportedGroup, call: Call) -> int:
    operation = call.signature.operation
    numbers = [
        (begun_at < call.begun_at, number)  # then it may be the call before
        for number, begun_at, what in group.sample
        if _is_in(call, begun_at) and group.signatures[what][0] == operation
    ]
    return min(numbers, default=(False, 0))[1]


def begun_by_cpp(recorded: Recorded, seen: CallRecord) -> list[Begun]:
    """What C++ has begun by itself, as far as the rank's own call record goes back."""
    own = [call for call in seen.calls if not call.of_handle]
    begins = [call.begun_at - _SLACK for call in own]
    # The ring holds as many: what came before its first may have been entered and forgotten.
    known_since = begins[0] if len(seen.calls) >= SAFE_ENTRIES and begins else 0
    calls = []
    for group in recorded.groups:
        for number, begun_at, what in group.sample:
            if begun_at < known_since:
                continue
            entered = own[: bisect_right(begins, begun_at)][-1:]
            if not any(not call.ended_at or begun_at <= call.ended_at + _SLACK for call in entered):
                calls.append(
                    Begun(group.name, number, begun_at, _signature(group.signatures[what]))
                )
    return calls


def groups_of(recorded: Recorded, ranks: Collection[int]) -> dict[str, Group]:
    """The groups that torch has, each with its members among these ranks."""
    return {
        group.name: Group(
            label=group.label,
            size=len(group.members),
            members=tuple(rank for rank in group.members if rank in ranks),
        )
        for group in recorded.groups
    }


def _call(call: ReportedCall, group: ReportedGroup, seen: CallRecord, first: int | None) -> Call:
    stage = Stage.DONE if call.is_over else Stage.ISSUED
    if call.begun_at == first:
        stage = Stage.FAILED if call.is_over else Stage.WAITING
    entered = _entered(call, group, seen)
    if entered is not None and entered.stage is Stage.FAILED:
        stage = Stage.FAILED  # to the recorder a call is over, too, when it has failed
    called = _signature(call.signature)
    return Call(
        group=group.name,
        number=call.number,
        signature=called if entered is None else entered.signature,
        match=called.agreed(has_one_size=called.operation in OF_ONE_SIZE).checksum,
        place=FROM_CPP if entered is None else entered.place,
        begun_at=Instant(call.begun_at),
        stage=stage,
    )


def _signature(raw: RawSignature) -> CallSignature:
    operation, reduction, root, tensors = raw
    return CallSignature(operation, reduction, root, tuple(TensorForm(*each) for each in tensors))


def _entered(call: ReportedCall, group: ReportedGroup, seen: CallRecord) -> Call | None:
    """The rank's own entry of a call: torch has recorded it between that entry's begin and end."""
    return next(
        (
            entered
            for entered in reversed(seen.calls)
            if not entered.of_handle
            and entered.group == group.name
            and _is_in(entered, call.begun_at)
            and entered.signature.operation == call.signature[0]
        ),
        None,
    )


def _is_in(entered: Call, begun_at: int) -> bool:
    """Whether torch has recorded something while the rank was in a call."""
    if begun_at < entered.begun_at - _SLACK:
        return False
    return not entered.ended_at or begun_at <= entered.ended_at + _SLACK
