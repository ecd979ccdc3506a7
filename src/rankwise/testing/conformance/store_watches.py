"""What every store must tell of changes."""

from contextlib import closing
from threading import Thread

from rankwise.base.errors import StoreUnavailable
from rankwise.base.keys import Change, Entry, Put, Transaction
from rankwise.testing.conformance.store_calls import (
    INSTANTLY,
    PATIENCE,
    Connect,
    assert_raises,
    changes_from,
    next_changes,
    put,
    watch_from_now,
    woken_by,
)


def a_watch_tells_every_change_in_order(connect: Connect, prefix: str) -> None:
    """Puts and deletes of any client, under its prefix alone, beginning after its revision."""
    key = prefix + "in/a"
    with connect() as writer, connect() as watcher:
        put(writer, key, b"before")
        revision = watcher.read(prefix).revision
        with closing(watcher.watch(prefix + "in/", revision)) as watch:
            first = put(writer, key, b"1")
            put(writer, prefix + "out", b"x")
            deleted = writer.commit(Transaction(deletes=(key,)))
            last = put(writer, key, b"2")
            told = changes_from(watch, 3)

    assert told == [
        Change(key, b"1", first),
        Change(key, None, deleted.revision),
        Change(key, b"2", last),
    ]


def a_watch_may_begin_in_the_past(connect: Connect, prefix: str) -> None:
    """It tells what has happened since, and goes on with what happens then."""
    with connect() as store:
        start = put(store, prefix + "a", b"0")
        put(store, prefix + "a", b"1")
        put(store, prefix + "a", b"2")
        with closing(store.watch(prefix, start)) as watch:
            told = changes_from(watch, 2)
            put(store, prefix + "a", b"3")
            told += changes_from(watch, 1)

    assert [change.value for change in told] == [b"1", b"2", b"3"]


def following_reads_and_tells_what_comes_later(connect: Connect, prefix: str) -> None:
    """Every change is either in the snapshot or told, and none is both."""
    with connect() as store, connect() as writer:
        before = put(writer, prefix + "a", b"0")
        snapshot, watch = store.follow(prefix)
        with closing(watch):
            put(writer, prefix + "a", b"1")
            put(writer, prefix + "b", b"2")
            told = changes_from(watch, 2)

    assert snapshot.entries == (Entry(prefix + "a", b"0", before),)
    assert [change.value for change in told] == [b"1", b"2"]


def following_misses_nothing_while_others_write(connect: Connect, prefix: str) -> None:
    """The same, in the midst of changes."""
    count = 60
    with connect() as store, connect() as writer:

        def write() -> None:
            for number in range(count):
                put(writer, prefix + "a", str(number).encode())

        thread = Thread(target=write)
        thread.start()
        snapshot, watch = store.follow(prefix)
        with closing(watch):
            seen = [int(entry.value) for entry in snapshot.entries]
            while (seen[-1] if seen else -1) < count - 1:
                seen += [int(change.value or b"") for change in next_changes(watch)]
        thread.join()

    assert seen == list(range(seen[0], count))


def the_changes_of_a_transaction_come_together(connect: Connect, prefix: str) -> None:
    """One answer of the watch holds all of them."""
    keys = [f"{prefix}{number:02}" for number in range(30)]
    with connect() as store, closing(watch_from_now(store, prefix)) as watch:
        store.commit(Transaction(puts=tuple(Put(key, b"x") for key in keys)))
        told = next_changes(watch)

    assert sorted(change.key for change in told) == keys
    assert len({change.revision for change in told}) == 1


def a_watch_tells_nothing_when_nothing_happens(connect: Connect, prefix: str) -> None:
    """It comes back empty when its patience is over, and is as good as before."""
    with connect() as store, closing(watch_from_now(store, prefix)) as watch:
        nothing = watch.next(INSTANTLY)
        put(store, prefix + "a")
        told = changes_from(watch, 1)

    assert nothing == ()
    assert [change.key for change in told] == [prefix + "a"]


def closing_a_watch_wakes_who_waits(connect: Connect, prefix: str) -> None:
    """The wait ends with nothing, and so does every later one; other watches go on."""
    with connect() as store:
        revision = store.read(prefix).revision
        closing, staying = store.watch(prefix, revision), store.watch(prefix, revision)
        told = woken_by(closing, closing.close)
        put(store, prefix + "a")
        later_changes = closing.next(PATIENCE)
        others = changes_from(staying, 1)

    assert told == ()
    assert later_changes == ()
    assert len(others) == 1


def closing_a_store_wakes_who_waits(connect: Connect, prefix: str) -> None:
    """Its watches end with it, and calls tell that it is closed; closing twice is harmless."""
    store = connect()
    watch = watch_from_now(store, prefix)
    told = woken_by(watch, store.close)
    store.close()

    assert told == ()
    assert_raises(StoreUnavailable, lambda: store.read(prefix))
    assert_raises(
        StoreUnavailable, lambda: store.commit(Transaction(puts=(Put(prefix + "a", b""),)))
    )
