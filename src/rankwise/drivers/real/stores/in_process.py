"""A store inside this process, for tests and for agents that are threads of one program.

One `MemoryStore` is the shared keyspace; every client of it is a `MemoryClient`. There is no thread
that ends leases: each call, and each wait of a watch, first ends those whose deadline has passed,
so a lease that should be gone is never seen. A wait sleeps until the next deadline at the latest.

It does not survive its process.
"""

from threading import Condition

from rankwise.base.errors import StoreUnavailable
from rankwise.base.keys import Change, Committed, Conflict, LeaseId, Revision, Snapshot, Transaction
from rankwise.base.units import SECOND, Duration, Instant, after
from rankwise.core.keyspace.machine import HISTORY_MAX, Keyspace
from rankwise.ports.clock import Clock
from rankwise.ports.store import Store


class MemoryStore:
    """A keyspace that the threads of this process share."""

    def __init__(self, clock: Clock, *, history_max: int = HISTORY_MAX) -> None:
        self.clock = clock
        self.keyspace = Keyspace(history_max=history_max)
        self.changed = Condition()
        """Guards the keyspace, and is notified when it has changed or a client was closed."""

    def connect(self) -> "MemoryClient":
        """A client of its own."""
        return MemoryClient(self)

    def now(self) -> Instant:
        """The present instant; leases that should have ended by then have. Hold the lock."""
        now = self.clock.now()
        before = self.keyspace.revision
        self.keyspace.end_leases(now)
        if self.keyspace.revision != before:
            self.changed.notify_all()
        return now


class MemoryClient(Store):
    """One user's end of a `MemoryStore`; a `rankwise.ports.store.Store`."""

    def __init__(self, shared: MemoryStore) -> None:
        self._shared = shared
        self.is_closed = False

    def read(self, prefix: str) -> Snapshot:
        """All entries whose keys begin with `prefix`."""
        with self._shared.changed:
            self._begin()
            return self._shared.keyspace.read(prefix)

    def commit(self, transaction: Transaction) -> Committed | Conflict:
        """Try a transaction."""
        with self._shared.changed:
            self._begin()
            result = self._shared.keyspace.commit(transaction)
            self._shared.changed.notify_all()
            return result

    def watch(self, prefix: str, after: Revision) -> "MemoryWatch":
        """Tell every change under `prefix` that is later than `after`."""
        return MemoryWatch(self._shared, self, prefix, after)

    def grant_lease(self, ttl: Duration) -> LeaseId:
        """A new lease."""
        with self._shared.changed:
            now = self._begin()
            lease = self._shared.keyspace.grant_lease(ttl, now)
            # Those who wait must wake when it ends.
            self._shared.changed.notify_all()
            return lease

    def renew_lease(self, lease: LeaseId) -> None:
        """Let the lease live for its whole time to live again."""
        with self._shared.changed:
            now = self._begin()
            self._shared.keyspace.renew_lease(lease, now)

    def revoke_lease(self, lease: LeaseId) -> None:
        """End the lease and delete its entries."""
        with self._shared.changed:
            self._begin()
            self._shared.keyspace.revoke_lease(lease)
            self._shared.changed.notify_all()

    def close(self) -> None:
        """End this client and its watches."""
        with self._shared.changed:
            self.is_closed = True
            self._shared.changed.notify_all()

    def _begin(self) -> Instant:
        if self.is_closed:
            raise StoreUnavailable("the memory store was closed by this client")
        return self._shared.now()


class MemoryWatch:
    """The changes under a prefix; a `rankwise.ports.store.Watch`."""

    def __init__(
        self, shared: MemoryStore, client: MemoryClient, prefix: str, after: Revision
    ) -> None:
        self._shared = shared
        self._client = client
        self._prefix = prefix
        self._reported = after
        self._is_closed = False

    def next(self, patience: Duration) -> tuple[Change, ...]:
        """Wait for the next changes; empty when there were none for `patience`."""
        with self._shared.changed:
            now = self._shared.now()
            give_up_at = after(now, patience)
            while not (self._is_closed or self._client.is_closed):
                changes = self._shared.keyspace.changes_after(self._reported, self._prefix)
                self._reported = max(self._reported, self._shared.keyspace.revision)
                if changes or now >= give_up_at:
                    return changes
                lease_ends_at = self._shared.keyspace.next_deadline
                wake_at = give_up_at if lease_ends_at is None else min(give_up_at, lease_ends_at)
                self._shared.changed.wait((wake_at - now) / SECOND)
                now = self._shared.now()
            return ()

    def close(self) -> None:
        """End the watch and wake a thread that waits in `next`."""
        with self._shared.changed:
            self._is_closed = True
            self._shared.changed.notify_all()
