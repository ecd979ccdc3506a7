"""Looks into the call records of ranks, in virtual time: who is asked when, and who is accused."""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
from gangs import exited, running_gang

from rankwise.base.failure import ErrorRecord
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant, after
from rankwise.core.gang.vocabulary import RanksBlamed, WorkerReported
from rankwise.core.rendezvous.records import Trouble
from rankwise.core.watch.machine import ExitWatch
from rankwise.core.watch.vocabulary import (
    AskRanks,
    CallsBegan,
    JudgeCalls,
    LookAtEnd,
    LookAtPast,
    Passed,
    PassOn,
    RanksAnswered,
    WatchEffect,
    WatchSpec,
    WatchStimulus,
)
from rankwise.drivers.real.call_rings import read_call_record
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.reactor import ReactorTimer
from rankwise.drivers.real.report_pipe import Exiting, Recorded, ReportedGroup
from rankwise.drivers.real.segments import LEDGER_SECTION_STUCK, LEDGER_WORDS, Segment
from rankwise.drivers.real.worker import call_ring
from rankwise.drivers.real.worker.call_ring import (
    DONE,
    FAILED,
    CallRing,
    RingGroup,
    signature_text,
    stamp_of,
)
from rankwise.drivers.virtual.agenda import VirtualClock
from rankwise.launch.looking.call_watch import CallWatch
from rankwise.launch.run.node_ranks import NodeRanks

SIZE = 4
LOST_PEER = "Connection closed by peer"


