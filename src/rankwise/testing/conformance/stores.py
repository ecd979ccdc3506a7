"""What every store must do, so that nodes meet alike in all of them.

A behaviour is a function that takes a way to *connect* (each call opens one more client of the same
store) and a prefix of its own, under which no other client writes; so one store serves all of them,
one after another, and may hold other keys. Real stores are slow on a busy machine: each wait here
is for an event, with a patience that is far away from everything that must not be missed.
"""

import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from threading import Barrier, Event, Thread
from time import monotonic_ns
from typing import TypeVar

from rankwise.base.errors import LeaseLost, StoreUnavailable
from rankwise.base.keys import (
    ABSENT,
    Change,
    Committed,
    Conflict,
    Entry,
    LeaseId,
    Put,
    Revision,
    Transaction,
    Unchanged,
)
from rankwise.base.units import MILLISECOND, SECOND, Duration
from rankwise.ports.store import Store, Watch

PATIENCE = Duration(60 * SECOND)
"""How long anything may take before it counts as missing."""
INSTANTLY = Duration(20 * MILLISECOND)
HOURS = Duration(2 * 3600 * SECOND)
SHORT_LIFE = Duration(1 * SECOND)
"""The life of a lease that is not renewed; a store may round it up."""
CLIENTS = 4

T = TypeVar("T")
Connect = Callable[[], Store]
Behaviour = Callable[[Connect, str], None]


def check_store(connect: Connect) -> None:
    """Assert every behaviour, each under a prefix of its own.

    Args:
        connect: opens one more client of one and the same store. The suite closes what it opens;
            no other client writes to the store meanwhile.

    Raises:
        AssertionError: with a note that names the behaviour.
    """
    for name, behaviour in STORE_BEHAVIOURS.items():
        try:
            behaviour(connect, f"conformance/{uuid.uuid4().hex}/")
        except AssertionError as error:
            error.add_note(f"expected of a store: {name.replace('_', ' ')}")
            raise


def nothing_is_there_at_first(connect: Connect, prefix: str) -> None:
    """An empty prefix is no error."""
    with connect() as store:
        snapshot = store.read(prefix)

    assert snapshot.entries == ()
    assert snapshot.revision >= 0


def what_is_written_is_read_in_the_order_of_keys(connect: Connect, prefix: str) -> None:
    """Another client sees it at once, with the revision that wrote it."""
    with connect() as writer, connect() as reader:
        revisions = {key: _put(writer, prefix + key, key.encode()) for key in ("b", "a", "c")}
        snapshot = reader.read(prefix)

    assert [(entry.key, entry.value) for entry in snapshot.entries] == [
        (prefix + key, key.encode()) for key in ("a", "b", "c")
    ]
    assert {e.key: e.revision for e in snapshot.entries} == {
        prefix + key: revision for key, revision in revisions.items()
    }
    assert revisions["b"] < revisions["a"] < revisions["c"] == snapshot.revision


def a_prefix_takes_in_what_begins_with_it_and_nothing_else(connect: Connect, prefix: str) -> None:
    """Neighbours in the order of keys stay out."""
    inside = [prefix + "n", prefix + "n/1", prefix + "n\x7f", prefix + "n\U0010ffff"]
    outside = [prefix + "m", prefix + "m\U0010ffff", prefix + "o", prefix + "N"]
    with connect() as store:
        for key in inside + outside:
            _put(store, key)
        found = [entry.key for entry in store.read(prefix + "n").entries]

    assert found == inside


def keys_and_values_may_hold_anything(connect: Connect, prefix: str) -> None:
    """Keys are text in any script, in the order of code points; values are bytes, or none."""
    keys = [prefix + name for name in (" ", '"\\\n', "a b", "ä", "ключ", "節", "\U0001f600")]
    values = [b"", b"\0", b"\xff" * 3, bytes(range(256)), b"{}", b"\r\n", b"x"]
    with connect() as store, closing(_watch(store, prefix)) as watch:
        for key, value in zip(keys, values, strict=True):
            _put(store, key, value)
        told = _told(watch, len(keys))
        read = [(entry.key, entry.value) for entry in store.read(prefix).entries]

    assert read == sorted(zip(keys, values, strict=True))
    assert [(change.key, change.value) for change in told] == list(zip(keys, values, strict=True))


