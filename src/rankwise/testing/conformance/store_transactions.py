"""What every store must do with keys and transactions."""

from contextlib import closing
from functools import partial

from rankwise.base.keys import ABSENT, Committed, Conflict, Entry, Put, Transaction, Unchanged
from rankwise.ports.store import Store
from rankwise.testing.conformance.store_calls import (
    CLIENTS,
    HOURS,
    Connect,
    all_at_once,
    changes_from,
    clients_of,
    next_changes,
    put,
    put_all,
    put_if,
    watch_from_now,
)


def nothing_is_there_at_first(connect: Connect, prefix: str) -> None:
    """An empty prefix is no error."""
    with connect() as store:
        snapshot = store.read(prefix)

    assert snapshot.entries == ()
    assert snapshot.revision >= 0


def what_is_written_is_read_in_the_order_of_keys(connect: Connect, prefix: str) -> None:
    """Another client sees it at once, with the revision that wrote it."""
    with connect() as writer, connect() as reader:
        revisions = {key: put(writer, prefix + key, key.encode()) for key in ("b", "a", "c")}
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
            put(store, key)
        found = [entry.key for entry in store.read(prefix + "n").entries]

    assert found == inside


def keys_and_values_may_hold_anything(connect: Connect, prefix: str) -> None:
    """Keys are text in any script, in the order of code points; values are bytes, or none."""
    keys = [prefix + name for name in (" ", '"\\\n', "a b", "ä", "ключ", "節", "\U0001f600")]
    values = [b"", b"\0", b"\xff" * 3, bytes(range(256)), b"{}", b"\r\n", b"x"]
    with connect() as store, closing(watch_from_now(store, prefix)) as watch:
        for key, value in zip(keys, values, strict=True):
            put(store, key, value)
        told = changes_from(watch, len(keys))
        read = [(entry.key, entry.value) for entry in store.read(prefix).entries]

    assert read == sorted(zip(keys, values, strict=True))
    assert [(change.key, change.value) for change in told] == list(zip(keys, values, strict=True))


def a_value_of_a_mebibyte_arrives_whole(connect: Connect, prefix: str) -> None:
    """So much must fit."""
    value = bytes(range(256)) * 4096
    with connect() as store, closing(watch_from_now(store, prefix)) as watch:
        put(store, prefix + "big", value)
        (change,) = changes_from(watch, 1)
        (entry,) = store.read(prefix).entries

    assert entry.value == value
    assert change.value == value


def a_key_can_be_put_only_while_it_is_absent(connect: Connect, prefix: str) -> None:
    """The second to come loses, and a deleted key counts as absent."""
    key = prefix + "leader"
    with connect() as first, connect() as second:
        won = first.commit(put_if(key, ABSENT, b"first"))
        lost = second.commit(put_if(key, ABSENT, b"second"))
        (entry,) = second.read(prefix).entries
        deleted = first.commit(Transaction(deletes=(key,)))
        won_after = second.commit(put_if(key, ABSENT, b"second"))

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
        old = put(store, key, b"1")
        put(store, key, b"2")
        last = put(store, key, b"1")
        stale = store.commit(put_if(key, old, b"3"))
        fresh = store.commit(put_if(key, last, b"3"))

    assert isinstance(stale, Conflict)
    assert isinstance(fresh, Committed)


def a_transaction_is_all_or_nothing(connect: Connect, prefix: str) -> None:
    """One condition that fails forbids everything; several keys have one revision."""
    a, b, c = (prefix + name for name in "abc")
    with connect() as store:
        revision = put(store, a)
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
    """Rewritten, deleted and put for the first time in one revision, or by another client."""
    charter, round_, leader = (prefix + name for name in ("charter", "round", "leader"))
    with clients_of(connect) as clients, connect() as other:
        ours = other.grant_lease(HOURS)
        old = put_all(other, Put(charter, b"old", ours), Put(round_, b"closed", ours))
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
        won = all_at_once(
            partial(replace, store, name) for store, name in zip(clients, names, strict=True)
        )
        batch = next_changes(watch)
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
        before = put(store, prefix + "a")
        deleted = store.commit(Transaction(deletes=(prefix + "missing",)))
        asked = store.commit(Transaction(conditions=(Unchanged(prefix + "a", before),)))

    assert deleted == Committed(before)
    assert asked == Committed(before)
