"""A machine's orders for the store become calls of a blocking store, in threads of this client.

Who owns what: the client owns the store, from its opening to its end, and its threads: one that
makes the calls, in the order of the orders; and one for each watch that is open. Answers come from
these threads, through `tell`, which must be callable from any thread; whoever has a reactor posts
them into it.

- The store does not answer: the order's answer is `RequestFailed`; the next order tries again. The
  opening of the store is part of the first order that needs it, so a store that is not there yet
  delays nobody else.
- A watch meets an error: it goes on where it was after `RETRY_PAUSE`, since nobody else would; only
  forgotten changes end it (`WatchLost`).
- `close` ends every wait; answers that were still under way are not told any more.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Self

from rankwise.base.errors import Compacted, LeaseLost, StoreError, StoreRefused, StoreUnavailable
from rankwise.base.keys import Committed
from rankwise.base.units import MILLISECOND, SECOND, Duration
from rankwise.core.rendezvous.requests import (
    Answer,
    Commit,
    EndWatch,
    GrantLease,
    KeysChanged,
    KeysRead,
    LeaseEnded,
    LeaseGranted,
    LeaseRenewed,
    LeaseRevoked,
    Order,
    ReadKeys,
    RenewLease,
    RequestFailed,
    RevokeLease,
    StoreDenied,
    TransactionCommitted,
    TransactionConflicted,
    WatchKeys,
    WatchLost,
)
from rankwise.ports.store import Store, Watch

WATCH_PATIENCE = Duration(60 * SECOND)
"""How long one call of `Watch.next` waits; closing the watch wakes it earlier."""
RETRY_PAUSE = Duration(500 * MILLISECOND)
JOIN_PATIENCE_S = 3.0
"""How long `close` waits for threads; they are daemons, so that a stuck one keeps nobody."""


class StoreClient:
    """Carries out the orders of one machine.

    Args:
        open_store: makes the store; called in a thread of the client, and again after it failed.
        tell: takes the answers, from any thread.
    """

    def __init__(self, open_store: Callable[[], Store], tell: Callable[[Answer], None]) -> None:
        self._open_store = open_store
        self._tell = tell
        self._store: Store | None = None
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._watches: dict[int, Watch] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._caller = threading.Thread(target=self._work, name="rankwise-store", daemon=True)
        self._watchers: list[threading.Thread] = []
        self._caller.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def carry_out(self, order: Order) -> None:
        """Take an order; its answer comes through `tell`."""
        self._orders.put(order)

    def close(self) -> None:
        """End all calls and watches, and close the store. Harmless the second time."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._orders.put(None)
        with self._lock:
            watches = list(self._watches.values())
            self._watches.clear()
            store = self._store
        for watch in watches:
            watch.close()
        if store is not None:
            store.close()
        for thread in (self._caller, *self._watchers):
            thread.join(JOIN_PATIENCE_S)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None and not self._closing.is_set():
            answer = self._answer_to(order)
            if answer is not None and not self._closing.is_set():
                self._tell(answer)

    def _answer_to(self, order: Order) -> Answer | None:
        if isinstance(order, EndWatch):
            self._end_watch(order.token)
            return None
        try:
            return self._call(self._opened(), order)
        except LeaseLost:
            return LeaseEnded(order.token)
        except StoreRefused as error:
            return StoreDenied(order.token, error.message, error.hint or "")
        except StoreError as error:
            return RequestFailed(order.token, str(error))

    def _opened(self) -> Store:
        if self._store is None:
            store = self._open_store()
            with self._lock:
                self._store = store
            if self._closing.is_set():
                store.close()
                raise StoreUnavailable("the client was closed")
        return self._store

    def _call(self, store: Store, order: Order) -> Answer | None:
        match order:
            case ReadKeys():
                return KeysRead(order.token, store.read(order.prefix))
            case Commit():
                result = store.commit(order.transaction)
                if isinstance(result, Committed):
                    return TransactionCommitted(order.token, result.revision)
                return TransactionConflicted(order.token, result.revision)
            case GrantLease():
                return LeaseGranted(order.token, store.grant_lease(order.ttl))
            case RenewLease():
                store.renew_lease(order.lease)
                return LeaseRenewed(order.token)
            case RevokeLease():
                store.revoke_lease(order.lease)
                return LeaseRevoked(order.token)
            case WatchKeys():
                self._begin_watch(store, order)
                return None
            case EndWatch():
                raise AssertionError("ended before a store is needed")

    def _begin_watch(self, store: Store, order: WatchKeys) -> None:
        watch = store.watch(order.prefix, order.after)
        with self._lock:
            self._watches[order.token] = watch
        thread = threading.Thread(
            target=self._follow, args=(order.token, watch), name="rankwise-watch", daemon=True
        )
        self._watchers = [other for other in self._watchers if other.is_alive()]
        self._watchers.append(thread)
        thread.start()

    def _follow(self, token: int, watch: Watch) -> None:
        while self._is_watching(token):
            try:
                changes = watch.next(WATCH_PATIENCE)
            except Compacted as error:
                if self._is_watching(token):
                    self._tell(WatchLost(token, error.message))
                self._end_watch(token)
                return
            except StoreError:
                # Requests meet the same error and tell of it; a watch only has to come back.
                self._closing.wait(RETRY_PAUSE / SECOND)
                continue
            if changes and self._is_watching(token):
                self._tell(KeysChanged(token, changes))

    def _is_watching(self, token: int) -> bool:
        with self._lock:
            return token in self._watches

    def _end_watch(self, token: int) -> None:
        with self._lock:
            watch = self._watches.pop(token, None)
        if watch is not None:
            watch.close()