def a_value_of_a_mebibyte_arrives_whole(connect: Connect, prefix: str) -> None:
    """So much must fit."""
    value = bytes(range(256)) * 4096
    with connect() as store, closing(_watch(store, prefix)) as watch:
        _put(store, prefix + "big", value)
        (change,) = _told(watch, 1)
        (entry,) = store.read(prefix).entries

    assert entry.value == value
    assert change.value == value


def a_key_can_be_put_only_while_it_is_absent(connect: Connect, prefix: str) -> None:
    """The second to come loses, and a deleted key counts as absent."""
    key = prefix + "leader"
    with connect() as first, connect() as second:
        won = first.commit(_put_if(key, ABSENT, b"first"))
        lost = second.commit(_put_if(key, ABSENT, b"second"))
        (entry,) = second.read(prefix).entries
        deleted = first.commit(Transaction(deletes=(key,)))
        won_after = second.commit(_put_if(key, ABSENT, b"second"))

    assert isinstance(won, Committed)
    assert isinstance(lost, Conflict)
    assert entry == Entry(key, b"first", won.revision)
    assert isinstance(deleted, Committed)
    assert isinstance(won_after, Committed)
    assert won.revision < deleted.revision < won_after.revision


def a_key_can_be_replaced_only_while_it_is_unchanged(connect: Connect, prefix: str) -> None:
    """A revision that is not the last one loses, also if the value came back."""
    key = prefix + "round"
    with connect() as store:
        old = _put(store, key, b"1")
        _put(store, key, b"2")
        last = _put(store, key, b"1")
        stale = store.commit(_put_if(key, old, b"3"))
        fresh = store.commit(_put_if(key, last, b"3"))

    assert isinstance(stale, Conflict)
    assert isinstance(fresh, Committed)


def a_transaction_is_all_or_nothing(connect: Connect, prefix: str) -> None:
    """One condition that fails forbids everything; several keys have one revision."""
    a, b, c = (prefix + name for name in "abc")
    with connect() as store:
        revision = _put(store, a)
        puts = (Put(b, b"b"), Put(c, b"c"))
        refused = store.commit(
            Transaction(
                conditions=(Unchanged(a, revision), Unchanged(b, revision)), puts=puts, deletes=(a,)
            )
        )
        keys_then = [entry.key for entry in store.read(prefix).entries]
        done = store.commit(
            Transaction(
                conditions=(Unchanged(a, revision), Unchanged(b, ABSENT)), puts=puts, deletes=(a,)
            )
        )
        entries = store.read(prefix).entries

    assert isinstance(refused, Conflict)
    assert keys_then == [a]
    assert isinstance(done, Committed)
    assert entries == (Entry(b, b"b", done.revision), Entry(c, b"c", done.revision))


def one_of_many_replaces_several_keys_at_once(connect: Connect, prefix: str) -> None:
    """Rewritten, deleted and put for the first time in one revision, or by somebody else."""
    charter, round_, leader = (prefix + name for name in ("charter", "round", "leader"))
    with _clients(connect) as clients, connect() as other:
        ours = other.grant_lease(HOURS)
        old = _put_all(other, Put(charter, b"old", ours), Put(round_, b"closed", ours))
        watch = other.watch(prefix, old)

        def replace(store: Store, name: bytes) -> bool:
            lease = store.grant_lease(HOURS)
            done = store.commit(
                Transaction(
                    conditions=(
                        Unchanged(charter, old), Unchanged(round_, old), Unchanged(leader, ABSENT),
                    ),
                    puts=(Put(charter, name, ours), Put(leader, name, lease)),
                    deletes=(round_,),
                )
            )  # fmt: skip
            if isinstance(done, Conflict):
                store.revoke_lease(lease)
            return isinstance(done, Committed)

        names = [f"client {number}".encode() for number in range(CLIENTS)]
        won = _at_once(
            partial(replace, store, name) for store, name in zip(clients, names, strict=True)
        )
        batch = _next(watch)
        watch.close()
        entries = other.read(prefix).entries

    assert won.count(True) == 1
    winner = names[won.index(True)]
    assert {change.revision for change in batch} == {entries[0].revision}
    assert {change.key: change.value for change in batch} == {
        charter: winner, leader: winner, round_: None,
    }  # fmt: skip
    assert [(entry.key, entry.value) for entry in entries] == [
        (charter, winner), (leader, winner),
    ]  # fmt: skip
    assert entries[0].lease == ours
    assert entries[1].lease not in {ours, None}


