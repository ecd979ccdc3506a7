"""The door to what nodes share: revisioned keys with transactions, watches and leases.

The model is etcd's (`rankwise.base.keys` has the words). Calls block, at most for the store's own
request timeout, and may come from any thread; a caller that must not block gives them to a thread.
Every implementation proves itself with `rankwise.testing.conformance.check_store`.
"""

from typing import Protocol, Self

from rankwise.base.keys import (
    Change,
    Committed,
    Conflict,
    LeaseId,
    Revision,
    Snapshot,
    Transaction,
)
from rankwise.base.units import Duration


class Watch(Protocol):
    """The changes under a prefix, in order, none missing, none twice.

    One thread at a time may wait in it; any may close it.
    """

    def next(self, patience: Duration) -> tuple[Change, ...]:
        """Wait for the next changes; empty when there were none for `patience`, or it is closed.

        All changes of one transaction come together. After an error the watch stays good, and may
        be asked again from where it was; only `Compacted` ends it.

        Raises:
            Compacted: the store has forgotten changes that were not yet told; read anew, and watch
                after that.
            StoreUnavailable: no member answers.
            StoreRefused: a member answers, and does not let us in any more.
        """
        ...

    def close(self) -> None:
        """End the watch and wake a thread that waits in `next`, which then returns nothing."""
        ...


class Store(Protocol):
    """A store that several nodes share.

    Every call raises `StoreUnavailable` without an answer, naming who was tried and for how long,
    or if the store was closed; and `StoreRefused` if the store answers but refuses access. Keys are
    not empty; a prefix may be, and then means everything.
    """

    def read(self, prefix: str) -> Snapshot:
        """All entries whose keys begin with `prefix`."""
        ...

    def commit(self, transaction: Transaction) -> Committed | Conflict:
        """Try a transaction.

        After `StoreUnavailable` it may or may not have taken place: read before trying again.

        Raises:
            LeaseLost: a lease that a put names does not exist any more.
        """
        ...

    def watch(self, prefix: str, after: Revision) -> Watch:
        """Tell every change under `prefix` that is later than `after`.

        No connection is made yet: `Watch.next` raises if the store does not answer.
        """
        ...

    def follow(self, prefix: str) -> tuple[Snapshot, Watch]:
        """Read, and tell every change that is later than what was read: both at once.

        The same as `read`, then `watch` after the snapshot's revision; a store that is slow to go
        back in time for a watch begins it first.
        """
        snapshot = self.read(prefix)
        return snapshot, self.watch(prefix, snapshot.revision)

    def grant_lease(self, ttl: Duration) -> LeaseId:
        """A new lease that ends `ttl` after its last renewal, by the store's own clock.

        A store may round `ttl` up to its own grain (etcd: whole seconds).
        """
        ...

    def renew_lease(self, lease: LeaseId) -> None:
        """Let the lease live for its whole time to live again.

        Raises:
            LeaseLost: it has ended, and its entries with it.
        """
        ...

    def revoke_lease(self, lease: LeaseId) -> None:
        """End the lease and delete its entries, now; nothing happens if it has ended."""
        ...

    def close(self) -> None:
        """Let go of connections and threads; leases are left to end by themselves.

        Waits in other threads, in a watch too, end.
        """
        ...

    def __enter__(self) -> Self:
        """The store itself; it is closed on leaving."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the store. After an exception it has no last messages to deliver."""
        self.close()
