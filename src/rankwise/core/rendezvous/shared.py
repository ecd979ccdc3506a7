"""The three keys that all nodes share, as one node knows them.

News of a key come by three ways (a read, the watch, the answer to a transaction of one's own) and
may overtake each other. The store's revision tells which is newer.
"""

from rankwise.base.keys import ABSENT, Change, LeaseId, Revision, Snapshot
from rankwise.core.rendezvous.layout import RunKeys


class SharedKey:
    """One key: its value as of some revision of the store."""

    __slots__ = ("as_of", "lease", "revision", "value")

    def __init__(self) -> None:
        self.value: bytes | None = None
        self.revision = ABSENT
        self.lease: LeaseId | None = None
        self.as_of = Revision(-1)

    def learn(
        self, value: bytes | None, revision: Revision, lease: LeaseId | None, as_of: Revision
    ) -> bool:
        """Take in news; returns whether they change anything."""
        if as_of <= self.as_of:
            return False
        self.as_of = as_of
        is_new = (value is None) != (self.value is None) or revision != self.revision
        self.value, self.revision, self.lease = value, revision, lease
        return is_new


class SharedKeys:
    """The charter, the leader and the round."""

    def __init__(self, keys: RunKeys) -> None:
        self.charter = SharedKey()
        self.leader = SharedKey()
        self.round = SharedKey()
        self._by_key = {
            keys.charter: self.charter,
            keys.leader: self.leader,
            keys.round: self.round,
        }

    def learn_snapshot(self, snapshot: Snapshot) -> None:
        """Take in what was read."""
        found = {entry.key: entry for entry in snapshot.entries}
        for key, shared in self._by_key.items():
            entry = found.get(key)
            if entry is None:
                shared.learn(None, ABSENT, None, snapshot.revision)
            else:
                shared.learn(entry.value, entry.revision, entry.lease, snapshot.revision)

    def learn_changes(self, changes: tuple[Change, ...]) -> None:
        """Take in what the watch tells."""
        for change in changes:
            shared = self._by_key.get(change.key)
            if shared is not None:
                revision = ABSENT if change.value is None else change.revision
                shared.learn(change.value, revision, change.lease, change.revision)
