"""What the behaviours of stores are written with."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Barrier, Thread
from typing import TypeVar

from rankwise.base.keys import Change, Committed, Put, Revision, Transaction, Unchanged
from rankwise.base.units import MILLISECOND, SECOND, Duration
from rankwise.ports.store import Store, Watch

PATIENCE = Duration(60 * SECOND)
"""How long anything may take before it counts as missing."""
INSTANTLY = Duration(20 * MILLISECOND)
HOURS = Duration(2 * 3600 * SECOND)
CLIENTS = 4

T = TypeVar("T")
Connect = Callable[[], Store]
Behaviour = Callable[[Connect, str], None]


def put(store: Store, key: str, value: bytes = b"") -> Revision:
    """Write a key; returns the revision."""
    result = store.commit(Transaction(puts=(Put(key, value),)))
    assert isinstance(result, Committed), "a transaction without conditions came to a conflict"
    return result.revision


def put_all(store: Store, *puts: Put) -> Revision:
    """Write several keys in one transaction; returns the revision."""
    result = store.commit(Transaction(puts=puts))
    assert isinstance(result, Committed)
    return result.revision


def put_if(key: str, revision: Revision, value: bytes) -> Transaction:
    """A transaction that writes a key if its revision is that one."""
    return Transaction(conditions=(Unchanged(key, revision),), puts=(Put(key, value),))


def watch_from_now(store: Store, prefix: str) -> Watch:
    """A watch that begins now."""
    return store.watch(prefix, store.read(prefix).revision)


def next_changes(watch: Watch) -> tuple[Change, ...]:
    """The next changes, which must come."""
    changes = watch.next(PATIENCE)
    assert changes, "a watch told nothing although something had changed"
    return changes


def changes_from(watch: Watch, count: int) -> list[Change]:
    """So many changes, and no more with them."""
    told: list[Change] = []
    while len(told) < count:
        told += next_changes(watch)
    assert len(told) == count
    return told


def woken_by(watch: Watch, close: Callable[[], None]) -> tuple[Change, ...]:
    """What a thread is told that waits in `watch` for ever, when `close` is called."""
    told: list[tuple[Change, ...]] = []
    waiting = Thread(target=lambda: told.append(watch.next(Duration(10 * PATIENCE))), daemon=True)
    waiting.start()
    close()
    waiting.join(PATIENCE / SECOND)
    assert told, "a thread goes on waiting in a watch that was closed"
    return told[0]


def assert_raises(kind: type[Exception], call: Callable[[], object]) -> None:
    """Assert that a call raises an exception of this kind."""
    try:
        call()
    except kind:
        return
    raise AssertionError(f"expected {kind.__name__}")


def all_at_once(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Make the calls in a thread each, all released at the same moment; their values in order."""
    waiting = list(calls)
    barrier = Barrier(len(waiting))

    def make(call: Callable[[], T]) -> T:
        barrier.wait(PATIENCE / SECOND)
        return call()

    with ThreadPoolExecutor(len(waiting)) as pool:
        return list(pool.map(make, waiting))


@contextmanager
def clients_of(connect: Connect) -> Iterator[list[Store]]:
    """Several clients of the store, closed at the end."""
    with ExitStack() as stack:
        yield [stack.enter_context(connect()) for _ in range(CLIENTS)]
