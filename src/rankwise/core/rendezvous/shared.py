"""The four keys that all nodes share, as one node knows them.

News of a key come by three ways (a read, the watch, the answer to a transaction of one's own) and
may overtake each other. The store's revision tells which is newer.
"""

from rankwise.base.keys import ABSENT, Change, LeaseId, Revision, Snapshot
from rankwise.base.units import Instant
from rankwise.core.rendezvous.requests import Purpose, Requests
from rankwise.core.rendezvous.storage import RunKeys
from rankwise.core.rendezvous.vocabulary import Order, ReadKeys


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
    ) -> None:
        """Take in news, unless newer ones came before."""
        if as_of > self.as_of:
            self.as_of = as_of
            self.value, self.revision, self.lease = value, revision, lease


class SharedKeys:
    """The charter, the leader, the round and the leader's inquiry.

    Args:
        keys: where they lie.
        requests: those of this node.
    """

    def __init__(self, keys: RunKeys, requests: Requests) -> None:
        self.charter = SharedKey()
        self.leader = SharedKey()
        self.round = SharedKey()
        self.inquiry = SharedKey()
        self.watch: int | None = None
        """The token of the watch that tells of them."""
        self.is_read = False
        """Whether they were ever read."""
        self.is_stale = True
        """Whether they must be read (again) before they can be relied on."""
        self.lead_free_since: Instant | None = None
        """Since when this node knows that nobody leads."""
        self._keys = keys
        self._requests = requests
        self._by_key = {
            keys.charter: self.charter,
            keys.leader: self.leader,
            keys.round: self.round,
            keys.inquiry: self.inquiry,
        }

    @property
    def is_known(self) -> bool:
        """Whether they can be relied on."""
        return self.is_read and not self.is_stale

    @property
    def is_lead_free(self) -> bool:
        """Whether nobody leads; who has put a name there without a lease is none of us."""
        return self.leader.value is None or self.leader.lease is None

    def read(self, founder: str, now: Instant) -> list[Order]:
        """Ask for them if they are stale; `founder` comes back with the answer."""
        if not self.is_stale or not self._requests.may_begin(Purpose.SHARED, now):
            return []
        token = self._requests.begin(Purpose.SHARED, now, founder)
        watch = self._requests.new_token() if self.watch is None else None
        return [ReadKeys(token, self._keys.shared, watch)]

    def learn_snapshot(self, snapshot: Snapshot) -> None:
        """Take in what was read."""
        self.is_read = True
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

    def lives(self, changes: tuple[Change, ...]) -> list[tuple[Change, ...]]:
        """Changes in parts, each of one run's: another begins where the charter is written.

        Who was slow is told both at once, and must not miss how the first has ended.
        """
        starts = [each.revision for each in changes if each.key == self._keys.charter]
        parts: list[list[Change]] = [[]]
        for change in changes:
            if starts and change.revision >= starts[0]:
                del starts[0]
                parts.append([])
            parts[-1].append(change)
        return [tuple(part) for part in parts if part]

    def note_free_lead(self, now: Instant) -> None:
        """Note since when nobody leads, if nobody does."""
        if not self.is_lead_free:
            self.lead_free_since = None
        elif self.lead_free_since is None:
            self.lead_free_since = now
