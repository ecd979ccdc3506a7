"""Reads the call records of this node's ranks: if one fails, if all hang, and twice a second.

A rank writes its call record into shared memory, which tells nobody, so what shows in call records
alone is looked for in intervals, while ranks make calls that do not watch their peers themselves
(torch's). A look reads a word of each call record. Only where a rank has begun no call since the
last look all call records are read, and blame counts when two looks running have come to it: no
healthy run is ended by what was read while it moved. In between the ranks are asked under which
numbers torch has the calls that they entered, since some of them may have made others under
`torch.compile`.

What C++ calls by itself is in no call record, but in torch's flight recorder, which costs a rank 20
ms to read. So ranks are *asked* only where there may be trouble: a rank has stood in a call for a
second, none has begun one for `QUIET`, or one has told of an exception that may be another's doing.
Pauses between questions double, but blame by the answers is followed by another question at the
next look, and counts when that finds the same. The exit watch (`core/watch`) decides what waits for
answers after an exception or an exit, and for how long; it has ranks asked and call records read
here. Where ranks have answered, their recorders tell who is absent before the call records do: by
those alone, ranks that wait in C++ for another seem to be missing.

Ranks that have come to one call with different things are told apart by what most have called, and
when a backend ends one of them, others may be on their way to it: `EndLooked` says so. A rank that
has destroyed its groups may be about to die of something, which it tells only then.

In a run over nodes the other nodes are asked too (`core/rendezvous/inquiry.py`): when a rank stands
in a call from one look to the next, and when one has failed and this node's call records do not
tell by whose fault, or only some of those who disagree are here.

Who is merely late is accused only when an exception tells that patience is over. What lateness has
cost is summed up by the way (`lateness_watch.py`).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from rankwise.base.root_cause import may_be_of_others
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant, after, between
from rankwise.core.gang.vocabulary import RanksBlamed
from rankwise.core.ledger import (
    INIT_GROUP,
    Blame,
    CallRecord,
    Fate,
    Sheet,
    find_blame,
    find_disagreement,
    find_past_disagreement,
    judge,
    pack,
    wait_in_words,
    waits_of,
)
from rankwise.core.rendezvous.records import Trouble
from rankwise.core.watch.machine import STRAGGLE
from rankwise.core.watch.vocabulary import (
    CallsJudged,
    EndLooked,
    JudgeCalls,
    LookAtEnd,
    LookAtPast,
    PastLooked,
)
from rankwise.drivers.real.call_rings import calls_begun, has_ended_well, read_call_record
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.reactor import Reactor
from rankwise.drivers.real.recorded_calls import recorded_call_record, with_library_numbers
from rankwise.drivers.real.report_pipe import Recorded
from rankwise.drivers.real.worker.call_ring import SWITCH_VARIABLE
from rankwise.launch.looking.lateness_watch import LatenessWatch, OnCppCalls
from rankwise.launch.looking.recorder_questions import RecorderQuestions
from rankwise.launch.run.planning import JobPlanner
from rankwise.ports.clock import Clock

if TYPE_CHECKING:
    from rankwise.base.failure import BlameIdentity

INTERVAL = Duration(500 * MILLISECOND)
STANDING = Duration(1 * SECOND)
QUIET = Duration(10 * SECOND)
"""Ranks are asked when one has stood in a call for so long, or none has begun one."""
SAMPLE_PAUSE = Duration(60 * SECOND)
"""How often ranks are asked where what C++ begins is recorded: a thousandth of their time."""
CHECK_PATIENCE = Duration(3 * SECOND)
"""How long blame by the call records waits for torch's numbers; a rank may hold the interpreter."""
_PAUSE_MAX = Duration(60 * SECOND)
_SIGABRT = 6
_WATCHDOG, _WATCHDOG_LINES = "Watchdog caught collective operation timeout", 60
"""What torch writes to stderr before it ends a rank, and how much it may write after that."""


