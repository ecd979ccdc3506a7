"""A keyspace against a naive model of it, whatever is asked in whatever order."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rankwise.base.errors import LeaseLost
from rankwise.base.keys import (
    ABSENT,
    Change,
    Committed,
    LeaseId,
    Put,
    Revision,
    Transaction,
    Unchanged,
)
from rankwise.base.units import SECOND, Duration, Instant, after
from rankwise.core.keyspace.machine import Keyspace

KEYS = st.sampled_from(["a", "a/1", "a/2", "b", "ä", "\U0001f600"])
LEASES = st.none() | st.integers(1, 4).map(LeaseId)
VALUES = st.binary(max_size=3)


class KeyspaceAgainstModel(RuleBasedStateMachine):
    """The model keeps plain dictionaries, and a mirror that only ever hears of changes."""

    def __init__(self) -> None:
        super().__init__()
        self.keyspace = Keyspace()
        self.now = Instant(0)
        self.values: dict[str, tuple[bytes, Revision, LeaseId | None]] = {}
        self.deadlines: dict[LeaseId, tuple[Instant, Duration]] = {}
        self.mirror: dict[str, Change] = {}
        self.told = Revision(0)

    @rule(
        expected=st.dictionaries(KEYS, st.booleans(), max_size=2),
        puts=st.dictionaries(KEYS, st.tuples(VALUES, LEASES), max_size=3),
        deletes=st.sets(KEYS, max_size=2),
    )
    def commit(
        self,
        expected: dict[str, bool],
        puts: dict[str, tuple[bytes, LeaseId | None]],
        deletes: set[str],
    ) -> None:
        revisions = {key: self.values[key][1] if key in self.values else ABSENT for key in expected}
        transaction = Transaction(
            conditions=tuple(
                Unchanged(key, revisions[key] if holds else Revision(revisions[key] + 1))
                for key, holds in expected.items()
            ),
            puts=tuple(Put(key, value, lease) for key, (value, lease) in puts.items()),
            deletes=tuple(sorted(deletes - puts.keys())),
        )
        before = self.keyspace.revision
        try:
            result = self.keyspace.commit(transaction)
        except LeaseLost:
            assert all(expected.values())
            assert {lease for _, lease in puts.values()} - {None} - self.deadlines.keys()
            assert self.keyspace.revision == before
            return

        assert isinstance(result, Committed) == all(expected.values())
        if isinstance(result, Committed):
            for key, (value, lease) in puts.items():
                self.values[key] = (value, result.revision, lease)
            for key in transaction.deletes:
                self.values.pop(key, None)

    @rule(ttl=st.integers(1, 5))
    def grant(self, ttl: int) -> None:
        duration = Duration(ttl * SECOND)
        lease = self.keyspace.grant_lease(duration, self.now)
        assert lease not in self.deadlines
        self.deadlines[lease] = (after(self.now, duration), duration)

    @rule(lease=st.integers(1, 4).map(LeaseId))
    def renew(self, lease: LeaseId) -> None:
        try:
            self.keyspace.renew_lease(lease, self.now)
        except LeaseLost:
            assert lease not in self.deadlines
        else:
            ttl = self.deadlines[lease][1]
            self.deadlines[lease] = (after(self.now, ttl), ttl)

    @rule(lease=st.integers(1, 4).map(LeaseId))
    def revoke(self, lease: LeaseId) -> None:
        self.keyspace.revoke_lease(lease)
        self._end(lease)

    @rule(pause=st.integers(0, 4 * SECOND))
    def wait(self, pause: int) -> None:
        self.now = after(self.now, Duration(pause))
        self.keyspace.end_leases(self.now)
        for lease in [one for one, (instant, _) in self.deadlines.items() if instant <= self.now]:
            self._end(lease)

    @rule()
    def prolong(self) -> None:
        self.keyspace.prolong_leases(self.now)
        self.deadlines = {
            lease: (after(self.now, ttl), ttl) for lease, (_, ttl) in self.deadlines.items()
        }

    @rule()
    def watch(self) -> None:
        revision = self.told
        for change in self.keyspace.changes_after(self.told, ""):
            assert revision <= change.revision <= self.keyspace.revision
            assert change.revision > self.told
            revision = change.revision
            self.mirror.pop(change.key, None)
            if change.value is not None:
                self.mirror[change.key] = change
        self.told = self.keyspace.revision
        self.keyspace.compact(self.told)
        assert {
            key: (change.value, change.revision, change.lease)
            for key, change in self.mirror.items()
        } == self.values

    @invariant()
    def reads_what_was_written(self) -> None:
        entries = self.keyspace.read("").entries
        assert {one.key: (one.value, one.revision, one.lease) for one in entries} == self.values
        assert [one.key for one in entries] == sorted(self.values)
        under = [one.key for one in self.keyspace.read("a/").entries]
        assert under == sorted(key for key in self.values if key.startswith("a/"))

    @invariant()
    def knows_its_next_deadline(self) -> None:
        instants = [instant for instant, _ in self.deadlines.values()]
        assert self.keyspace.next_deadline == min(instants, default=None)

    def _end(self, lease: LeaseId) -> None:
        self.deadlines.pop(lease, None)
        self.values = {key: value for key, value in self.values.items() if value[2] != lease}


TestKeyspaceAgainstModel = KeyspaceAgainstModel.TestCase
