"""For how long a member of the run's own etcd serves after the end of the run.

The other nodes may still have to hear of the end, and need two members for that. So an agent that
knows it waits until no node is registered any more; or until both other members are gone, since
nobody can be told anything by one alone, and it could not even ask who is left. The agents that
have heard last find themselves in that place: the others have left upon their goodbye.

A member's death is seen as the end of a connection to its port. What ends a connection of a member
that lives is its own business: it is connected to again.
"""

import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from selectors import EVENT_READ, DefaultSelector
from threading import Thread
from time import monotonic

from rankwise.base.errors import StoreError
from rankwise.base.units import SECOND, Duration
from rankwise.core.rendezvous.layout import RunKeys
from rankwise.drivers.real.stores.names import Names
from rankwise.launch.cluster.etcd_beginning import PATIENCE_S
from rankwise.ports.store import Store


def wait_for_others(
    open_etcd: Callable[[], Store],
    keys: RunKeys,
    others: Iterable[tuple[str, int]],
    patience: Duration,
) -> None:
    """Return when no node needs this machine's member any more, or patience is over.

    Args:
        open_etcd: makes a client of all members.
        keys: of the run.
        others: host and port of each other member.
        patience: how long to wait at most.
    """
    ends_at = monotonic() + patience / SECOND
    with ExitStack() as stack:
        selector = stack.enter_context(DefaultSelector())
        told, telling = map(stack.enter_context, socket.socketpair())
        selector.register(told, EVENT_READ)
        peers = 0
        for host, port in others:
            peers += _connect(selector, stack, partial(Names().connect, host, port, PATIENCE_S))
        store = open_etcd()
        listener = Thread(target=_tell_when_alone, args=(store, keys, ends_at, telling))
        stack.callback(listener.join)
        stack.enter_context(store)  # whose closing wakes the thread
        listener.start()
        while peers and (left_s := ends_at - monotonic()) > 0:
            for key, _ in selector.select(left_s):
                if key.fileobj is told:
                    return
                assert isinstance(key.fileobj, socket.socket), "nothing else was registered"
                if _has_ended(key.fileobj):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                    peers -= not _connect(selector, stack, key.data)


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


def _tell_when_alone(store: Store, keys: RunKeys, ends_at: float, telling: socket.socket) -> None:
    """In a thread: say so when no node is registered any more."""
    with suppress(StoreError):
        snapshot, watch = store.follow(keys.nodes)
        names = (entry.key for entry in snapshot.entries)
        alive = {name for name in names if not name.startswith(keys.done_notes)}
        while alive and (left_s := ends_at - monotonic()) > 0:
            for change in watch.next(Duration(int(left_s * SECOND))):
                if change.value is None:
                    alive.discard(change.key)
        telling.send(b"!")
