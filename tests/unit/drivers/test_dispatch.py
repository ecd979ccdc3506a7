"""What feeds an agent's effects to its node."""

from collections.abc import Callable, Sequence

from gangs import exited, spawned

from rankwise.base.failure import Failure, OutcomeStatus
from rankwise.base.units import Duration, Instant
from rankwise.core.agent.alone import spec_alone
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.vocabulary import (
    Announcement,
    AnnounceRestart,
    FailuresDescribed,
    RoundPrepared,
    Stimulus,
)
from rankwise.core.gang.vocabulary import AnnounceKill, GangSpec, Swept, WorkerRefused
from rankwise.core.rendezvous.configuration import RestartPolicy
from rankwise.core.rendezvous.vocabulary import CallRecordsWanted, InquiryAnswered, World
from rankwise.core.watch.vocabulary import LookOrder
from rankwise.drivers.agent_dispatch import AgentDispatch
from rankwise.drivers.virtual.agenda import VirtualClock
from rankwise.drivers.virtual.journal import MemoryJournal
from rankwise.drivers.virtual.story import read_journal

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

    def look_for_dumps(self, attempt: int) -> None:
        self.orders.append(("look for dumps", attempt))

    def dump_stacks(self, attempt: int) -> None:
        self.orders.append(("dump", attempt))

    def tell(self, local_rank: int, attempt: int, word: str) -> None:
        self.orders.append(("tell", local_rank, attempt, word))

    def sweep(self, attempt: int, spares: Sequence[int] = ()) -> None:
        assert not spares
        self.orders.append(("sweep", attempt))
        self.deliver(Swept(attempt))

    def prepare_round(self, number: int) -> None:
        self.deliver(RoundPrepared(number, 29500))

    def begin_attempt(self, world: World) -> None:
        self.orders.append(("begin", world.round))

    def ask_ranks_to_stop(self, number: int, signal: int | None) -> None:
        self.orders.append(("ask", number, signal))

    def stop_ranks_at(self, number: int, step: int) -> None:
        self.orders.append(("stop", number, step))

    def describe_failures(self, number: int, failures: tuple[Failure, ...]) -> None:
        self.deliver(FailuresDescribed(number, failures))

    def tell_call_records(self, wanted: CallRecordsWanted) -> None:
        raise AssertionError(f"a node that is alone was asked {wanted}")

    def look_at_ranks(self, order: LookOrder) -> None:
        raise AssertionError(f"no rank has made calls, and the host was asked {order}")

    def on_inquiry_answered(self, answered: InquiryAnswered) -> None:
        raise AssertionError(f"a node that is alone has asked nobody, and was told {answered}")


class Bench:
    """An agent, its dispatch, and everything that it talks to."""

    def __init__(self, spec: GangSpec, policy: RestartPolicy | None = None) -> None:
        self.clock = VirtualClock()
        self.host = EagerHost()
        self.journal = MemoryJournal()
        self.announced: list[Announcement] = []
        self.dispatch = AgentDispatch(
            Agent(spec_alone(spec, policy or RestartPolicy())),
            host=self.host,
            clock=self.clock,
            journal=self.journal,
            on_announcement=self.announced.append,
        )
        self.host.deliver = self.dispatch.deliver

    def journal_kinds(self) -> list[str]:
        entries = read_journal(self.journal.lines())
        return [type(entry.stimulus or entry.effect).__name__ for entry in entries]


def test_a_host_may_answer_from_within_an_order_and_is_heard_after_it() -> None:
    bench = Bench(GangSpec(size=2))

    bench.dispatch.start()

    assert bench.host.orders == [("begin", 0), ("spawn", 0, 0), ("spawn", 1, 0)]
    assert bench.journal_kinds() == [
        "AgentStarted",
        "PrepareRound",
        "RoundPrepared",
        "BeginAttempt",
        "SpawnWorker",
        "SpawnWorker",
        "WorkerSpawned",
        "WorkerSpawned",
    ]


def test_the_end_is_there_when_the_agent_has_finished() -> None:
    bench = Bench(GangSpec(size=1))
    bench.dispatch.start()
    assert bench.dispatch.finished is None

    bench.dispatch.deliver(exited(0))

    assert bench.dispatch.finished is not None
    assert bench.dispatch.finished.as_outcome().status is OutcomeStatus.SUCCEEDED
    assert bench.journal_kinds()[-3:] == ["Sweep", "Swept", "FinishRun"]


def test_a_tick_carries_out_what_a_deadline_demands_and_hears_the_answers() -> None:
    bench = Bench(GangSpec(size=1, hang_timeout=Duration(10)))
    bench.dispatch.start()
    assert bench.dispatch.next_deadline == 10

    bench.dispatch.wake()
    bench.clock.advance_to(Instant(10))
    bench.dispatch.wake()

    assert bench.host.orders[-1] == ("look", 0)


def test_announcements_reach_whoever_listens() -> None:
    bench = Bench(GangSpec(size=2, grace=Duration(0)), RestartPolicy(restarts_max=1))
    bench.dispatch.start()

    bench.dispatch.deliver(exited(0, 1))
    bench.dispatch.deliver(exited(1, -9))

    kinds = [type(announcement) for announcement in bench.announced]
    assert kinds[:2] == [AnnounceKill, AnnounceRestart]


def test_refusals_from_within_the_orders_do_not_cut_the_orders_short() -> None:
    bench = Bench(GangSpec(size=3))
    bench.host.refuses = True

    bench.dispatch.start()

    assert [order[0] for order in bench.host.orders] == ["begin", *["spawn"] * 3, "sweep"]
    assert bench.dispatch.finished is not None
    assert bench.dispatch.finished.as_outcome().status is OutcomeStatus.FAILED