def what_changes_nothing_makes_no_revision(connect: Connect, prefix: str) -> None:
    """Deleting what is not there, and only asking."""
    with connect() as store:
        before = _put(store, prefix + "a")
        deleted = store.commit(Transaction(deletes=(prefix + "missing",)))
        asked = store.commit(Transaction(conditions=(Unchanged(prefix + "a", before),)))

    assert deleted == Committed(before)
    assert asked == Committed(before)


def a_watch_tells_every_change_in_order(connect: Connect, prefix: str) -> None:
    """Puts and deletes of any client, under its prefix alone, beginning after its revision."""
    key = prefix + "in/a"
    with connect() as writer, connect() as watcher:
        _put(writer, key, b"before")
        revision = watcher.read(prefix).revision
        with closing(watcher.watch(prefix + "in/", revision)) as watch:
            first = _put(writer, key, b"1")
            _put(writer, prefix + "out", b"x")
            deleted = writer.commit(Transaction(deletes=(key,)))
            last = _put(writer, key, b"2")
            told = _told(watch, 3)

    assert told == [
        Change(key, b"1", first),
        Change(key, None, deleted.revision),
        Change(key, b"2", last),
    ]


def a_watch_may_begin_in_the_past(connect: Connect, prefix: str) -> None:
    """It tells what has happened since, and goes on with what happens then."""
    with connect() as store:
        start = _put(store, prefix + "a", b"0")
        _put(store, prefix + "a", b"1")
        _put(store, prefix + "a", b"2")
        with closing(store.watch(prefix, start)) as watch:
            told = _told(watch, 2)
            _put(store, prefix + "a", b"3")
            told += _told(watch, 1)

    assert [change.value for change in told] == [b"1", b"2", b"3"]


def following_reads_and_tells_what_comes_later(connect: Connect, prefix: str) -> None:
    """Every change is either in the snapshot or told, and none is both."""
    with connect() as store, connect() as writer:
        before = _put(writer, prefix + "a", b"0")
        snapshot, watch = store.follow(prefix)
        with closing(watch):
            _put(writer, prefix + "a", b"1")
            _put(writer, prefix + "b", b"2")
            told = _told(watch, 2)

    assert snapshot.entries == (Entry(prefix + "a", b"0", before),)
    assert [change.value for change in told] == [b"1", b"2"]


def following_misses_nothing_while_others_write(connect: Connect, prefix: str) -> None:
    """The same, in the midst of changes."""
    count = 60
    with connect() as store, connect() as writer:

        def write() -> None:
            for number in range(count):
                _put(writer, prefix + "a", str(number).encode())

        thread = Thread(target=write)
        thread.start()
        snapshot, watch = store.follow(prefix)
        with closing(watch):
            seen = [int(entry.value) for entry in snapshot.entries]
            while (seen[-1] if seen else -1) < count - 1:
                seen += [int(change.value or b"") for change in _next(watch)]
        thread.join()

    assert seen == list(range(seen[0], count))


def the_changes_of_a_transaction_come_together(connect: Connect, prefix: str) -> None:
    """One answer of the watch holds all of them."""
    keys = [f"{prefix}{number:02}" for number in range(30)]
    with connect() as store, closing(_watch(store, prefix)) as watch:
        store.commit(Transaction(puts=tuple(Put(key, b"x") for key in keys)))
        told = _next(watch)

    assert sorted(change.key for change in told) == keys
    assert len({change.revision for change in told}) == 1


def a_watch_tells_nothing_when_nothing_happens(connect: Connect, prefix: str) -> None:
    """It comes back empty when its patience is over, and is as good as before."""
    with connect() as store, closing(_watch(store, prefix)) as watch:
        nothing = watch.next(INSTANTLY)
        _put(store, prefix + "a")
        told = _told(watch, 1)

    assert nothing == ()
    assert [change.key for change in told] == [prefix + "a"]


