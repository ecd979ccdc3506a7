"""For how long a member of the run's own etcd serves after the end of the run.

The other nodes may still have to learn of the end, and need two members for that. So an agent that
knows it waits until no node is registered any more; or until both other members are gone, since one
alone serves no request.

The registered nodes are followed from the beginning. To ask for them at the end takes two members,
and the others leave as soon as they know that all know it: the last agents to learn it would wait
for an election, or in vain. A watch tells what its member knows, and needs no other one. A node
that has said goodbye may not have the answer yet, so there is a moment for that.

A member's death is seen as the end of a connection to its port. The connection of a member that
lives may also end for another reason: it is connected to again.
"""

import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from selectors import EVENT_READ, DefaultSelector
from threading import Event, Thread
from time import monotonic
from typing import Self

from rankwise.base.errors import StoreError, StoreRefused
from rankwise.base.units import SECOND, Duration
from rankwise.core.rendezvous.records import RunKeys
from rankwise.drivers.real.stores.names import Names
from rankwise.launch.cluster.etcd_beginning import PATIENCE_S
from rankwise.ports.store import Store

LAST_ANSWERS_S = 0.25
RETRY_PAUSE_S = 0.5
WATCH_PATIENCE = Duration(3600 * SECOND)
"""A watch is woken when its store is closed, so it may as well wait for long."""


class RegisteredNodes:
    """Follows which nodes are registered; enter it to begin.

    Args:
        store: a client of all members, which belongs to this object from now on.
        keys: of the run.
    """

    def __init__(self, store: Store, keys: RunKeys) -> None:
        self._store = store
        self._keys = keys
        self._registered: frozenset[str] | None = None
        """By their keys; None while that is not known."""
        self._is_closed = Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.settimeout(0)
        self._thread = Thread(target=self._follow, name="rankwise-etcd-nodes", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        self._store.__exit__(None, None, None)
        self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()

    def wait_until_none(self, others: Iterable[tuple[str, int]], patience: Duration) -> None:
        """Return when no node is registered, no member at `others` is alive, or it takes too long.

        Args:
            others: host and port of each other member.
            patience: how long to wait at most.
        """
        ends_at = monotonic() + patience / SECOND
        with ExitStack() as stack:
            selector = stack.enter_context(DefaultSelector())
            selector.register(self._wake_reader, EVENT_READ)
            peers = 0
            for host, port in others:
                peers += _connect(selector, stack, partial(Names().connect, host, port, PATIENCE_S))
            is_last_moment = False
            while peers:
                if self._registered == frozenset() and not is_last_moment:
                    is_last_moment, ends_at = True, min(ends_at, monotonic() + LAST_ANSWERS_S)
                for key, _ in selector.select(max(0.0, ends_at - monotonic())):
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket), "nothing else was registered"
                    if _has_ended(connection):
                        selector.unregister(connection)
                        connection.close()
                        peers -= not _connect(selector, stack, key.data)
                if monotonic() >= ends_at:
                    return

    def _follow(self) -> None:
        while not self._is_closed.is_set():
            try:
                self._follow_once()
            except StoreRefused:
                return
            except StoreError:
                self._is_closed.wait(RETRY_PAUSE_S)

    def _follow_once(self) -> None:
        snapshot, watch = self._store.follow(self._keys.nodes)
        registered = {entry.key for entry in snapshot.entries if self._is_of_node(entry.key)}
        while not self._is_closed.is_set():
            self._registered = frozenset(registered)
            self._tell()
            for change in watch.next(WATCH_PATIENCE):
                if change.value is None:
                    registered.discard(change.key)
                elif self._is_of_node(change.key):
                    registered.add(change.key)

    def _is_of_node(self, key: str) -> bool:
        return not key.startswith((self._keys.done_notes, self._keys.call_records_notes))

    def _tell(self) -> None:
        with suppress(BlockingIOError):  # the last byte is still unread, and wakes the thread
            self._wake_writer.send(b"!")


def _connect(
    selector: DefaultSelector, stack: ExitStack, connect: Callable[[], socket.socket]
) -> bool:
    """Have the end of a connection to a member told; whether there is one."""
    try:
        connection = stack.enter_context(connect())
    except OSError:
        return False
    selector.register(connection, EVENT_READ, connect)
    return True


def _has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(4096)
    except OSError:
        return True
