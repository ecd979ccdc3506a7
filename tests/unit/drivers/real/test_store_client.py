"""The store client: orders go out to a store, and answers come back in the reactor's thread."""

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from rankwise.base.errors import StoreRefused, StoreUnavailable
from rankwise.base.keys import (
    ABSENT,
    Change,
    Conflict,
    Entry,
    LeaseId,
    Put,
    Revision,
    Snapshot,
    Transaction,
    Unchanged,
)
from rankwise.base.units import SECOND, Duration, after
from rankwise.core.rendezvous.vocabulary import (
    Answer,
    Commit,
    EndWatch,
    GrantLease,
    KeysChanged,
    KeysRead,
    LeaseEnded,
    LeaseGranted,
    LeaseRenewed,
    LeaseRevoked,
    Order,
    ReadKeys,
    RenewLease,
    RequestFailed,
    RevokeLease,
    StoreDenied,
    TransactionCommitted,
    TransactionConflicted,
    WatchLost,
)
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.reactor import Reactor
from rankwise.drivers.real.store_client import StoreClient
from rankwise.drivers.real.stores.in_process import MemoryClient, MemoryStore
from rankwise.ports.store import Watch

AnswerT = TypeVar("AnswerT", bound=Answer)
PATIENCE = Duration(60 * SECOND)


class Agent:
    """A reactor with a store client, run until an answer comes."""

    def __init__(self, store: MemoryClient, request_timeout: Duration = PATIENCE) -> None:
        self.clock = SystemClock()
        self.reactor = Reactor(self.clock)
        self.answers: list[Answer] = []
        self.threads: set[str] = set()
        self.client = StoreClient(
            store,
            reactor=self.reactor,
            clock=self.clock,
            deliver=self._take,
            request_timeout=request_timeout,
        )

    def ask(self, order: Order, kind: type[AnswerT]) -> AnswerT:
        self.client.submit(order)
        return self.wait_for(kind)

    def wait_for(self, kind: type[AnswerT]) -> AnswerT:
        self.wait_until(lambda: bool(self.answers))
        answer = self.answers.pop(0)
        assert isinstance(answer, kind), answer
        return answer

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        deadline = after(self.clock.now(), PATIENCE)
        while not is_true():
            assert self.clock.now() < deadline, "no answer came"
            self.reactor.run_once(deadline)

    def close(self) -> None:
        self.client.close()
        self.reactor.close()

    def _take(self, answer: Answer) -> None:
        self.threads.add(threading.current_thread().name)
        self.answers.append(answer)


@pytest.fixture
def shared() -> MemoryStore:
    return MemoryStore(SystemClock(), history_max=3)


@pytest.fixture
def agent(shared: MemoryStore) -> Iterator[Agent]:
    agent = Agent(shared.connect())
    yield agent
    agent.close()


def put(key: str, lease: LeaseId | None = None) -> Transaction:
    return Transaction(puts=(Put(key, b"", lease),))


def test_every_order_is_answered_with_its_token(agent: Agent) -> None:
    taken = Transaction(conditions=(Unchanged("a", ABSENT),), puts=(Put("a", b""),))

    assert agent.ask(Commit(1, taken), TransactionCommitted) == TransactionCommitted(1, Revision(1))
    conflicted = agent.ask(Commit(2, taken), TransactionConflicted)
    assert conflicted == TransactionConflicted(2, Revision(1))
    read = agent.ask(ReadKeys(3, "a"), KeysRead)
    assert read == KeysRead(3, Snapshot((Entry("a", b"", Revision(1)),), Revision(1)))
    lease = agent.ask(GrantLease(4, PATIENCE), LeaseGranted).lease
    assert agent.ask(RenewLease(5, lease), LeaseRenewed) == LeaseRenewed(5)
    assert agent.ask(RevokeLease(6, lease), LeaseRevoked) == LeaseRevoked(6)
    assert agent.ask(RenewLease(7, lease), LeaseEnded) == LeaseEnded(7)
    assert agent.ask(Commit(8, put("b", lease)), LeaseEnded) == LeaseEnded(8)


def test_answers_are_delivered_in_the_thread_of_the_reactor(agent: Agent) -> None:
    agent.ask(ReadKeys(1, "", watch=2), KeysRead)
    agent.client.submit(Commit(3, put("a")))
    agent.wait_until(lambda: len(agent.answers) == 2)

    # The watch has a thread of its own, and may be the quicker one.
    assert {type(answer) for answer in agent.answers} == {TransactionCommitted, KeysChanged}
    assert agent.threads == {threading.current_thread().name}


def test_a_watch_tells_until_it_is_ended(agent: Agent, shared: MemoryStore) -> None:
    with shared.connect() as other:
        read = agent.ask(ReadKeys(6, "a", watch=7), KeysRead)
        other.commit(put("a"))
        told = agent.wait_for(KeysChanged)
        agent.client.submit(EndWatch(7))
        other.commit(put("a"))
        agent.ask(ReadKeys(8, ""), KeysRead)

    assert read == KeysRead(6, Snapshot((), Revision(0)), 7)
    assert told == KeysChanged(7, (Change("a", b"", Revision(1)),))
    assert agent.answers == []


