"""What a keyspace does with keys, conditions, history and leases."""

import pytest

from rankwise.base.errors import Compacted, LeaseLost, LocalProtocolError
from rankwise.base.keys import (
    ABSENT,
    Change,
    Committed,
    Conflict,
    Entry,
    LeaseId,
    Put,
    Revision,
    Snapshot,
    Transaction,
    Unchanged,
)
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.keyspace.machine import Keyspace

START = Instant(1_000)
TTL = Duration(5 * SECOND)


def put(key: str, value: bytes = b"", lease: LeaseId | None = None) -> Transaction:
    return Transaction(puts=(Put(key, value, lease),))


def at(seconds: float) -> Instant:
    return Instant(START + round(seconds * SECOND))


def test_a_read_returns_the_entries_under_a_prefix_in_the_order_of_their_keys() -> None:
    keyspace = Keyspace()
    for key in ("b/2", "a", "b/1", "c", "b"):
        keyspace.commit(put(key, key.encode()))

    assert keyspace.read("b/") == Snapshot(
        (Entry("b/1", b"b/1", Revision(3)), Entry("b/2", b"b/2", Revision(1))), Revision(5)
    )
    assert [entry.key for entry in keyspace.read("").entries] == ["a", "b", "b/1", "b/2", "c"]


def test_a_transaction_is_one_revision_however_many_keys_it_writes() -> None:
    keyspace = Keyspace()
    keyspace.commit(put("old"))

    result = keyspace.commit(Transaction(puts=(Put("a", b"1"), Put("b", b"2")), deletes=("old",)))

    assert result == Committed(Revision(2))
    assert keyspace.changes_after(Revision(1), "") == (
        Change("a", b"1", Revision(2)),
        Change("b", b"2", Revision(2)),
        Change("old", None, Revision(2)),
    )


def test_a_condition_that_does_not_hold_writes_nothing() -> None:
    keyspace = Keyspace()
    keyspace.commit(put("leader", b"me"))

    taken = Transaction(conditions=(Unchanged("leader", ABSENT),), puts=(Put("leader", b"you"),))

    assert keyspace.commit(taken) == Conflict(Revision(1))
    assert keyspace.read("").entries == (Entry("leader", b"me", Revision(1)),)


def test_a_key_that_was_deleted_counts_as_absent() -> None:
    keyspace = Keyspace()
    keyspace.commit(put("leader", b"me"))
    keyspace.commit(Transaction(deletes=("leader",)))

    taken = Transaction(conditions=(Unchanged("leader", ABSENT),), puts=(Put("leader", b"you"),))

    assert keyspace.commit(taken) == Committed(Revision(3))


def test_a_transaction_that_changes_nothing_raises_no_revision() -> None:
    keyspace = Keyspace()
    keyspace.commit(put("a"))

    assert keyspace.commit(Transaction(deletes=("missing",))) == Committed(Revision(1))
    assert keyspace.commit(Transaction()) == Committed(Revision(1))


def test_a_transaction_that_writes_a_key_twice_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match=r"'a' twice"):
        Transaction(puts=(Put("a", b""),), deletes=("a",))


def test_a_transaction_that_names_an_empty_key_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="empty key"):
        Transaction(conditions=(Unchanged("", ABSENT),))


def test_a_put_on_a_lost_lease_is_an_error_only_if_the_conditions_hold() -> None:
    keyspace = Keyspace()
    lost = Put("a", b"", LeaseId(7))

    with pytest.raises(LeaseLost, match="lease 7"):
        keyspace.commit(Transaction(puts=(Put("b", b""), lost)))
    assert keyspace.revision == 0
    assert keyspace.commit(
        Transaction(conditions=(Unchanged("a", Revision(3)),), puts=(lost,))
    ) == Conflict(Revision(0))


def test_a_lease_ends_at_its_deadline_and_takes_its_keys_along_in_one_batch() -> None:
    keyspace = Keyspace()
    lease = keyspace.grant_lease(TTL, START)
    keyspace.commit(put("b", b"", lease))
    keyspace.commit(put("a", b"", lease))

    keyspace.end_leases(at(4.9))
    assert keyspace.revision == 2
    assert keyspace.next_deadline == at(5)
    keyspace.end_leases(at(5))

    assert keyspace.changes_after(Revision(2), "") == (
        Change("a", None, Revision(3)),
        Change("b", None, Revision(3)),
    )
    assert keyspace.next_deadline is None
    with pytest.raises(LeaseLost):
        keyspace.renew_lease(lease, at(5))


def test_a_renewal_lets_a_lease_live_for_its_whole_time_again() -> None:
    keyspace = Keyspace()
    lease = keyspace.grant_lease(TTL, START)
    keyspace.commit(put("a", b"", lease))

    keyspace.renew_lease(lease, at(3))
    keyspace.end_leases(at(7))

    assert keyspace.next_deadline == at(8)
    assert len(keyspace.read("").entries) == 1