class CallWatch:
    """Looks into the call records of one run.

    Args:
        host: knows what has become of each rank.
        planner: knows the memory that holds the call records.
        reactor: wakes for the next look.
        clock: tells for how long a rank has stood in a call.
        blame: is told who is to blame.
        ask_nodes: has the other nodes asked, or told that there is no more need.
        is_holding: whether an exit is held back until ranks or nodes have answered.
        hang_timeout: after which the run counts as hung, so that ranks are asked before.
        on_cpp_calls: is told what C++ has begun in a rank, by its local rank, where that is
            recorded; then ranks are also asked now and then.
    """

    def __init__(
        self,
        host: RealProcessHost,
        planner: JobPlanner,
        reactor: Reactor,
        clock: Clock,
        *,
        blame: Callable[[RanksBlamed], None],
        ask_nodes: Callable[[Trouble], bool],
        is_holding: Callable[[], bool],
        hang_timeout: Duration | None,
        on_cpp_calls: OnCppCalls | None,
    ) -> None:
        self._host = host
        self._planner = planner
        self._reactor = reactor
        self._clock = clock
        self._blame = blame
        self._ask_nodes = ask_nodes
        self._is_holding = is_holding
        self._samples = on_cpp_calls is not None
        self._sample_pause = SAMPLE_PAUSE
        self._sampled_at = clock.now()
        self._standing: dict[int, int] = {}
        self._looks_at: int | None = None
        self._begun: dict[int, int] = {}
        self._stood: dict[int, int] = {}
        """Ranks that have begun no call since the last look, and how many they have begun."""
        self._suspicion: BlameIdentity | None = None
        self._suspected_at = clock.now()
        self._still_since = clock.now()
        # A third: the ranks' answer must be there before the run counts as hung.
        self._quiet = QUIET if hang_timeout is None else min(QUIET, Duration(hang_timeout // 3))
        self._pause_max = min(_PAUSE_MAX, Duration(2 * self._quiet))
        self._questions = RecorderQuestions(host, reactor, clock)
        self._last_blame: BlameIdentity | None = None
        """What the recorders have told by the answers before these."""
        self._stuck: set[int] = set()
        self._doubts_from, self._doubt_pause = clock.now(), INTERVAL
        self._is_doubting = False
        """Whether an answer is awaited: if the run ends before, the ranks' last words are it."""
        self._asked_at: Instant | None = None
        self._pause: Duration | None = None
        self.lateness = LatenessWatch(host, planner, clock, on_cpp_calls)

    def begin(self) -> int | None:
        """Look at the present attempt in intervals, as long as it lasts.

        Returns:
            Its number; None if it is looked at already.
        """
        if self._looks_at == self._attempt:
            return None
        is_looking = self._looks_at is not None
        self._looks_at = self._attempt
        self._begun, self._suspicion, self._last_blame = {}, None, None
        self._standing, self._stuck = {}, set()
        self._doubts_from, self._doubt_pause = self._clock.now(), INTERVAL
        self._questions = RecorderQuestions(self._host, self._reactor, self._clock)
        self._is_doubting = False
        self.lateness.begin()
        if not is_looking:
            self._look_later()
        return self._attempt

    def _is_somebody_behind(self, trouble: Trouble) -> bool:
        """Whether ranks stand in a call, or have failed in it, and others may yet come to it."""
        return trouble is Trouble.FAILED and any(
            record.fate is Fate.LIVES or self._is_ending(record) for record in self._awaited()
        )

    def _awaited(self) -> list[CallRecord]:
        """The call records of ranks that others wait for in calls."""
        records = {record.rank: record for record in self._call_records()}
        awaited = {rank for wait in waits_of(records.values()).values() for rank in wait.awaited}
        return [records[rank] for rank in sorted(awaited)]

    def _is_ending(self, record: CallRecord) -> bool:
        """Whether a rank is done by its call record, and has not told yet how it ends."""
        segment, local_rank = self._planner.segment, self._planner.ranks.local_rank(record.rank)
        is_over = segment is None or has_ended_well(segment, local_rank)
        has_ended = is_over or self._host.links[local_rank].exit_code is not None
        return record.fate is Fate.LEFT and not has_ended

    def tell_call_records(
        self, trouble: Trouble, on_sheet: Callable[[bytes], None], *, with_recorders: bool
    ) -> None:
        """Tell the other nodes what this node's ranks do."""
        if trouble is Trouble.DONE:
            self.ask(partial(self.lateness.tell_times, self._clock.now(), on_sheet))
            return

        def tell() -> None:
            records = self._call_records(with_empty=trouble in (Trouble.TIMED_OUT, Trouble.WHY))
            if trouble in (Trouble.STANDS, Trouble.WHY):
                records = [self._without_haste(record) for record in records]
            recorded = self._recorded_call_records(records, range(self._planner.ranks.size))
            sheet = Sheet(tuple(records), tuple(recorded) if with_recorders else ())
            on_sheet(pack(sheet, self._clock.now()))

        look = partial(self.ask, tell) if with_recorders else tell
        if self._is_somebody_behind(trouble):
            self._reactor.call_at(after(self._clock.now(), STRAGGLE), look)
        else:
            look()

    def look_at_end(self, order: LookAtEnd) -> EndLooked:
        """Tell what the call records show of a rank that has ended, or has told of its exception.

        gloo ends a rank whose data did not fit; a section, and the watchdog of NCCL, one that has
        waited for too long.
        """
        attempt, local_rank = order.attempt, order.local_rank
        if order.has_exited:
            is_over = self._is_stuck_in_section(local_rank) or self._is_ended_by_watchdog(
                local_rank
            )
            by_abort = self._host.links[local_rank].exit_code == -_SIGABRT
            if is_over or not by_abort:
                return EndLooked(attempt, local_rank, is_over_limit=is_over)
        blame = find_disagreement(self._call_records(), self._planner.ranks.rank(local_rank))
        return EndLooked(
            attempt,
            local_rank,
            is_over_limit=not order.has_exited and self._is_peer_stuck_in_section(local_rank),
            may_come=self._is_somebody_behind(Trouble.FAILED),
            is_ending=any(map(self._is_ending, self._awaited())),
            blamed=None if blame is None else self._blamed(blame),
            is_undecided=blame is not None and bool(blame.late),
        )

    def look_at_past(self, order: LookAtPast) -> PastLooked:
        """All ranks have ended: compare their calls, by what they have told at their ends."""
        self.lateness.see_arrivals()
        blame = None
        if self.lateness.differ or self._is_doubting:
            self._is_doubting = False
            blame = find_past_disagreement(self._call_records())
        has_succeeded = all(link.exit_code == 0 for link in self._host.links.values())
        has_other_nodes = self._planner.ranks.node_count > 1
        return PastLooked(
            order.attempt,
            blamed=None if blame is None else self._blamed(blame),
            asks_who_is_late=has_succeeded and has_other_nodes and self.lateness.asks_who_is_late,
        )

    def judge(self, order: JudgeCalls) -> CallsJudged:
        """Find who is to blame for the end of a rank, by call records and by ranks' answers."""
        is_over = order.trouble is Trouble.TIMED_OUT
        find = self._judge_section if order.has_exited else self._judge_error
        blame, is_open = find(order.local_rank, patience_is_over=is_over)
        blamed = None if blame is None else self._blamed(blame)
        return CallsJudged(order.attempt, order.local_rank, blamed, is_open)

    def _judge_section(
        self, local_rank: int, *, patience_is_over: bool
    ) -> tuple[Blame | None, bool]:
        """Whom a rank has awaited in a call until the limit of its section was over.

        Returns:
            That, and whether only other nodes can tell who has not come to the call.
        """
        ranks = self._planner.ranks
        records = self._call_records(with_empty=True)
        recorded = self._recorded_call_records(records)
        rank = ranks.rank(local_rank)
        if rank not in waits_of(records) | waits_of(recorded):
            return None, False
        blame = judge(records, recorded, patience_is_over=patience_is_over)
        if blame is None:
            return None, ranks.node_count > 1
        return (None if rank in blame.blamed else blame), False

    def _judge_error(self, local_rank: int, *, patience_is_over: bool) -> tuple[Blame | None, bool]:
        """Who is to blame for an exception; and whether other nodes may know better."""
        records = self._call_records(with_empty=patience_is_over)
        rank = self._planner.ranks.rank(local_rank)
        known = [*records, *self._recorded_call_records(records)]
        if not any(record.standing for record in known if record.rank == rank):
            return None, False
        blame = judge(
            records, self._recorded_call_records(records), patience_is_over=patience_is_over
        )
        has_other_nodes = self._planner.ranks.node_count > 1
        return blame, has_other_nodes and (blame is None or blame.is_of_a_part)

    def _is_ended_by_watchdog(self, local_rank: int) -> bool:
        """Whether torch's watchdog has ended a rank since a collective of NCCL took too long."""
        link = self._host.links[local_rank]
        if link.exit_code is None or link.exit_code >= 0:
            return False
        link.stderr.pump.drain(self._clock.now())  # it says so just before
        return any(_WATCHDOG in line for line in link.stderr.tail.lines(_WATCHDOG_LINES))

    def _is_stuck_in_section(self, local_rank: int) -> bool:
        segment = self._planner.segment
        return segment is not None and segment.is_stuck_in_section(local_rank)

    def _is_peer_stuck_in_section(self, local_rank: int) -> bool:
        """Whether that is so of a member of the call in which this rank stands."""
        ranks = self._planner.ranks
        rank = ranks.rank(local_rank)
        stuck = {*map(ranks.rank, filter(self._is_stuck_in_section, self._host.links))}
        records = [record for record in self._call_records() if stuck and record.rank == rank]
        return any(
            stuck.intersection(record.groups[call.group].members if call.group else (call.peer,))
            for record in (*records, *self._recorded_call_records(records))
            for call in record.standing
        )

    def on_recorded(self, local_rank: int, recorded: Recorded) -> None:
        """A rank tells what torch's recorder has."""
        self.lateness.see_recorded(local_rank, recorded)
        self._questions.on_recorded(local_rank, recorded)

    def ask_for_hold(self, on_answers: Callable[[bool], None]) -> None:
        """Ask the ranks while an exit is held back; tell when they have told, and if any can."""
        if not self._questions.ask(partial(on_answers, True)):  # noqa: FBT003  # it has no name
            on_answers(False)  # noqa: FBT003  # the same

    def ask(self, on_answers: Callable[[], None]) -> None:
        """Ask the ranks what C++ has called; call back when they have told, or cannot."""
        # While news are held back, the answers that those wait for stay as they are.
        if self._is_holding() or not self._questions.ask(on_answers):
            on_answers()

    def awaited(self) -> tuple[int, ...]:
        """The ranks of this node that keep all others waiting, if that can be told."""
        seen = self._call_records(with_empty=True)
        blame = judge(seen, self._recorded_call_records(seen), patience_is_over=True)
        blamed = () if blame is None else blame.blamed
        return tuple(self._planner.ranks.local_rank(rank) for rank in blamed)

    def explain_hang(self) -> tuple[Blame | None, Mapping[int, str]]:
        """Who is to blame for a hang, if that can be told; and what each rank waits for."""
        seen = {record.rank: record for record in self._call_records(with_empty=True)}
        recorded = {record.rank: record for record in self._recorded_call_records(seen.values())}
        blame = judge(seen.values(), recorded.values(), patience_is_over=True)
        told = {
            self._planner.ranks.local_rank(rank): wait_in_words(wait, records[rank])
            for records in (recorded, seen)
            for rank, wait in waits_of(records.values()).items()
        }
        return blame, told

    @property
    def _attempt(self) -> int:
        return max((link.attempt for link in self._host.links.values()), default=-1)

    def _look_later(self) -> None:
        self._reactor.call_at(after(self._clock.now(), INTERVAL), self._look)

    def _look(self) -> None:
        if all(link.is_over for link in self._host.links.values()):
            self._looks_at = None
            return
        self.lateness.see_arrivals()
        self.lateness.see_cpu_waits()
        blame = self._certain_blame() if self._is_somebody_standing() else None
        self._suspect()
        self._doubt_past()
        found = None if blame is None or not blame.is_certain else blame.identity
        if blame is not None and found and found == self._suspicion and self._is_checked:
            self._accuse(blame)
            self._looks_at = None
            return
        if found != self._suspicion:
            self._suspicion, self._suspected_at = found, self._clock.now()
            if found and not self._is_holding():
                self._questions.ask(lambda: None)
        self._tell_nodes_who_stands()
        self._ask_for_sample()
        self._look_later()

    @property
    def _is_checked(self) -> bool:
        """Whether ranks have told by now under which numbers torch has the calls they entered."""
        is_over = between(self._suspected_at, self._clock.now()) >= CHECK_PATIENCE
        return is_over or not self._questions.awaits_answers

    def _tell_nodes_who_stands(self) -> None:
        """Let the other nodes know when ranks begin to stand in calls, and when all move again."""
        is_alone = self._planner.ranks.node_count < 2
        if is_alone or not self.lateness.reads_this_attempt or self._is_holding():
            return
        standing = {
            rank: begun
            for rank, begun in self._stood.items()
            # While ranks start, some wait for others on every healthy node.
            if self.lateness.readers[rank].group_waited_in not in (None, INIT_GROUP)
        }
        # What C++ calls is in no call record.
        if not standing and between(self._still_since, self._clock.now()) >= self._quiet:
            standing = self._stood
        if standing != self._standing:
            self._standing = standing
            self._ask_nodes(Trouble.STANDS if standing else Trouble.NONE)

    def _is_somebody_standing(self) -> bool:
        """Whether a rank has begun no call since the last look, and has begun some before."""
        segment = self._planner.segment
        if segment is None:
            return False
        alive = [rank for rank, link in self._host.links.items() if not link.is_over]
        begun = {rank: calls_begun(segment, rank) for rank in alive}
        last, self._begun = self._begun, begun
        if last != begun:
            self._still_since = self._clock.now()
            self._asked_at, self._pause, self._last_blame = None, None, None
        self._stood = {
            rank: count for rank, count in begun.items() if count and last.get(rank) == count
        }
        return bool(self._stood)

    def _certain_blame(self) -> Blame | None:
        """Who is to blame of those who have stood for the time between two looks."""
        records = [self._without_haste(record) for record in self._call_records()]
        return find_blame(records, patience_is_over=False)

    def _without_haste(self, record: CallRecord) -> CallRecord:
        """A call record of a rank that is not known to have ended: it may yet call something."""
        local_rank = self._planner.ranks.local_rank(record.rank)
        if record.fate is Fate.LEFT and self._host.links[local_rank].exit_code != 0:
            return msgspec.structs.replace(record, fate=Fate.LIVES)
        return record

    def _suspect(self) -> None:
        """Ask the ranks what C++ has called, if they may be in trouble, and judge their answers."""
        if self._is_holding() or not self.lateness.reads_this_attempt:
            return
        # What ranks are in whose sections' limits are over is asked for before these end them.
        last, self._stuck = self._stuck, {*filter(self._is_stuck_in_section, self._host.links)}
        is_due = bool(self._stuck - last)
        now = self._clock.now()
        is_still = between(self._still_since, now) >= min(STANDING, self._quiet)
        if not (is_due or is_still):
            return
        stands = any(reader.is_standing for reader in self.lateness.readers.values())
        pause = self._pause or (min(STANDING, self._quiet) if stands else self._quiet)
        since = self._still_since if self._asked_at is None else self._asked_at
        is_due |= self._last_blame is not None or now >= after(since, pause)
        if is_due and self._questions.ask(self._judge_answers):
            self._asked_at, self._pause = now, min(Duration(2 * pause), self._pause_max)

    def _ask_for_sample(self) -> None:
        """Ask now and then where what C++ begins is recorded, and less often if there is none."""
        now = self._clock.now()
        if not self._samples or now < after(self._sampled_at, self._sample_pause):
            return
        self._sampled_at = now
        if not self._is_holding() and self._questions.ask(lambda: None):
            was_used, self.lateness.has_cpp_calls = self.lateness.has_cpp_calls, False
            self._sample_pause = SAMPLE_PAUSE if was_used else Duration(2 * self._sample_pause)

    def _judge_answers(self) -> None:
        """Accuse whom the answers to two questions running have told of."""
        records = [self._without_haste(record) for record in self._call_records()]
        recorded = self._recorded_call_records(records)
        blame = find_blame(recorded, patience_is_over=False, issued_is_waiting=True)
        last, self._last_blame = self._last_blame, None
        if blame is None or not blame.is_certain:
            return
        if blame.identity == last:
            self._accuse(blame)
        else:
            self._last_blame = blame.identity

    def _doubt_past(self) -> None:
        """Ask what a call was that ranks seem to differ in, and less often if they agreed."""
        now = self._clock.now()
        if self.lateness.differ and not self._is_holding() and now >= self._doubts_from:
            self.lateness.differ, self._is_doubting = False, True
            self._doubts_from = after(now, self._doubt_pause)
            self._doubt_pause = min(Duration(2 * self._doubt_pause), SAMPLE_PAUSE)
            self._questions.ask(self._judge_past)

    def _judge_past(self) -> None:
        """Accuse who has called something else in a call that was carried out all the same."""
        self._is_doubting = False
        blame = None if self._is_holding() else find_past_disagreement(self._call_records())
        if blame is not None:
            self._accuse(blame)

    def _recorded_call_records(
        self, seen: Iterable[CallRecord], members: Collection[int] | None = None
    ) -> list[CallRecord]:
        """What ranks have told of their recorders since the present trouble began.

        Args:
            seen: the call records that they keep.
            members: the ranks that count as members of groups, if not those of this node.
        """
        local_rank_of = self._planner.ranks.local_rank
        ranks = frozenset(self.lateness.ranks) if members is None else members
        told = (
            (
                record,
                self._questions.answer_of(
                    local_rank_of(record.rank), is_alive=record.fate is Fate.LIVES
                ),
            )
            for record in seen
        )
        return [
            recorded_call_record(recorded, record, ranks)
            for record, recorded in told
            if recorded is not None
        ]

    def _accuse(self, blame: Blame) -> None:
        self._blame(self._blamed(blame))

    def _blamed(self, blame: Blame) -> RanksBlamed:
        ranks = self._planner.ranks
        blamed = tuple(ranks.local_rank(rank) for rank in blame.blamed)
        return RanksBlamed(blamed, self._attempt, blame.text, blame.blamed, blame.mismatch)

    def _call_records(self, *, with_empty: bool = False) -> list[CallRecord]:
        """What the ranks have entered.

        Args:
            with_empty: also call records of ranks that have entered nothing yet. They may never do,
                so they are accused only where patience is over: one that is still starting, say.
        """
        segment = self._planner.segment
        if segment is None or self._planner.variable(SWITCH_VARIABLE) == "0":
            return []
        first_rank = self._planner.ranks.rank(0)
        records = []
        for local_rank in sorted(self._host.links):
            record = read_call_record(segment, local_rank, first_rank)
            if record is None and with_empty:
                record = CallRecord(rank=first_rank + local_rank)
            if record is None:
                continue
            fate = self._fate_of(local_rank, record)
            told = self._questions.answer_of(local_rank, is_alive=fate is Fate.LIVES)
            if told is not None:
                record = with_library_numbers(record, told)
            records.append(msgspec.structs.replace(record, fate=fate))
        return records

    def _fate_of(self, local_rank: int, record: CallRecord) -> Fate:
        link = self._host.links[local_rank]
        error = self._host.errors.get(local_rank)
        if error is not None:
            return Fate.RAISED if may_be_of_others(error) else Fate.DIED
        if link.exit_code == 0:
            return Fate.LEFT
        if record.fate is Fate.LEFT:  # how it has died, if it has told, or was killed, tells more
            has_died = link.exiting is not None or (link.exit_code or 0) < 0
            return Fate.DIED if has_died else Fate.LEFT
        has_ended = link.process is not None and link.process.has_ended
        if link.exit_code is None and not has_ended:
            return record.fate
        # The limit of a section, or NCCL's, is a time-out: the rank waits in its call for ever.
        is_timed_out = self._is_stuck_in_section(local_rank) or self._is_ended_by_watchdog(
            local_rank
        )
        waited = is_timed_out and self._stands(local_rank, record)
        return Fate.LIVES if waited else Fate.DIED

    def _stands(self, local_rank: int, record: CallRecord) -> bool:
        told = self._questions.answer_of(local_rank, is_alive=True)
        return bool(
            record.standing
            or (told and recorded_call_record(told, record, self.lateness.ranks).standing)
        )