def closing_a_watch_wakes_who_waits(connect: Connect, prefix: str) -> None:
    """The wait ends with nothing, and so does every later one; other watches go on."""
    with connect() as store:
        revision = store.read(prefix).revision
        closing, staying = store.watch(prefix, revision), store.watch(prefix, revision)
        told = _woken(closing, closing.close)
        _put(store, prefix + "a")
        told_later = closing.next(PATIENCE)
        others = _told(staying, 1)

    assert told == ()
    assert told_later == ()
    assert len(others) == 1


def closing_a_store_wakes_who_waits(connect: Connect, prefix: str) -> None:
    """Its watches end with it, and calls tell that it is closed; closing twice is harmless."""
    store = connect()
    watch = _watch(store, prefix)
    told = _woken(watch, store.close)
    store.close()

    assert told == ()
    _raises(StoreUnavailable, lambda: store.read(prefix))
    _raises(StoreUnavailable, lambda: store.commit(Transaction(puts=(Put(prefix + "a", b""),))))


def one_of_many_wins_a_key(connect: Connect, prefix: str) -> None:
    """Exactly one."""
    key = prefix + "leader"

    def take(store: Store, name: bytes) -> bool:
        return isinstance(store.commit(_put_if(key, ABSENT, name)), Committed)

    with _clients(connect) as stores:
        names = [b"%d" % number for number in range(len(stores))]
        won = _at_once(
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
                if isinstance(store.commit(_put_if(key, entry.revision, value)), Committed):
                    break

    with _clients(connect) as stores:
        _put(stores[0], key, b"0")
        _at_once([partial(count, store) for store in stores])
        (entry,) = stores[0].read(key).entries

    assert int(entry.value) == steps * CLIENTS


def a_watch_misses_nothing_under_load(connect: Connect, prefix: str) -> None:
    """Everything from every writer, each writer's in its order, revisions never going back."""
    steps = 40

    def write(store: Store, name: str) -> None:
        for step in range(steps):
            _put(store, f"{prefix}{name}", b"%d" % step)

    with _clients(connect) as stores, connect() as watcher:
        watch = _watch(watcher, prefix)
        names = [f"writer-{number}" for number in range(len(stores))]
        with ThreadPoolExecutor(1) as pool:
            telling = pool.submit(_told, watch, steps * len(stores))
            _at_once([partial(write, s, n) for s, n in zip(stores, names, strict=True)])
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
            _put(store, f"{prefix}{step % 7}", b"%d" % step)
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
            for change in _next(watch):
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
        watch = _watch(store, prefix)
        with ThreadPoolExecutor(1) as pool:
            telling = pool.submit(_told, watch, 8)
            _at_once([partial(_put, store, f"{prefix}{n}") for n in range(8)])
            told = telling.result()

    assert sorted(change.key for change in told) == [f"{prefix}{number}" for number in range(8)]


def a_lease_that_nobody_renews_takes_its_keys_along(connect: Connect, prefix: str) -> None:
    """Watches are told of it; afterwards the lease is lost to everybody."""
    key = prefix + "node"
    with connect() as store, connect() as other:
        watch = _watch(other, prefix)
        lease = store.grant_lease(SHORT_LIFE)
        put = store.commit(Transaction(puts=(Put(key, b"me", lease), Put(prefix + "kept", b""))))
        entries = other.read(key).entries
        told = _told(watch, 3)

        assert isinstance(put, Committed)
        assert entries == (Entry(key, b"me", put.revision, lease),)
        assert Change(key, b"me", put.revision, lease) in told[:2]
        assert (told[2].key, told[2].value) == (key, None)
        assert told[2].revision > put.revision
        assert [entry.key for entry in other.read(prefix).entries] == [prefix + "kept"]
        _raises(LeaseLost, lambda: store.renew_lease(lease))
        _raises(LeaseLost, lambda: store.commit(Transaction(puts=(Put(key, b"", lease),))))
        store.revoke_lease(lease)


def a_lease_that_is_renewed_outlives_one_that_is_not(connect: Connect, prefix: str) -> None:
    """Renewing gives it its whole life again, time after time."""
    renewed, left = prefix + "renewed", prefix + "left"
    for attempt in range(5):
        life = Duration((3 + 3 * attempt) * SECOND)
        with connect() as store:
            leases = {key: store.grant_lease(life) for key in (renewed, left)}
            before = store.read(prefix).revision
            store.commit(
                Transaction(puts=tuple(Put(key, b"", lease) for key, lease in leases.items()))
            )
            was_in_time = _renew_until_gone(store, leases[renewed], left, life, before)
            keys = [entry.key for entry in store.read(prefix).entries]
            store.revoke_lease(leases[renewed])
        if was_in_time:
            assert keys == [renewed]
            return
    raise AssertionError("this machine is too busy to renew a lease of 15 s in time")


def _renew_until_gone(
    store: Store, lease: LeaseId, key: str, life: Duration, after: Revision
) -> bool:
    """Renew the lease until another's key is deleted; whether no renewal came dangerously late."""
    watch = store.watch(key, after)
    was_in_time = True
    last = monotonic_ns()
    changes: tuple[Change, ...] = ()
    while not any(change.value is None for change in changes):
        try:
            store.renew_lease(lease)
        except LeaseLost:
            assert monotonic_ns() - last > life // 2, "a lease was lost though renewed in time"
            was_in_time = False
        was_in_time = was_in_time and monotonic_ns() - last < life // 2
        last = monotonic_ns()
        changes = watch.next(Duration(life // 8))
    watch.close()
    return was_in_time


def a_revoked_lease_takes_its_keys_along_at_once(connect: Connect, prefix: str) -> None:
    """All its keys in one revision; revoking again is harmless."""
    with connect() as store:
        lease = store.grant_lease(PATIENCE)
        put = store.commit(Transaction(puts=(Put(prefix + "a", b"", lease),)))
        store.commit(Transaction(puts=(Put(prefix + "b", b"", lease),)))
        watch = store.watch(prefix, put.revision)
        store.revoke_lease(lease)
        told = _told(watch, 3)
        store.revoke_lease(lease)
        entries = store.read(prefix).entries

    assert entries == ()
    assert sorted(change.key for change in told[1:]) == [prefix + "a", prefix + "b"]
    assert {change.value for change in told[1:]} == {None}
    assert len({change.revision for change in told[1:]}) == 1


def a_key_written_without_its_lease_stays(connect: Connect, prefix: str) -> None:
    """A put says which lease a key has; none means that it stays."""
    with connect() as store:
        lease = store.grant_lease(PATIENCE)
        store.commit(Transaction(puts=(Put(prefix + "a", b"1", lease),)))
        store.commit(Transaction(puts=(Put(prefix + "a", b"2"),)))
        store.revoke_lease(lease)
        (entry,) = store.read(prefix).entries

    assert (entry.value, entry.lease) == (b"2", None)


def a_lease_of_hours_belongs_to_nobody(connect: Connect, prefix: str) -> None:
    """It outlives who has begun it; any client binds keys to it, renews it and ends it."""
    early, late, brief = prefix + "early", prefix + "late", prefix + "brief"
    with connect() as founder:
        hours = founder.grant_lease(HOURS)
        _put(founder, early)
        _put_all(founder, Put(early, b"bound", hours))
    with connect() as store:
        with closing(_watch(store, brief)) as watch:
            short = store.grant_lease(SHORT_LIFE)
            _put_all(store, Put(late, b"bound", hours), Put(brief, b"", short))
            values = [change.value for change in _told(watch, 2)]
        store.renew_lease(hours)
        kept = [(entry.key, entry.lease) for entry in store.read(prefix).entries]
        with connect() as other:
            other.revoke_lease(hours)
        left = store.read(prefix).entries

    assert values == [b"", None]
    assert kept == [(early, hours), (late, hours)]
    assert left == ()


def a_conflict_is_told_before_a_lost_lease(connect: Connect, prefix: str) -> None:
    """Nothing is written when conditions fail, so no lease is asked for."""
    with connect() as store:
        revision = _put(store, prefix + "a")
        lease = store.grant_lease(PATIENCE)
        store.revoke_lease(lease)
        result = store.commit(
            Transaction(
                conditions=(Unchanged(prefix + "a", ABSENT),),
                puts=(Put(prefix + "a", b"", lease),),
            )
        )

    assert isinstance(result, Conflict)
    assert result.revision >= revision


STORE_BEHAVIOURS: dict[str, Behaviour] = {
    behaviour.__name__: behaviour
    for behaviour in (
        nothing_is_there_at_first,
        what_is_written_is_read_in_the_order_of_keys,
        a_prefix_takes_in_what_begins_with_it_and_nothing_else,
        keys_and_values_may_hold_anything,
        a_value_of_a_mebibyte_arrives_whole,
        a_key_can_be_put_only_while_it_is_absent,
        a_key_can_be_replaced_only_while_it_is_unchanged,
        a_transaction_is_all_or_nothing,
        one_of_many_replaces_several_keys_at_once,
        what_changes_nothing_makes_no_revision,
        a_watch_tells_every_change_in_order,
        a_watch_may_begin_in_the_past,
        following_reads_and_tells_what_comes_later,
        following_misses_nothing_while_others_write,
        the_changes_of_a_transaction_come_together,
        a_watch_tells_nothing_when_nothing_happens,
        closing_a_watch_wakes_who_waits,
        closing_a_store_wakes_who_waits,
        one_of_many_wins_a_key,
        counting_together_loses_no_step,
        a_watch_misses_nothing_under_load,
        a_snapshot_and_the_watch_after_it_leave_no_gap,
        many_threads_may_share_a_client,
        a_lease_that_nobody_renews_takes_its_keys_along,
        a_lease_that_is_renewed_outlives_one_that_is_not,
        a_revoked_lease_takes_its_keys_along_at_once,
        a_lease_of_hours_belongs_to_nobody,
        a_key_written_without_its_lease_stays,
        a_conflict_is_told_before_a_lost_lease,
    )
}
"""Every behaviour by its name, for suites that want one test for each."""


def _put(store: Store, key: str, value: bytes = b"") -> Revision:
    result = store.commit(Transaction(puts=(Put(key, value),)))
    assert isinstance(result, Committed), "a transaction without conditions came to a conflict"
    return result.revision


def _put_all(store: Store, *puts: Put) -> Revision:
    result = store.commit(Transaction(puts=puts))
    assert isinstance(result, Committed)
    return result.revision


def _put_if(key: str, revision: Revision, value: bytes) -> Transaction:
    return Transaction(conditions=(Unchanged(key, revision),), puts=(Put(key, value),))


def _watch(store: Store, prefix: str) -> Watch:
    """A watch that begins now."""
    return store.watch(prefix, store.read(prefix).revision)


def _next(watch: Watch) -> tuple[Change, ...]:
    changes = watch.next(PATIENCE)
    assert changes, "a watch told nothing although something had changed"
    return changes


def _told(watch: Watch, count: int) -> list[Change]:
    told: list[Change] = []
    while len(told) < count:
        told += _next(watch)
    assert len(told) == count
    return told


def _woken(watch: Watch, close: Callable[[], None]) -> tuple[Change, ...]:
    """What a thread is told that waits in `watch` for ever, when `close` is called."""
    told: list[tuple[Change, ...]] = []
    waiting = Thread(target=lambda: told.append(watch.next(Duration(10 * PATIENCE))), daemon=True)
    waiting.start()
    close()
    waiting.join(PATIENCE / SECOND)
    assert told, "a thread goes on waiting in a watch that was closed"
    return told[0]


def _raises(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"expected {kind.__name__}")


def _at_once(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Make the calls in a thread each, all released at the same moment; their values in order."""
    waiting = list(calls)
    barrier = Barrier(len(waiting))

    def make(call: Callable[[], T]) -> T:
        barrier.wait(PATIENCE / SECOND)
        return call()

    with ThreadPoolExecutor(len(waiting)) as pool:
        return list(pool.map(make, waiting))


@contextmanager
def _clients(connect: Connect) -> Iterator[list[Store]]:
    with ExitStack() as stack:
        yield [stack.enter_context(connect()) for _ in range(CLIENTS)]