def test_a_late_renewal_saves_a_lease_that_no_tick_has_ended() -> None:
    keyspace = Keyspace()
    lease = keyspace.grant_lease(TTL, START)

    keyspace.renew_lease(lease, at(60))
    keyspace.end_leases(at(60))

    assert keyspace.next_deadline == at(65)


def test_leases_end_in_the_order_of_their_deadlines() -> None:
    keyspace = Keyspace()
    late = keyspace.grant_lease(Duration(9 * SECOND), START)
    early = keyspace.grant_lease(TTL, START)
    keyspace.commit(put("late", b"", late))
    keyspace.commit(put("early", b"", early))

    keyspace.end_leases(at(10))

    told = [change.key for change in keyspace.changes_after(Revision(2), "")]
    assert told == ["early", "late"]


def test_a_key_that_is_written_again_without_its_lease_outlives_it() -> None:
    keyspace = Keyspace()
    first, second = (keyspace.grant_lease(TTL, START) for _ in range(2))
    keyspace.commit(Transaction(puts=(Put("freed", b"", first), Put("moved", b"", first))))
    keyspace.commit(Transaction(puts=(Put("freed", b""), Put("moved", b"", second))))

    keyspace.revoke_lease(first)

    assert [entry.key for entry in keyspace.read("").entries] == ["freed", "moved"]
    keyspace.revoke_lease(second)
    assert [entry.key for entry in keyspace.read("").entries] == ["freed"]


def test_revoking_twice_is_harmless_and_raises_no_revision() -> None:
    keyspace = Keyspace()
    lease = keyspace.grant_lease(TTL, START)

    keyspace.revoke_lease(lease)
    keyspace.revoke_lease(lease)

    assert keyspace.revision == 0


def test_a_lease_without_time_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="expected more than 0"):
        Keyspace().grant_lease(Duration(0), START)


def test_prolonging_gives_every_lease_its_whole_time_but_takes_none_away() -> None:
    keyspace = Keyspace()
    keyspace.grant_lease(TTL, START)
    keyspace.grant_lease(Duration(60 * SECOND), START)

    keyspace.prolong_leases(at(20))
    keyspace.end_leases(at(24))
    assert keyspace.next_deadline == at(25)
    keyspace.end_leases(at(25))

    assert keyspace.next_deadline == at(80)


def test_a_watch_sees_only_what_is_under_its_prefix() -> None:
    keyspace = Keyspace()
    for key in ("run/round", "run/nodes/1", "other/round", "run/leader"):
        keyspace.commit(put(key))

    told = keyspace.changes_after(Revision(0), "run/")

    assert [change.key for change in told] == ["run/round", "run/nodes/1", "run/leader"]


def test_a_watch_that_lags_behind_the_history_is_told_that_it_is_compacted() -> None:
    keyspace = Keyspace(history_max=2)
    for number in range(5):
        keyspace.commit(put("a", b"%d" % number))

    with pytest.raises(Compacted) as compacted:
        keyspace.changes_after(Revision(2), "")

    assert compacted.value.revision == 3
    told = keyspace.changes_after(Revision(3), "")
    assert [change.value for change in told] == [b"3", b"4"]


def test_compacting_forgets_changes_and_keeps_entries() -> None:
    keyspace = Keyspace()
    for key in "abc":
        keyspace.commit(put(key))

    keyspace.compact(Revision(2))

    assert keyspace.compacted == 2
    assert len(keyspace.read("").entries) == 3
    assert len(keyspace.changes_after(Revision(2), "")) == 1


def test_a_keyspace_made_from_an_image_goes_on_where_the_other_was() -> None:
    keyspace = Keyspace()
    kept, ended = keyspace.grant_lease(TTL, START), keyspace.grant_lease(TTL, START)
    keyspace.commit(put("a", b"1", kept))
    keyspace.commit(put("b", b"2", ended))
    keyspace.revoke_lease(ended)

    copy = Keyspace.from_image(keyspace.image, at(100))

    assert copy.image == keyspace.image
    assert copy.changes_after(Revision(1), "") == keyspace.changes_after(Revision(1), "")
    assert copy.next_deadline == at(105)
    assert copy.grant_lease(TTL, START) not in {kept, ended}
    copy.commit(put("b", b"3"))
    assert copy.read("b").entries == (Entry("b", b"3", Revision(4)),)
    copy.revoke_lease(kept)
    assert [entry.key for entry in copy.read("").entries] == ["b"]
    assert keyspace.read("").entries == (Entry("a", b"1", Revision(1), kept),)