class Timers:
    """The part of a reactor that a watch needs, in virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._timers: list[tuple[Instant, int, ReactorTimer]] = []
        self._sequence = count()

    def call_at(self, instant: Instant, callback: Callable[[], object]) -> ReactorTimer:
        timer = ReactorTimer(instant, callback)
        heappush(self._timers, (instant, next(self._sequence), timer))
        return timer

    def run_for(self, duration: Duration) -> None:
        until = after(self._clock.now(), duration)
        while self._timers and self._timers[0][0] <= until:
            instant, _, timer = heappop(self._timers)
            self._clock.advance_to(max(instant, self._clock.now()))
            timer.fire()
        self._clock.advance_to(until)


class World:
    """Ranks that enter calls in their call records, and the watch that looks into these."""

    def __init__(self, segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = VirtualClock()
        self.clock.advance_to(SystemClock().now())
        self.timers = Timers(self.clock)
        self.links = {
            rank: SimpleNamespace(
                attempt=0, is_over=False, exit_code=None, has_raised=False, exiting=None,
                process=None, recorder_thread=0,
            )
            for rank in range(SIZE)
        }  # fmt: skip
        self.errors: dict[int, ErrorRecord] = {}
        self.asked_at: list[Instant] = []
        self.let_go_at: list[Instant] = []
        self.is_holding = False
        self._due: set[Instant] = set()
        self.blamed: list[RanksBlamed] = []
        self.troubles: list[Trouble] = []
        self._segment = segment
        self.rings = [self._ring(rank, monkeypatch) for rank in range(SIZE)]
        planner = SimpleNamespace(
            segment=segment,
            ranks=NodeRanks(size=SIZE, master_addr="localhost", master_port=1),
            variable=lambda _: None,
        )
        self.watch = CallWatch(
            cast("Any", self),
            cast("Any", planner),
            cast("Any", self.timers),
            self.clock,
            blame=self.blamed.append,
            ask_nodes=self._ask_nodes,
            is_holding=lambda: self.exits.awaits_answers,
            hang_timeout=None,
            on_cpp_calls=None,
        )
        self.exits = ExitWatch(WatchSpec(), grace=Duration(SECOND), hang_timeout=None)
        self.exits.gang = running_gang(SIZE)
        self.watch.begin()
        self.tell(CallsBegan(0))

    def _ask_nodes(self, trouble: Trouble) -> bool:
        self.troubles.append(trouble)
        return False

    def tell(self, stimulus: WatchStimulus) -> None:
        """Tell the exit watch a fact, and carry out what it orders, as an agent and a host do."""
        self._carry_out(self.exits.handle(stimulus, self.clock.now()))

    def _carry_out(self, effects: list[WatchEffect]) -> None:
        for effect in effects:
            match effect:
                case PassOn(RanksBlamed() as blamed):
                    self.blamed.append(blamed)
                case LookAtEnd():
                    self.tell(self.watch.look_at_end(effect))
                case LookAtPast():
                    self.tell(self.watch.look_at_past(effect))
                case JudgeCalls():
                    self.tell(self.watch.judge(effect))
                case AskRanks():
                    self.watch.ask_for_hold(lambda asked: self.tell(RanksAnswered(0, asked)))
                case _:
                    pass
        if self.is_holding and self.exits.hold is None:
            self.is_holding = False
            self.let_go_at.append(self.clock.now())
        if self.exits.awaits_gang:
            self.tell(Passed())
        due = self.exits.next_deadline
        if due is not None and due not in self._due:
            self._due.add(due)
            self.timers.call_at(due, lambda: self._carry_out(self.exits.tick(self.clock.now())))

    @staticmethod
    def _ring(rank: int, monkeypatch: pytest.MonkeyPatch) -> CallRing:
        monkeypatch.setenv("RANKWISE_LOCAL_RANK", str(rank))
        monkeypatch.setenv("RANK", str(rank))
        call_ring.forget_ring()
        ring = call_ring.ring_of_process()
        assert ring is not None
        return ring

    def ask_recorders(self, _: int) -> frozenset[int]:
        """Ranks can be asked, and none of them answers."""
        self.asked_at.append(self.clock.now())
        return frozenset(self.links)

    def group(self, label: str, members: tuple[int, ...]) -> dict[int, RingGroup]:
        found = {
            rank: self.rings[rank].add_group(label, label, len(members), members)
            for rank in members
        }
        return {rank: group for rank, group in found.items() if group is not None}

    def begin_call(self, rank: int, group: RingGroup) -> int:
        stamp = stamp_of(group, 1, "barrier", ("train.py", 7))
        return self.rings[rank].begin(group, stamp)

    def call(self, rank: int, group: RingGroup) -> None:
        self.rings[rank].end(self.begin_call(rank, group), DONE)

    def call_together(self, groups: dict[int, RingGroup], text: dict[int, str]) -> None:
        """All ranks are in one call at one time, each by its own words; it is carried out."""
        entries = {
            rank: self.rings[rank].begin(
                group, stamp_of(group, len(text[rank]), text[rank], ("train.py", 7))
            )
            for rank, group in groups.items()
        }
        for rank, entry in entries.items():
            self.rings[rank].end(entry, DONE)

    def end_well(self, rank: int) -> None:
        """A rank tells its last words, what the recorder had, and ends with exit code 0."""
        segment, ring = self._segment, self.rings[rank]
        record = read_call_record(segment, rank, 0)
        assert record is not None
        sample = tuple((call.number, call.begun_at, call.number - 1) for call in record.calls)
        called = (call.signature for call in record.calls)
        signatures = tuple((each.operation, each.reduction, -1, ()) for each in called)
        told = ReportedGroup("all", "", tuple(self.links), (), sample, signatures)
        self.watch.on_recorded(rank, Recorded(-1, (told,)))
        ring.be_done(is_over=True)
        self.links[rank].is_over, self.links[rank].exit_code = True, 0
        exit_ = exited(rank, 0)
        self.tell(exit_)
        assert self.exits.gang is not None
        self.exits.gang.handle(exit_, self.clock.now())

    def let_section_be_over(self, rank: int) -> None:
        self._segment.ledgers[rank * LEDGER_WORDS + LEDGER_SECTION_STUCK] = 1

    def let_fail(self, rank: int, entry: int) -> bool:
        """A call of a rank raises that a peer has gone; whether news are held back."""
        self.rings[rank].end(entry, FAILED)
        now = self.clock.now()
        error = ErrorRecord(
            type="RuntimeError", message=LOST_PEER, traceback="", raised_at=now, wall_ns=0
        )
        self.links[rank].has_raised, self.errors[rank] = True, error
        self.is_holding = True
        self.tell(WorkerReported(rank, 0, error))
        return self.is_holding


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with Segment.create(SIZE) as segment:
        monkeypatch.setenv("RANKWISE_SEGMENT_FD", str(segment.fd))
        monkeypatch.delenv("RANKWISE_LEDGER", raising=False)
        yield World(segment, monkeypatch)
        call_ring.forget_ring()


def test_ranks_are_asked_when_a_sections_limit_is_over_though_others_go_on(world: World) -> None:
    stuck, busy = world.group("stuck", (0, 1)), world.group("busy", (2, 3))
    world.begin_call(0, stuck[0])
    for step in range(8):
        for rank in busy:
            world.call(rank, busy[rank])
        if step == 4:
            world.let_section_be_over(0)
        world.timers.run_for(Duration(500 * MILLISECOND))

    assert len(world.asked_at) == 1
    assert world.blamed == []


@pytest.mark.parametrize(
    ("stuck", "blamed"), [(0, []), (2, [(3,)])], ids=["of no common call", "a peer"]
)
def test_a_lost_connection_tells_that_patience_is_over_if_a_peers_section_is(
    stuck: int, blamed: list[tuple[int, ...]], world: World
) -> None:
    members = world.group("all", (1, 2, 3))
    for rank in members:
        world.call(rank, members[rank])
    world.begin_call(2, members[2])
    entry = world.begin_call(1, members[1])
    world.let_section_be_over(stuck)

    world.let_fail(1, entry)
    world.timers.run_for(Duration(5 * SECOND))

    assert [each.local_ranks for each in world.blamed] == blamed


@pytest.mark.parametrize(
    ("is_over", "end", "blamed", "within"),
    [
        (False, {"exiting": Exiting(3, 1)}, [], 1000),
        (False, {"exit_code": -11}, [], 1000),
        (False, {"exit_code": 3}, [(2,)], 1000),
        (False, {}, [(2,)], 2000),
        (True, {}, [(2,)], 600),
    ],
    ids=["tells that it fails", "crashes", "ends without a word", "lives on", "has ended well"],
)
def test_a_rank_that_has_destroyed_its_groups_may_tell_what_it_dies_of(
    is_over: bool,
    end: dict[str, object],
    blamed: list[tuple[int, ...]],
    within: int,
    world: World,
) -> None:
    members = world.group("all", (1, 2))
    for rank in members:
        world.call(rank, members[rank])
    entry = world.begin_call(1, members[1])
    world.rings[2].be_done(is_over=is_over)

    assert world.let_fail(1, entry)
    world.timers.run_for(Duration(100 * MILLISECOND))
    for name, value in end.items():
        setattr(world.links[2], name, value)
    world.timers.run_for(Duration(within * MILLISECOND))

    assert [each.local_ranks for each in world.blamed] == blamed
    assert len(world.let_go_at) == 1


def test_run_that_ends_before_the_answer_is_judged_by_the_ranks_last_words(world: World) -> None:
    groups = world.group("all", tuple(range(SIZE)))
    calls = dict.fromkeys(range(SIZE), signature_text("all_reduce", "sum")) | {
        1: signature_text("all_reduce", "product")
    }
    world.call_together(groups, calls)

    world.timers.run_for(Duration(600 * MILLISECOND))  # a look finds that they differ, and asks
    for rank in range(SIZE):
        world.end_well(rank)

    assert world.asked_at
    assert [blame.accused for blame in world.blamed] == [(1,)]


def test_two_looks_that_blame_for_two_groups_in_one_sentence_do_not_agree(world: World) -> None:
    groups = [
        {rank: world.rings[rank].add_group(key, "dp", 2, (0, 1)) for rank in (0, 1)}
        for key in ("first", "second")
    ]
    alone = world.group("alone", (2, 3))
    world.begin_call(2, alone[2])  # who stands for a while is why the others are looked at

    entries = disagree(world, groups[0])
    world.timers.run_for(Duration(1 * SECOND))
    for rank, entry in entries.items():
        world.rings[rank].end(entry, DONE)
    disagree(world, groups[1])
    world.timers.run_for(Duration(3 * SECOND))
    after_one = [each.accused for each in world.blamed]
    world.timers.run_for(Duration(1 * SECOND))

    assert after_one == []
    assert [each.accused for each in world.blamed] == [(0, 1)]


def disagree(world: World, groups: dict[int, RingGroup | None]) -> dict[int, int]:
    """Two ranks come to one call with different things, and stand in it."""
    return {
        rank: world.rings[rank].begin(
            group, stamp_of(group, rank, ("barrier", "all_reduce")[rank], ("train.py", 7))
        )
        for rank, group in groups.items()
    }
