"""The keyspace machine: what a store keeps, without the store's threads, sockets and clock.

Theory of operation
===================

One counter of revisions belongs to the whole keyspace. A transaction that changes anything raises
it by exactly one, whatever number of keys it writes; one that changes nothing (it only asked, or
deleted what was not there) leaves it alone. The changes of one revision are one *batch*, and the
last batches are the *history*: a watch is nothing but the revision up to which it was delivered,
and `changes_after` has the rest, whole batches only. Older changes are compacted.

A lease is a deadline, and a set of keys that vanish with it, in one batch of its own. Leases end in
`end_leases`, and nowhere else. So a driver that was itself stopped takes in what it finds waiting
before it calls that, and calls `prolong_leases` if it was away for long: no renewal could arrive
meanwhile.

Nothing here waits or calls back. The driver of the machine asks after each call whether `revision`
has risen, and if so tells those who watch. The same machine lies beneath the memory store, the
embedded store's server, the simulated store, every client of a c10d store, which replays a log of
calls, and every client of a store in one value, which makes it from an image (`KeyspaceImage`). So
equal calls make equal keyspaces, lease numbers are counted, and nothing is random.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Self

import msgspec

from rankwise.base.errors import Compacted, LeaseLost, LocalProtocolError
from rankwise.base.keys import (
    ABSENT,
    Change,
    Committed,
    Conflict,
    Entry,
    LeaseId,
    Revision,
    Snapshot,
    Transaction,
)
from rankwise.base.units import Duration, Instant, after

HISTORY_MAX = 10_000
"""How many batches are remembered for watches that lag behind."""


class Lease:
    """A promise of life, kept by renewing it."""

    __slots__ = ("deadline", "keys", "lease", "ttl")

    def __init__(self, lease: LeaseId, ttl: Duration, deadline: Instant) -> None:
        self.lease = lease
        self.ttl = ttl
        self.deadline = deadline
        self.keys: set[str] = set()


class KeyspaceImage(msgspec.Struct, frozen=True, array_like=True):
    """A keyspace as a value, for stores that can only keep one.

    Attributes:
        revision: the last one.
        entries: in the order of their keys.
        history: the last batches.
        leases: those that are alive, each with its time to live.
        leases_granted: how many there have ever been.
    """

    revision: Revision
    entries: tuple[Entry, ...]
    history: tuple[tuple[Change, ...], ...]
    leases: tuple[tuple[LeaseId, Duration], ...]
    leases_granted: int


class Keyspace:
    """Revisioned keys, transactions, history and leases. See the module's text."""

    def __init__(self, *, history_max: int = HISTORY_MAX) -> None:
        self._revision = Revision(0)
        self._entries: dict[str, Entry] = {}
        self._keys: list[str] = []  # sorted; code points sort as their UTF-8 does
        self._history: deque[tuple[Change, ...]] = deque()
        self._history_max = history_max
        self._leases: dict[LeaseId, Lease] = {}
        self._leases_granted = 0
        # Every lease stands here once; a renewed one is put right when it comes to the top.
        self._deadlines: list[tuple[Instant, LeaseId]] = []

    @classmethod
    def from_image(cls, image: KeyspaceImage, now: Instant) -> Self:
        """The keyspace that an image shows; its leases have their whole time to live from now."""
        keyspace = cls()
        keyspace._revision = image.revision
        keyspace._entries = {entry.key: entry for entry in image.entries}
        keyspace._keys = [entry.key for entry in image.entries]
        keyspace._history.extend(image.history)
        keyspace._leases_granted = image.leases_granted
        keyspace._leases = {
            number: Lease(number, ttl, after(now, ttl)) for number, ttl in image.leases
        }
        for entry in image.entries:
            if entry.lease is not None:
                keyspace._leases[entry.lease].keys.add(entry.key)
        keyspace.prolong_leases(now)
        return keyspace

    @property
    def image(self) -> KeyspaceImage:
        """All of it but the instants at which leases end, which only one clock understands."""
        return KeyspaceImage(
            self._revision,
            tuple(self._entries[key] for key in self._keys),
            tuple(self._history),
            tuple((lease.lease, lease.ttl) for lease in self._leases.values()),
            self._leases_granted,
        )

    @property
    def revision(self) -> Revision:
        """The number of the last batch; 0 when nothing was ever written."""
        return self._revision

    @property
    def compacted(self) -> Revision:
        """The last revision that is forgotten: a watch may begin after it, not before."""
        return Revision(self._revision - len(self._history))

    @property
    def next_deadline(self) -> Instant | None:
        """When the next lease ends without a renewal; None while there are no leases."""
        while self._deadlines:
            instant, number = self._deadlines[0]
            lease = self._leases.get(number)
            if lease is not None and lease.deadline == instant:
                return instant
            heappop(self._deadlines)
            if lease is not None:
                heappush(self._deadlines, (lease.deadline, number))
        return None

    def end_leases(self, now: Instant) -> None:
        """End every lease whose deadline has passed, the earliest first. Too early is harmless."""
        while (deadline := self.next_deadline) is not None and deadline <= now:
            self.revoke_lease(self._deadlines[0][1])

    def read(self, prefix: str) -> Snapshot:
        """All entries whose keys begin with `prefix`, in the order of their keys."""
        found = tuple(self._entries[key] for key in self._keys_under(prefix))
        return Snapshot(found, self._revision)

    def commit(self, transaction: Transaction) -> Committed | Conflict:
        """Do all of the transaction, or nothing.

        Raises:
            LeaseLost: every condition holds, but a put names a lease that does not exist.
        """
        for condition in transaction.conditions:
            entry = self._entries.get(condition.key)
            if condition.revision != (ABSENT if entry is None else entry.revision):
                return Conflict(self._revision)
        for put in transaction.puts:
            if put.lease is not None:
                self._lease(put.lease)
        revision = Revision(self._revision + 1)
        batch = [Change(put.key, put.value, revision, put.lease) for put in transaction.puts]
        batch += [
            Change(key, None, revision) for key in transaction.deletes if key in self._entries
        ]
        self._apply(batch)
        return Committed(self._revision)

    def grant_lease(self, ttl: Duration, now: Instant) -> LeaseId:
        """Begin a lease that ends `ttl` from now, and so long after every renewal."""
        if ttl <= 0:
            raise LocalProtocolError(f"a lease's time to live is {ttl} ns, expected more than 0")
        self._leases_granted += 1
        lease = Lease(LeaseId(self._leases_granted), ttl, after(now, ttl))
        self._leases[lease.lease] = lease
        heappush(self._deadlines, (lease.deadline, lease.lease))
        return lease.lease

    def renew_lease(self, lease: LeaseId, now: Instant) -> None:
        """Let the lease end `ttl` from now.

        Raises:
            LeaseLost: it has ended.
        """
        # However late it is: until `end_leases` has ended it, a lease can be renewed.
        held = self._lease(lease)
        held.deadline = after(now, held.ttl)

    def revoke_lease(self, lease: LeaseId) -> None:
        """End the lease and delete its keys, as one batch; harmless when it has ended."""
        held = self._leases.pop(lease, None)
        if held is None:
            return
        revision = Revision(self._revision + 1)
        self._apply([Change(key, None, revision) for key in sorted(held.keys)])

    def prolong_leases(self, now: Instant) -> None:
        """Let every lease live for its whole time from now, or longer if it does already."""
        for lease in self._leases.values():
            lease.deadline = max(lease.deadline, after(now, lease.ttl))
        self._deadlines = [(lease.deadline, number) for number, lease in self._leases.items()]
        heapify(self._deadlines)

    def changes_after(self, revision: Revision, prefix: str) -> tuple[Change, ...]:
        """What was changed under `prefix` later than `revision`, in order, up to now.

        A watch asks again after `self.revision`, not after the last change that it was told.

        Raises:
            Compacted: some of it is forgotten.
        """
        if revision < self.compacted:
            raise Compacted(
                f"the store has forgotten the changes from {revision + 1} to {self.compacted}",
                self.compacted,
                hint="read again, and watch after the snapshot's revision",
            )
        # By index, since a deque is quick at its ends: most ask for the last batch alone.
        return tuple(
            change
            for index in range(revision - self.compacted, len(self._history))
            for change in self._history[index]
            if change.key.startswith(prefix)
        )

    def compact(self, revision: Revision) -> None:
        """Forget the changes up to and with `revision`; entries stay as they are."""
        while self._history and self.compacted < revision:
            self._history.popleft()

    def _lease(self, lease: LeaseId) -> Lease:
        held = self._leases.get(lease)
        if held is None:
            raise LeaseLost(
                f"lease {lease} has ended, or was never granted",
                hint="its holder was cut off from the store for longer than its time to live",
            )
        return held

    def _keys_under(self, prefix: str) -> Iterator[str]:
        for index in range(bisect_left(self._keys, prefix), len(self._keys)):
            key = self._keys[index]
            if not key.startswith(prefix):
                return
            yield key

    def _apply(self, batch: list[Change]) -> None:
        if not batch:
            return
        self._revision = batch[0].revision
        for change in batch:
            self._set(change)
        self._history.append(tuple(batch))
        if len(self._history) > self._history_max:
            # A watch that is further behind is told so (`Compacted`), and reads anew.
            self._history.popleft()

    def _set(self, change: Change) -> None:
        key = change.key
        before = self._entries.get(key)
        if before is None:
            insort(self._keys, key)
        elif before.lease is not None and before.lease in self._leases:
            self._leases[before.lease].keys.discard(key)
        if change.value is None:
            del self._entries[key]
            del self._keys[bisect_left(self._keys, key)]
            return
        self._entries[key] = Entry(key, change.value, change.revision, change.lease)
        if change.lease is not None:
            self._leases[change.lease].keys.add(key)
