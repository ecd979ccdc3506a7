"""The connection of a watch: one thread waits on it, and any thread may end it.

A thread that waits on a connection is the one that closes it: a descriptor that another thread had
closed could belong to another file by then. So ending a watch wakes that thread, which then lets
go of the connection; without one, the connection is closed at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from time import monotonic
from typing import Generic, Protocol, TypeVar

from rankwise.base.errors import StoreUnavailable
from rankwise.base.keys import Change
from rankwise.base.units import SECOND, Duration


class Wakeable(Protocol):
    """A connection that ends for the thread that waits on it when another one says so."""

    def wake(self) -> None:
        """End it; may be called from any thread."""
        ...


C = TypeVar("C", bound=Wakeable)


class WatchConnection(Generic[C]):
    """The connection that a watch has at a time, if any.

    Args:
        let_go: closes a connection.
        is_client_closed: whether the store's client was closed, which ends its watches.
        losses: what is raised when a connection is of no use any more, and another one is.
    """

    def __init__(
        self,
        let_go: Callable[[C], None],
        is_client_closed: Callable[[], bool],
        losses: tuple[type[Exception], ...],
    ) -> None:
        self._let_go = let_go
        self._is_client_closed = is_client_closed
        self._losses = losses
        self._lock = Lock()
        self._is_waiting = False
        self.current: C | None = None
        self.is_closed = False

    @property
    def is_over(self) -> bool:
        """Whether the watch or its client was closed."""
        return self.is_closed or self._is_client_closed()

    def next_changes(
        self,
        patience: Duration,
        connect: Callable[[], C],
        receive: Callable[[C, float], tuple[Change, ...] | None],
    ) -> tuple[Change, ...]:
        """Wait for changes, on one connection after the other; empty if there are none in time.

        Args:
            patience: how long to wait.
            connect: makes a connection, and hands it to `take`.
            receive: waits for the next message until an instant; None if there is none by then.
        """
        ends_at = monotonic() + patience / SECOND
        with self.waiting():
            while not self.is_over:
                try:
                    changes = receive(self.current or connect(), ends_at)
                    if changes is None or changes:
                        return changes or ()
                except self._losses:
                    self.hang_up()
                except StoreUnavailable:
                    if not self.is_over:
                        raise
        return ()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around whatever waits on the connection."""
        with self._lock:
            self._is_waiting = True
        try:
            yield
        finally:
            with self._lock:
                self._is_waiting = False
            if self.is_over:
                self.hang_up()

    def take(self, connection: C) -> None:
        """Wait on this connection from now on; if the watch is over, the wait ends at once."""
        with self._lock:
            self.current = connection
            if self.is_over:
                connection.wake()

    def hang_up(self) -> None:
        """Let go of the connection, if there is one."""
        with self._lock:
            connection, self.current = self.current, None
        if connection is not None:
            self._let_go(connection)

    def close(self) -> None:
        """End the watch and wake a thread that waits."""
        with self._lock:
            self.is_closed = True
            if self.current is not None and self._is_waiting:
                self.current.wake()  # who waits lets go of it
                return
        self.hang_up()