class HurryingStore(MemoryClient):
    """A store in which much happens as soon as a watch has begun."""

    def follow(self, prefix: str) -> tuple[Snapshot, Watch]:
        followed = super().follow(prefix)
        for _ in range(5):
            self.commit(put("a"))
        return followed


def test_a_watch_that_lags_behind_is_told_to_be_lost(shared: MemoryStore) -> None:
    agent = Agent(HurryingStore(shared))

    read = agent.ask(ReadKeys(1, "", watch=2), KeysRead)
    lost = agent.wait_for(WatchLost)
    agent.close()

    assert (read.watch, lost.token) == (2, 2)
    assert "forgotten" in lost.reason


def test_closing_ends_every_thread_and_delivers_nothing_more(shared: MemoryStore) -> None:
    before = set(threading.enumerate())
    agent = Agent(shared.connect())
    agent.ask(ReadKeys(1, "", watch=2), KeysRead)
    agent.ask(ReadKeys(4, "", watch=3), KeysRead)
    agent.client.submit(EndWatch(3))

    agent.client.close()

    assert set(threading.enumerate()) <= before
    agent.client.submit(ReadKeys(4, ""))
    agent.close()
    assert agent.answers == []


class SlowStore(MemoryClient):
    """A store whose reads take until they are let go."""

    def __init__(self, shared: MemoryStore) -> None:
        super().__init__(shared)
        self.is_reading = threading.Event()
        self.go_on = threading.Event()

    def read(self, prefix: str) -> Snapshot:
        self.is_reading.set()
        assert self.go_on.wait(60)
        return super().read(prefix)


def test_renewals_wait_for_nothing_else(shared: MemoryStore) -> None:
    store = SlowStore(shared)
    lease = store.grant_lease(PATIENCE)
    agent = Agent(store)
    agent.client.submit(ReadKeys(1, ""))
    assert store.is_reading.wait(60)
    agent.client.submit(Commit(2, put("a")))

    assert agent.ask(RenewLease(3, lease), LeaseRenewed) == LeaseRenewed(3)
    store.go_on.set()
    agent.wait_until(lambda: len(agent.answers) == 2)
    agent.close()

    assert [type(answer) for answer in agent.answers] == [KeysRead, TransactionCommitted]


def test_what_has_waited_for_too_long_is_not_tried(shared: MemoryStore) -> None:
    store = SlowStore(shared)
    agent = Agent(store, request_timeout=Duration(1))
    agent.client.submit(Commit(1, put("a")))
    failed = agent.wait_for(RequestFailed)
    agent.close()

    assert failed.token == 1
    assert "kept the store busy" in failed.reason
    assert shared.keyspace.revision == 0


class FailingStore(MemoryClient):
    def __init__(self, shared: MemoryStore, error: Exception) -> None:
        super().__init__(shared)
        self._error = error

    def commit(self, transaction: Transaction) -> Conflict:  # noqa: ARG002
        raise self._error


def test_a_store_that_does_not_answer_fails_the_request(shared: MemoryStore) -> None:
    agent = Agent(FailingStore(shared, StoreUnavailable("tried b:2 for 2 s", hint="look at b")))

    failed = agent.ask(Commit(1, put("a")), RequestFailed)
    agent.close()

    assert failed == RequestFailed(1, "tried b:2 for 2 s (look at b)")


def test_a_store_that_refuses_is_told_with_its_hint(shared: MemoryStore) -> None:
    agent = Agent(FailingStore(shared, StoreRefused("wrong password", hint="give another")))

    denied = agent.ask(Commit(1, put("a")), StoreDenied)
    agent.close()

    assert denied == StoreDenied(1, "wrong password", "give another")


def test_what_no_store_should_raise_is_raised_in_the_reactor(shared: MemoryStore) -> None:
    agent = Agent(FailingStore(shared, ZeroDivisionError("a bug")))
    agent.client.submit(Commit(1, put("a")))

    with pytest.raises(ZeroDivisionError, match="a bug"):
        agent.wait_for(RequestFailed)
    agent.close()


class LosesTheFirst(MemoryClient):
    """A store whose first renewal comes back when it is closed."""

    def __init__(self, shared: MemoryStore) -> None:
        super().__init__(shared)
        self.is_lost = threading.Event()
        self._closed = threading.Event()

    def renew_lease(self, lease: LeaseId) -> None:
        if not self.is_lost.is_set():
            self.is_lost.set()
            self._closed.wait()
            raise StoreUnavailable("closed")
        super().renew_lease(lease)

    def close(self) -> None:
        self._closed.set()
        super().close()


def test_a_lease_is_renewed_though_a_renewal_before_does_not_come_back(shared: MemoryStore) -> None:
    store = LosesTheFirst(shared)
    agent = Agent(store)
    lease = store.grant_lease(PATIENCE)
    agent.client.submit(RenewLease(1, lease))
    assert store.is_lost.wait(60)

    assert agent.ask(RenewLease(2, lease), LeaseRenewed) == LeaseRenewed(2)
    agent.close()
