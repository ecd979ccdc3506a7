"""When the ranks of each node came to their latest calls, and who of all ranks made others wait.

Theory of operation
===================

At the end of a run over nodes each tells its *timetable*: of each rank the latest calls, by its own
clock. The leader, which has asked, moves all to its own clock, and sums up as one node does
(`lateness.py`, `sampled.py`).

- *Clocks.* The leader knows when it sent the question and when it got the answer; the node adds how
  long it took. So the answer was given between two known instants; the middle is taken, and half of
  what lies between is the node's *error*. The delay of a rank against one of another node counts
  only as far as it is more than both errors.
- The timetables are a sample of the end of the run, taken for the whole of it; the share is told.
- A group whose members are not all known is not judged.
"""

import zlib
from collections.abc import Iterable, Mapping

import msgspec

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.units import ZERO, Duration, Instant, after, between
from rankwise.core.ledger.call_records import Group
from rankwise.core.ledger.lateness import NOTABLE_TIME, Arrival, Delay, Lateness
from rankwise.core.ledger.sampled import Begun, SampledLateness
from rankwise.core.ledger.sentences import delay_in_words, straggler_in_words, with_cpu_wait
from rankwise.core.ledger.sheets import SHEET_BYTES_MAX, opened, union_of_members

CALLS_MAX = 128
"""How many calls of a rank are told, of those that are in its call record."""
_CALLS_MIN = 8


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """When a rank came to its latest calls.

    Attributes:
        rank: which one.
        groups: those of the calls, with the members that are on its node.
        arrivals: calls of its call record that have ended.
        begun: what C++ has begun by itself.
        cpu_wait: how long it had to wait for a CPU.
    """

    rank: int
    groups: Mapping[str, Group] = {}
    arrivals: tuple[Arrival, ...] = ()
    begun: tuple[Begun, ...] = ()
    cpu_wait: Duration = ZERO


class Timetable(msgspec.Struct, frozen=True, kw_only=True):
    """That of the ranks of one node, by its clock.

    Attributes:
        ranks: those of them that have made calls.
        lasted: the time since the first call of one of them.
        asked_at, reported_at: when the node was asked, and when it answered.
    """

    ranks: tuple[RankTimes, ...]
    lasted: Duration
    asked_at: Instant
    reported_at: Instant = msgspec.field(name="told_at")


class ReceivedTimetable(msgspec.Struct, frozen=True):
    """A timetable as it arrived, by the leader's clock: the answer was given between these.

    The leader's own needs no clock but its own: both are None.
    """

    table: Timetable
    asked_at: Instant | None
    received_at: Instant | None

    @property
    def shift(self) -> int:
        """What to add to its instants to have them by the leader's clock."""
        if self.asked_at is None or self.received_at is None:
            return 0
        return (self._first_answer_at + self.received_at) // 2 - self.table.reported_at

    @property
    def error(self) -> int:
        """By how much that may be wrong."""
        if self.received_at is None:
            return 0
        return max(0, self.received_at - self._first_answer_at) // 2

    @property
    def _first_answer_at(self) -> Instant:
        """The earliest instant at which the node can have answered."""
        assert self.asked_at is not None, "asked of the tables of others"
        return after(self.asked_at, between(self.table.asked_at, self.table.reported_at))


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Timetable)


def pack_times(table: Timetable, bytes_max: int = SHEET_BYTES_MAX) -> bytes:
    """Make bytes of a timetable, of at most that size, with fewer calls if need be, or none."""
    most = CALLS_MAX
    while most >= _CALLS_MIN:
        packed = zlib.compress(_ENCODER.encode(_with_latest(table, most)), 1)
        if len(packed) <= bytes_max:
            return packed
        most //= 2
    return zlib.compress(_ENCODER.encode(msgspec.structs.replace(table, ranks=())), 1)


def unpack_times(data: bytes) -> Timetable:
    """Read a timetable.

    Raises:
        RemoteProtocolError: it is none, or far too long.
    """
    try:
        return _DECODER.decode(opened(data))
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(
            f"a node's table of the times of calls cannot be read: {error}",
            hint="run the same version of rankwise on every node",
        ) from error


def late_over_nodes(
    tables: Iterable[ReceivedTimetable], world_size: int
) -> tuple[Delay, str] | None:
    """The rank that made the others wait notably, if there is one, and that in a sentence."""
    tables = list(tables)
    times = [(rank, told) for told in tables for rank in told.table.ranks]
    lasted = max((told.table.lasted for told in tables), default=Duration(0))
    errors = {rank.rank: (node, tables[node].error) for node in range(len(tables))
              for rank in tables[node].table.ranks}  # fmt: skip

    def doubt(one: int, other: int) -> int:
        (here, error), (there, other_error) = errors[one], errors[other]
        return 0 if here == there else error + other_error

    known = union_of_members((rank.groups for rank, _ in times), world_size)
    groups = {key: group for key, group in known.items() if len(group.members) == group.size}
    lateness = Lateness(range(world_size), doubt)
    sampled = SampledLateness(doubt)
    for rank, told in times:
        arrivals = (_moved(call, told.shift) for call in rank.arrivals if call.group in groups)
        lateness.see(rank.rank, groups, arrivals)
        begun = (call for call in rank.begun if call.group in groups)
        moved = (call._replace(begun_at=call.begun_at + told.shift) for call in begun)
        sampled.see(rank.rank, groups, moved)
    return who_is_late(lateness, sampled, lasted, {rank.rank: rank.cpu_wait for rank, _ in times})


def who_is_late(
    lateness: Lateness,
    sampled: SampledLateness,
    lasted: Duration,
    cpu_waits: Mapping[int, Duration],
) -> tuple[Delay, str] | None:
    """The rank that made the others wait for a notable part of that time, and that in a sentence.

    Args:
        lateness: of what ranks call.
        sampled: of what C++ calls, which counts where no rank is late to the others.
        lasted: the time since their first call.
        cpu_waits: how long they had to wait for a CPU, as far as that is known.
    """
    worst = lateness.worst(lasted)
    if worst is None:
        found = _notable_straggler(sampled, lasted)
        if found is None:
            return None
        worst, text = found
    else:
        text = delay_in_words(worst, lasted, lateness.seen, is_of_a_part=lateness.is_of_a_part)
    return worst, with_cpu_wait(text, worst, cpu_waits.get(worst.rank, ZERO), lasted)


def _notable_straggler(sampled: SampledLateness, lasted: Duration) -> tuple[Delay, str] | None:
    found = sampled.straggler()
    waited = Duration(0) if found is None else Duration(round(found.cost * lasted))
    if found is None or waited < NOTABLE_TIME:
        return None
    return Delay(rank=found.rank, last=found.last, waited=waited), straggler_in_words(found)


def _moved(call: Arrival, shift: int) -> Arrival:
    return call._replace(begun_at=call.begun_at + shift, ended_at=call.ended_at + shift)


def _with_latest(table: Timetable, most: int) -> Timetable:
    ranks = tuple(
        msgspec.structs.replace(
            rank, arrivals=rank.arrivals[-most:], begun=_latest_of_groups(rank.begun, most)
        )
        for rank in table.ranks
    )
    return msgspec.structs.replace(table, ranks=ranks)


def _latest_of_groups(calls: tuple[Begun, ...], most: int) -> tuple[Begun, ...]:
    newest: dict[str, int] = {}
    for call in calls:
        newest[call.group] = max(newest.get(call.group, 0), call.number)
    return tuple(call for call in calls if call.number > newest[call.group] - most)
