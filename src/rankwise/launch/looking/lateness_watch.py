"""Sums up what late ranks have cost the others, from the call records of all attempts.

Each look takes in the calls that are new, of many the latest, so that a look costs a millisecond
whatever the ranks do. Lateness in what C++ calls is estimated from what recorders tell anyway, when
ranks are asked and when they end. In a run over nodes all ranks are compared when those of a node
have ended, by their latest calls (`core/ledger/timetables.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from rankwise.base.units import ZERO, Duration, Instant, between
from rankwise.core.ledger import (
    CALLS_MAX,
    INIT_GROUP,
    Arrival,
    Begun,
    Delay,
    Group,
    Lateness,
    RankTimes,
    SampledLateness,
    Timetable,
    pack_times,
    who_is_late,
)
from rankwise.core.ledger.lateness import NOTABLE_TIME
from rankwise.drivers.real.call_rings import ArrivalReader, calls_begun, read_call_record
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.process_work import cpu_wait_of
from rankwise.drivers.real.recorded_calls import begun_by_cpp, groups_of
from rankwise.drivers.real.report_pipe import Recorded
from rankwise.launch.run.planning import JobPlanner
from rankwise.ports.clock import Clock

if TYPE_CHECKING:
    from rankwise.core.rendezvous.records import LateRank
    from rankwise.core.rendezvous.vocabulary import InquiryAnswered
    from rankwise.drivers.real.segments import Segment

OnCppCalls = Callable[[int, Mapping[str, Group], Iterable[Begun]], None]
_ARRIVALS_MAX, _ARRIVALS_MIN = 1024, 16
"""How many calls a look takes in: of all ranks together, and of each at least."""


class LatenessWatch:
    """Compares when the ranks of this node came to their calls.

    Args:
        host: knows what has become of each rank.
        planner: knows the memory that holds the call records.
        clock: tells how long ranks have been watched.
        on_cpp_calls: is told what C++ has begun in a rank, by its local rank, where that is
            recorded.

    Attributes:
        has_cpp_calls: whether that was so.
        differ: whether ranks have entered different things under one number; set back by the
            reader.
        readers: of the ranks' call records, by local rank.
    """

    def __init__(
        self,
        host: RealProcessHost,
        planner: JobPlanner,
        clock: Clock,
        on_cpp_calls: OnCppCalls | None,
    ) -> None:
        self._host = host
        self._planner = planner
        self._clock = clock
        self._on_cpp_calls = on_cpp_calls
        self.has_cpp_calls = False
        self.readers: dict[int, ArrivalReader] = {}
        self.differ = False
        self._matches: dict[tuple[str, int], int] = {}
        """Of the calls seen in the last two looks."""
        self._began_at = clock.now()
        self._first_call_at: Instant | None = None
        self._lateness = Lateness(())
        self._sampled_lateness = SampledLateness()
        self._begun_by_cpp: dict[int, tuple[Mapping[str, Group], list[Begun]]] = {}
        """By rank, as it has told last."""
        self._cpu_waits: dict[int, tuple[Duration, Duration]] = {}
        """By rank, how long it had waited for a CPU when the first call was seen, and last."""
        self._late: LateRank | None = None
        self._are_all_compared = self._has_asked_who_is_late = False
        """Whether the other nodes have all told, and were asked, in this attempt."""
        self._read_segment: Segment | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this node, as they are numbered in the world."""
        return self._lateness.ranks

    def begin(self) -> None:
        """Read the call records of this attempt; sums go on where the ranks stay the same."""
        first_rank, segment = self._planner.ranks.rank(0), self._planner.segment
        if segment is None:
            return
        ranks = tuple(first_rank + local_rank for local_rank in range(segment.worker_count))
        self._lateness.forget_groups()
        self._sampled_lateness = SampledLateness()
        self._begun_by_cpp, self._late = {}, None
        self._are_all_compared = self._has_asked_who_is_late = False
        self._cpu_waits, self._matches, self.differ = {}, {}, False
        self.see_cpu_waits()
        if self._lateness.ranks != ranks:
            self._lateness, self._first_call_at = Lateness(ranks), None
        self._read_segment = segment
        self.readers = {
            local_rank: ArrivalReader(segment, local_rank, first_rank)
            for local_rank in range(segment.worker_count)
        }

    @property
    def lasted(self) -> Duration:
        """For how long ranks have taken part: since the first call, as far as one was seen."""
        since = self._began_at if self._first_call_at is None else self._first_call_at
        return between(since, self._clock.now())

    @property
    def reads_this_attempt(self) -> bool:
        """Whether readers are of the memory that the ranks share now; that of before is closed."""
        return self._read_segment is not None and self._read_segment is self._planner.segment

    def see_arrivals(self) -> None:
        """Take in the calls that are new."""
        if not self.reads_this_attempt:
            return
        most = max(_ARRIVALS_MIN, _ARRIVALS_MAX // len(self.readers))
        before, self._matches = self._matches, {}
        for rank, reader in zip(self._lateness.ranks, self.readers.values(), strict=True):
            arrivals = reader.read(most)
            # To meet is no work yet: a rank may be in it long before the others are imported.
            self._note_first(each for each in arrivals if each.group != INIT_GROUP)
            self._lateness.see(rank, reader.groups, arrivals)
            for call, match in reader.matches.items():
                others = before.get(call, match)
                self.differ |= self._matches.setdefault(call, others) != match

    def see_cpu_waits(self) -> None:
        """See for how long ranks had no CPU: a rank that is late by that is not to blame.

        The wait until they make calls or have a group, as to import, counts for no rank.
        """
        segment = self._planner.segment
        for local_rank, link in self._host.links.items():
            if segment is None or link.process is None or link.is_over:
                continue
            if not link.recorder_thread and not calls_begun(segment, local_rank):
                continue
            waited = cpu_wait_of(link.process.pid)
            if waited is not None:
                rank = self._planner.ranks.rank(local_rank)
                # It is told as a share of the time since the first call: what was before is none.
                is_first = self._first_call_at is None or rank not in self._cpu_waits
                first = waited if is_first else self._cpu_waits[rank][0]
                self._cpu_waits[rank] = first, waited

    def see_recorded(self, local_rank: int, recorded: Recorded) -> None:
        """Take in what torch's recorder has of a rank."""
        segment, first_rank = self._planner.segment, self._planner.ranks.rank(0)
        seen = None if segment is None else read_call_record(segment, local_rank, first_rank)
        if seen is not None:
            ranks = frozenset(self._lateness.ranks)
            calls, groups = begun_by_cpp(recorded, seen), groups_of(recorded, ranks)
            self._note_first(calls)
            self._sampled_lateness.see(seen.rank, groups, calls)
            self._begun_by_cpp[seen.rank] = groups, calls
            if self._on_cpp_calls is not None:
                self.has_cpp_calls |= bool(calls)
                self._on_cpp_calls(local_rank, groups, calls)

    def tell_times(self, asked_at: Instant, on_sheet: Callable[[bytes], None]) -> None:
        """Tell when this node's ranks came to their latest calls."""
        now = self._clock.now()
        table = Timetable(
            ranks=tuple(map(self._times_of, self.readers)) if self.reads_this_attempt else (),
            lasted=self.lasted,
            asked_at=asked_at,
            reported_at=now,
        )
        on_sheet(pack_times(table))

    @property
    def asks_who_is_late(self) -> bool:
        """Whether ranks have made calls for so long that some may have lost a notable time."""
        return self.lasted >= NOTABLE_TIME and not self._has_asked_who_is_late

    def on_late(self, answered: "InquiryAnswered | None") -> None:
        """The other nodes have been asked who of all ranks has made the others wait.

        If all have told, no other rank counts as late: one of another node may be so, too.
        """
        self._has_asked_who_is_late = True
        self._late = None if answered is None else answered.late
        self._are_all_compared = answered is not None and answered.in_time and not answered.silent

    def delays(self) -> tuple[Delay, ...]:
        """What each rank has cost the others so far, as far as was seen."""
        return self._lateness.delays()

    def take_last_look(self) -> tuple[Delay, str] | None:
        """The rank that made the others wait for a notable part of the run; that in a sentence."""
        self.see_arrivals()
        if self._late is not None:
            late = self._late
            return Delay(rank=late.rank, last=late.last, waited=late.waited), late.text
        if self._are_all_compared:
            return None
        cpu_waits = {rank: self._cpu_wait(rank) for rank in self._lateness.ranks}
        return who_is_late(self._lateness, self._sampled_lateness, self.lasted, cpu_waits)

    def on_suspended(self, since: Instant, until: Instant) -> None:
        """Take note that all ranks were stopped for a while."""
        self._lateness.on_suspended(since, until)

    def _note_first(self, calls: Iterable[Arrival | Begun]) -> None:
        known = () if self._first_call_at is None else (self._first_call_at,)
        begun = (Instant(call.begun_at) for call in calls)
        self._first_call_at = min((*known, *begun), default=None)

    def _times_of(self, local_rank: int) -> RankTimes:
        segment = self._planner.segment
        assert segment is not None, "its readers read it"
        rank, first_rank = self._planner.ranks.rank(local_rank), self._planner.ranks.rank(0)
        reader = ArrivalReader(segment, local_rank, first_rank)
        arrivals = tuple(reader.read(CALLS_MAX))
        groups, begun = self._begun_by_cpp.get(rank, ({}, []))
        groups = {**reader.groups, **groups}
        return RankTimes(
            rank=rank,
            groups=groups,
            arrivals=arrivals,
            begun=tuple(begun),
            cpu_wait=self._cpu_wait(rank),
        )

    def _cpu_wait(self, rank: int) -> Duration:
        first, last = self._cpu_waits.get(rank, (ZERO, ZERO))
        return between(Instant(first), Instant(last))
