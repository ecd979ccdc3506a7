"""A store that takes long to be opened, and is opened while others go on.

torch's TCPStore can only be made by waiting for its server, deep inside torch, where neither a
signal nor a deadline of ours reaches. Whether this machine has to serve an embedded store is known
when name servers have told. So a thread opens the store when the first call needs it; calls wait
for that as long as a request may take, and then say that no server answers. The error is raised by
the calls; a server that was not there may be there later, so another call tries again.
"""

from collections.abc import Callable
from threading import Condition, Thread

from rankwise.base.errors import ConfigError, StoreError, StoreRefused, StoreUnavailable
from rankwise.base.keys import Committed, Conflict, LeaseId, Revision, Snapshot, Transaction
from rankwise.base.units import SECOND, Duration, format_duration
from rankwise.ports.store import Store, Watch


class DeferredStore(Store):
    """Stands for the store that `open_store` makes; a `rankwise.ports.store.Store`.

    Args:
        open_store: makes the store; called in a thread, and again after it failed.
        who: the store, for messages.
        patience: how long a call waits for the opening.
        preparing: tells what this process does before it can ask the store; empty if it asks.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        who: str,
        patience: Duration,
        *,
        preparing: Callable[[], str] = str,
    ) -> None:
        self._open_store = open_store
        self._who = who
        self._patience = patience
        self._preparing = preparing
        self._changed = Condition()
        self._store: Store | None = None
        self._error: Exception | None = None
        self._is_opening = False
        self._is_closed = False

    def read(self, prefix: str) -> Snapshot:
        """All entries whose keys begin with `prefix`."""
        return self._opened().read(prefix)

    def commit(self, transaction: Transaction) -> Committed | Conflict:
        """Try a transaction."""
        return self._opened().commit(transaction)

    def watch(self, prefix: str, after: Revision) -> Watch:
        """Tell every change under `prefix` that is later than `after`."""
        return self._opened().watch(prefix, after)

    def follow(self, prefix: str) -> tuple[Snapshot, Watch]:
        """Read, and tell every change that is later than what was read."""
        return self._opened().follow(prefix)

    def grant_lease(self, ttl: Duration) -> LeaseId:
        """A new lease."""
        return self._opened().grant_lease(ttl)

    def renew_lease(self, lease: LeaseId) -> None:
        """Let the lease live for its whole time to live again."""
        self._opened().renew_lease(lease)

    def revoke_lease(self, lease: LeaseId) -> None:
        """End the lease and delete its entries."""
        self._opened().revoke_lease(lease)

    def close(self) -> None:
        """Close the store; one that is still being opened closes itself when it is."""
        self.__exit__(None, None, None)

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._is_closed = True
            store, self._store = self._store, None
            self._changed.notify_all()
        if store is not None:
            store.__exit__(*exc_info)

    def _opened(self) -> Store:
        with self._changed:
            if isinstance(self._error, StoreRefused):
                raise self._error  # it may have come while no call waited
            if self._store is None and not self._is_opening and not self._is_closed:
                self._is_opening = True
                self._error = None
                Thread(target=self._open, name="rankwise-store-opening", daemon=True).start()
            self._changed.wait_for(
                lambda: not self._is_opening or self._is_closed, self._patience / SECOND
            )
            if self._store is not None:
                return self._store
            if self._is_closed:
                raise StoreUnavailable(f"{self._who} was closed")
            if self._error is None and (preparing := self._preparing()):
                raise StoreUnavailable(f"this node is still {preparing}, which {self._who} needs")
            if self._error is None:
                raise StoreUnavailable(
                    f"no answer within {format_duration(self._patience)} from {self._who}",
                    hint="check --rdzv-endpoint, and whether the node that serves it has started",
                )
            raise self._error

    def _open(self) -> None:
        store, error = None, None
        try:
            store = self._open_store()
        except StoreError as failure:
            error = failure
        except ConfigError as failure:
            error = StoreRefused(failure.message, hint=failure.hint)
        except Exception as failure:  # noqa: BLE001  # told to the caller, as a refusal
            error = StoreRefused(f"{self._who} cannot be opened: {failure}")
        with self._changed:
            self._is_opening = False
            self._error = error
            if not self._is_closed:
                self._store, store = store, None
            self._changed.notify_all()
        if store is not None:
            unwanted = StoreUnavailable(f"{self._who} was closed before it was open")
            store.__exit__(type(unwanted), unwanted, None)  # it has no last words
