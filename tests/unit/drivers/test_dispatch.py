"""What feeds a gang's effects to a process host."""

from collections.abc import Callable

from rankwise.base.failure import OutcomeStatus
from rankwise.base.units import Duration, Instant
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.vocabulary import (
    AnnounceKill,
    AnnounceRestart,
    GangSpec,
    Started,
    Stimulus,
    Swept,
    WorkerRefused,
)
from rankwise.drivers.dispatch import Announcement, GangDispatch
from rankwise.drivers.sim.agenda import VirtualClock
from rankwise.drivers.sim.journal import MemoryJournal
from rankwise.drivers.sim.story import read_journal
from rankwise.testing.gangs import exited, spawned

Deliver = Callable[[Stimulus], None]


class EagerHost:
    """Writes down its orders; answers from within an order where it has an answer."""

    def __init__(self) -> None:
        self.orders: list[tuple[object, ...]] = []
        self.deliver: Deliver = lambda _: None
        self.refuses = False

    def spawn(self, local_rank: int, attempt: int) -> None:
        self.orders.append(("spawn", local_rank, attempt))
        if self.refuses:
            self.deliver(WorkerRefused(local_rank, attempt, "no"))
        else:
            self.deliver(spawned(local_rank, attempt))

    def signal(self, local_rank: int, attempt: int, signal: int) -> None:
        self.orders.append(("signal", local_rank, attempt, signal))

    def look_for_progress(self, attempt: int) -> None:
        self.orders.append(("look", attempt))

    def dump_stacks(self, attempt: int) -> None:
        self.orders.append(("dump", attempt))

    def sweep(self, attempt: int) -> None:
        self.orders.append(("sweep", attempt))
        self.deliver(Swept(attempt))


class Bench:
    """A gang, its dispatch, and everything that it talks to."""

    def __init__(self, spec: GangSpec) -> None:
        self.clock = VirtualClock()
        self.host = EagerHost()
        self.journal = MemoryJournal()
        self.announced: list[Announcement] = []
        self.dispatch = GangDispatch(
            Gang(spec), self.host, self.clock, self.journal, self.announced.append
        )
        self.host.deliver = self.dispatch.deliver

    def journal_kinds(self) -> list[str]:
        entries = read_journal(self.journal.lines())
        return [type(entry.stimulus or entry.effect).__name__ for entry in entries]


def test_a_host_may_answer_from_within_an_order_and_is_heard_after_it() -> None:
    bench = Bench(GangSpec(size=2))

    bench.dispatch.deliver(Started())

    assert bench.host.orders == [("spawn", 0, 0), ("spawn", 1, 0)]
    assert bench.journal_kinds() == [
        "Started",
        "SpawnWorker",
        "SpawnWorker",
        "WorkerSpawned",
        "WorkerSpawned",
    ]


def test_the_outcome_is_there_when_the_gang_has_finished() -> None:
    bench = Bench(GangSpec(size=1))
    bench.dispatch.deliver(Started())
    assert bench.dispatch.outcome is None

    bench.dispatch.deliver(exited(0))

    assert bench.dispatch.outcome is not None
    assert bench.dispatch.outcome.status is OutcomeStatus.SUCCEEDED
    assert bench.journal_kinds()[-3:] == ["Sweep", "Swept", "Finish"]


def test_a_tick_carries_out_what_a_deadline_demands_and_hears_the_answers() -> None:
    bench = Bench(GangSpec(size=1, hang_timeout=Duration(10)))
    bench.dispatch.deliver(Started())
    assert bench.dispatch.next_deadline == 10

    bench.dispatch.tick()
    bench.clock.advance_to(Instant(10))
    bench.dispatch.tick()

    assert bench.host.orders[-1] == ("look", 0)


def test_announcements_reach_whoever_listens() -> None:
    bench = Bench(GangSpec(size=2, restarts_max=1, grace=Duration(0)))
    bench.dispatch.deliver(Started())

    bench.dispatch.deliver(exited(0, 1))
    bench.dispatch.deliver(exited(1, -9))

    assert [type(announcement) for announcement in bench.announced] == [
        AnnounceKill,
        AnnounceRestart,
    ]


def test_refusals_from_within_the_orders_do_not_cut_the_orders_short() -> None:
    bench = Bench(GangSpec(size=3))
    bench.host.refuses = True

    bench.dispatch.deliver(Started())

    assert [order[0] for order in bench.host.orders] == ["spawn"] * 3 + ["sweep"]
    assert bench.dispatch.outcome is not None
    assert bench.dispatch.outcome.status is OutcomeStatus.FAILED
