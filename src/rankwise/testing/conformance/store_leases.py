"""What every store must do with leases."""

from contextlib import closing
from time import monotonic_ns

from rankwise.base.errors import LeaseLost
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
from rankwise.base.units import SECOND, Duration
from rankwise.ports.store import Store
from rankwise.testing.conformance.store_calls import (
    HOURS,
    PATIENCE,
    Connect,
    assert_raises,
    changes_from,
    put,
    put_all,
    watch_from_now,
)

SHORT_LIFE = Duration(1 * SECOND)
"""The life of a lease that is not renewed; a store may round it up."""


def a_lease_that_nobody_renews_takes_its_keys_along(connect: Connect, prefix: str) -> None:
    """Watches are told of it; afterwards the lease is lost to all clients."""
    key = prefix + "node"
    with connect() as store, connect() as other:
        watch = watch_from_now(other, prefix)
        lease = store.grant_lease(SHORT_LIFE)
        put = store.commit(Transaction(puts=(Put(key, b"me", lease), Put(prefix + "kept", b""))))
        entries = other.read(key).entries
        told = changes_from(watch, 3)

        assert isinstance(put, Committed)
        assert entries == (Entry(key, b"me", put.revision, lease),)
        assert Change(key, b"me", put.revision, lease) in told[:2]
        assert (told[2].key, told[2].value) == (key, None)
        assert told[2].revision > put.revision
        assert [entry.key for entry in other.read(prefix).entries] == [prefix + "kept"]
        assert_raises(LeaseLost, lambda: store.renew_lease(lease))
        assert_raises(LeaseLost, lambda: store.commit(Transaction(puts=(Put(key, b"", lease),))))
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
        told = changes_from(watch, 3)
        store.revoke_lease(lease)
        entries = store.read(prefix).entries

    assert entries == ()
    assert sorted(change.key for change in told[1:]) == [prefix + "a", prefix + "b"]
    assert {change.value for change in told[1:]} == {None}
    assert len({change.revision for change in told[1:]}) == 1


def a_lease_of_hours_belongs_to_nobody(connect: Connect, prefix: str) -> None:
    """It outlives who has begun it; any client binds keys to it, renews it and ends it."""
    early, late, brief = prefix + "early", prefix + "late", prefix + "brief"
    with connect() as founder:
        hours = founder.grant_lease(HOURS)
        put(founder, early)
        put_all(founder, Put(early, b"bound", hours))
    with connect() as store:
        with closing(watch_from_now(store, brief)) as watch:
            short = store.grant_lease(SHORT_LIFE)
            put_all(store, Put(late, b"bound", hours), Put(brief, b"", short))
            values = [change.value for change in changes_from(watch, 2)]
        store.renew_lease(hours)
        kept = [(entry.key, entry.lease) for entry in store.read(prefix).entries]
        with connect() as other:
            other.revoke_lease(hours)
        left = store.read(prefix).entries

    assert values == [b"", None]
    assert kept == [(early, hours), (late, hours)]
    assert left == ()


def a_key_written_without_its_lease_stays(connect: Connect, prefix: str) -> None:
    """A put says which lease a key has; none means that it stays."""
    with connect() as store:
        lease = store.grant_lease(PATIENCE)
        store.commit(Transaction(puts=(Put(prefix + "a", b"1", lease),)))
        store.commit(Transaction(puts=(Put(prefix + "a", b"2"),)))
        store.revoke_lease(lease)
        (entry,) = store.read(prefix).entries

    assert (entry.value, entry.lease) == (b"2", None)


def a_conflict_is_told_before_a_lost_lease(connect: Connect, prefix: str) -> None:
    """Nothing is written when conditions fail, so no lease is asked for."""
    with connect() as store:
        revision = put(store, prefix + "a")
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
