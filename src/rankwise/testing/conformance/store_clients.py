"""What must hold of every store while many clients and threads use it."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event

from rankwise.base.keys import ABSENT, Committed, Put, Transaction
from rankwise.base.units import SECOND
from rankwise.ports.store import Store
from rankwise.testing.conformance.store_calls import (
    CLIENTS,
    INSTANTLY,
    PATIENCE,
    Connect,
    all_at_once,
    changes_from,
    clients_of,
    next_changes,
    put,
    put_if,
    watch_from_now,
)


def one_of_many_wins_a_key(connect: Connect, prefix: str) -> None:
    """Exactly one."""
    key = prefix + "leader"

    def take(store: Store, name: bytes) -> bool:
        return isinstance(store.commit(put_if(key, ABSENT, name)), Committed)

    with clients_of(connect) as stores:
        names = [b"%d" % number for number in range(len(stores))]
        won = all_at_once(
            [partial(take, store, name) for store, name in zip(stores, names, strict=True)]
        )
        (entry,) = stores[0].read(prefix).entries

    assert sum(won) == 1
    assert entry.value == names[won.index(True)]


def counting_together_loses_no_step(connect: Connect, prefix: str) -> None:
    """Read, put if unchanged, and again after a conflict: every step counts, once."""
    key = prefix + "count"
    steps = 10

    def count(store: Store) -> None:
        for _ in range(steps):
            while True:
                (entry,) = store.read(key).entries
                value = b"%d" % (int(entry.value) + 1)
                if isinstance(store.commit(put_if(key, entry.revision, value)), Committed):
                    break

    with clients_of(connect) as stores:
        put(stores[0], key, b"0")
        all_at_once([partial(count, store) for store in stores])
        (entry,) = stores[0].read(key).entries

    assert int(entry.value) == steps * CLIENTS


def a_watch_misses_nothing_under_load(connect: Connect, prefix: str) -> None:
    """Everything from every writer, each writer's in its order, revisions never going back."""
    steps = 40

    def write(store: Store, name: str) -> None:
        for step in range(steps):
            put(store, f"{prefix}{name}", b"%d" % step)

    with clients_of(connect) as stores, connect() as watcher:
        watch = watch_from_now(watcher, prefix)
        names = [f"writer-{number}" for number in range(len(stores))]
        with ThreadPoolExecutor(1) as pool:
            telling = pool.submit(changes_from, watch, steps * len(stores))
            all_at_once([partial(write, s, n) for s, n in zip(stores, names, strict=True)])
            told = telling.result()
        more = watch.next(INSTANTLY)

    assert more == ()
    revisions = [change.revision for change in told]
    assert revisions == sorted(set(revisions))
    for name in names:
        values = [change.value for change in told if change.key == prefix + name]
        assert values == [b"%d" % step for step in range(steps)]


def a_snapshot_and_the_watch_after_it_leave_no_gap(connect: Connect, prefix: str) -> None:
    """What was read, changed by what is told, is what is there in the end."""
    steps = 40
    begun = Event()

    def write(store: Store) -> None:
        for step in range(steps):
            put(store, f"{prefix}{step % 7}", b"%d" % step)
            if step == 10:
                begun.set()
        store.commit(Transaction(puts=(Put(prefix + "done", b""),), deletes=(prefix + "3",)))

    with connect() as writer, connect() as watcher, ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write, writer)
        begun.wait(PATIENCE / SECOND)
        snapshot = watcher.read(prefix)
        mirror: dict[str, bytes] = {entry.key: entry.value for entry in snapshot.entries}
        watch = watcher.watch(prefix, snapshot.revision)
        while prefix + "done" not in mirror:
            for change in next_changes(watch):
                if change.value is None:
                    mirror.pop(change.key)
                else:
                    mirror[change.key] = change.value
        writing.result()
        there = {entry.key: entry.value for entry in watcher.read(prefix).entries}

    assert mirror == there


def many_threads_may_share_a_client(connect: Connect, prefix: str) -> None:
    """Also while one of them waits in a watch."""
    with connect() as store:
        watch = watch_from_now(store, prefix)
        with ThreadPoolExecutor(1) as pool:
            telling = pool.submit(changes_from, watch, 8)
            all_at_once([partial(put, store, f"{prefix}{n}") for n in range(8)])
            told = telling.result()

    assert sorted(change.key for change in told) == [f"{prefix}{number}" for number in range(8)]
