"""A store in torch's TCPStore, for clusters that have torch and no etcd.

One agent serves a TCPStore; all of them keep an ordered log in it and replay it (`c10d_log`), so it
has the transactions, watches and leases that torch's stores lack. Any other store of torch will do,
too, as long as a process looks after leases.

A watch waits inside torch until the log has another entry, where nothing can wake it; so closing it
writes an entry that does nothing. Leases must be polled, since torch's stores offer nothing else:
the *reaper*, a thread in the process that serves, asks for the counters of all leases a few times
in the life of the shortest one, and ends those without a renewal, by its own clock.

It does not survive the agent that serves, or its machine. torch's client never connects anew, so a
connection that was lost is lost for good: `StoreUnavailable`, and the same again. A server that is
stopped, but not dead, blocks its clients inside torch for as long. For more, use etcd.
"""

import errno
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any, cast

import msgspec

from rankwise.base.errors import ConfigError, LeaseLost, StoreError, StoreUnavailable
from rankwise.base.keys import Change, Committed, Conflict, LeaseId, Revision, Snapshot, Transaction
from rankwise.base.units import SECOND, ZERO, Duration, Instant, after
from rankwise.drivers.real.loopback import loopback_address
from rankwise.drivers.real.stores.addresses import is_here
from rankwise.drivers.real.stores.c10d_log import (
    NO_TIME,
    CommitEntry,
    EndEntry,
    GrantEntry,
    LiveLease,
    LogEntry,
    NothingEntry,
    ReplayedLog,
    Result,
    TorchStoreMethods,
)
from rankwise.drivers.real.stores.connections import endpoint_text
from rankwise.drivers.real.stores.patience import closed_error, describe
from rankwise.drivers.real.stores.port_owner import (
    STRANGER_PATIENCE_S,
    mark_port,
    port_owner,
    refuse_stranger,
)
from rankwise.ports.clock import Clock
from rankwise.ports.store import Store

LINGER_LOOKS_S = 0.05
"""How often one who serves looks at its end whether the others have gone."""
FAREWELL_S = 2.0
"""How long a client that leaves waits for the server at most."""
LOG_LEVEL_VARIABLE = "TORCH_CPP_LOG_LEVEL"
SLICE = timedelta(seconds=5)
"""How long a thread waits inside torch at a time, at most; a written entry wakes it sooner."""
LOOKS_PER_LIFE = 5
"""How often the reaper looks at a lease while it could live without being renewed."""
REAPER_PAUSE_S = 0.5
"""The longest pause of the reaper: new leases are only seen by looking, and may be short."""
LATER_CONNECTIONS = timedelta(seconds=10)
"""How long a further connection may take, once there has been one."""
AWAY = Duration(1 * SECOND)
"""A reaper that looks so much too late was stopped, and so were the server's ears."""


class C10dConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where torch's TCPStore is.

    Attributes:
        host, port: its address.
        namespace: separates runs that share it.
        is_host: whether this process serves; None: if `host` is an address of this machine, and
            none serves there yet.
        connect_timeout: how long to wait for the server to come up.
        linger: how long the server waits at its end for the others to read the last words.
    """

    host: str
    port: int
    namespace: str
    is_host: bool | None = None
    connect_timeout: Duration = Duration(60 * SECOND)
    linger: Duration = Duration(5 * SECOND)


def open_c10d(config: C10dConfig, clock: Clock) -> "C10dStore":
    """Serve or join torch's TCPStore.

    Raises:
        ConfigError: torch is not installed, or this process must serve and cannot.
        StoreUnavailable: there is no server.
    """
    distributed = _import_torch()
    who = f"torch's TCPStore at {endpoint_text(config.host, config.port)}"
    serves = _is_to_serve(config)
    if not serves and config.is_host is None and is_here(config.host):
        return _client(_joined(distributed, config, who), config, who, clock)
    try:
        store = _tcp_store(distributed, config, serves=serves)
    except Exception as error:
        if serves and config.is_host is None:
            # Another agent of this machine was quicker.
            serves, store = False, _joined(distributed, config, who)
        elif serves:
            raise ConfigError(
                f"{who} cannot be served: {_first_line(error)}{_by_owner(config)}",
                hint="give another --rdzv-endpoint, or is_host=0 where another agent serves",
            ) from error
        else:
            raise _nobody_serves(config, who, error) from error
    return _client(store, config, who, clock, serves=serves)


def _client(
    store: Any, config: C10dConfig, who: str, clock: Clock, *, serves: bool = False
) -> "C10dStore":
    store.set_timeout(min(LATER_CONNECTIONS, store.timeout))
    return C10dStore(
        store,
        namespace=config.namespace,
        who=who,
        clock=clock,
        reaps=serves,
        linger=config.linger if serves else ZERO,
        mark=mark_port(store.port) if serves else None,
    )


def open_file(path: str, namespace: str, clock: Clock) -> "C10dStore":
    """A store in a file that all nodes see, by torch's FileStore: for one machine, and for tests.

    No process serves it, so every client looks after all leases.

    Raises:
        ConfigError: torch is not installed, or the file cannot be used.
    """
    distributed = _import_torch()
    try:
        # torch itself would try for minutes.
        with open(path, "ab"):
            pass
    except OSError as error:
        raise ConfigError(
            f"torch's FileStore cannot use the file {path!r}: {describe(error)}",
            hint="give --rdzv-endpoint a path in a directory that exists",
        ) from error
    store = distributed.FileStore(path)
    return C10dStore(
        store, namespace=namespace, who=f"torch's FileStore {path}", clock=clock, reaps=True
    )


class C10dStore(Store):
    """A store in one of torch's stores; a `rankwise.ports.store.Store`.

    Args:
        store: torch's TCPStore, or any other; one that cannot be cloned is used by all threads.
        namespace: separates this log from other keys in it.
        who: names it in errors.
        clock: counts leases if this client reaps.
        reaps: whether this client ends leases without a renewal. One of all clients must.
        linger: how long closing waits for the other clients to close.
        mark: tells others that a store is served at that port, until this is closed.
    """

    def __init__(
        self,
        store: Any,
        *,
        namespace: str,
        clock: Clock,
        who: str = "torch's store",
        reaps: bool = False,
        linger: Duration = ZERO,
        mark: socket.socket | None = None,
    ) -> None:
        self._torch_store = store
        self._mark = mark
        self._who = who
        self._log = ReplayedLog(f"rankwise-log/{namespace}", who)
        self._closed = Event()
        self._ended = Event()
        self._lock = Lock()
        self.waiting: set[C10dWatch] = set()
        """Watches in which a thread waits."""
        self._linger_s = linger / SECOND
        self._connection: TorchStoreMethods = store
        self._log.count_clients(self._connection, 1)
        self._reaper: Thread | None = None
        if reaps:
            # Leases are looked after until the others have gone, too.
            reaper = _Reaper(self._log, self.clone(), clock, self._ended)
            self._reaper = Thread(target=reaper.run, name="rankwise-reaper", daemon=True)
            self._reaper.start()

    def read(self, prefix: str) -> Snapshot:
        """All entries whose keys begin with `prefix`."""
        with self._lock:
            self._check_open()
            self._log.catch_up(self._connection)
        with self._log.changed:
            return self._log.keyspace.read(prefix)

    def commit(self, transaction: Transaction) -> Committed | Conflict:
        """Try a transaction."""
        result = self._append(lambda author, number: CommitEntry(author, number, transaction))
        return cast("Committed | Conflict", result)

    def watch(self, prefix: str, after: Revision) -> "C10dWatch":
        """Tell every change under `prefix` that is later than `after`."""
        return C10dWatch(self, prefix, after)

    def grant_lease(self, ttl: Duration) -> LeaseId:
        """A new lease, which the reaper looks after."""
        return cast("LeaseId", self._append(lambda author, number: GrantEntry(author, number, ttl)))

    def renew_lease(self, lease: LeaseId) -> None:
        """Let the lease live for its whole time to live again."""
        with self._lock:
            self._check_open()
            self._log.beat(self._connection, lease)
            self._log.catch_up(self._connection)
        with self._log.changed:
            self._log.keyspace.renew_lease(lease, NO_TIME)

    def revoke_lease(self, lease: LeaseId) -> None:
        """End the lease and delete its entries."""
        self._append(lambda author, number: EndEntry(author, number, lease))

    def close(self) -> None:
        """End this client's threads and watches; if it serves, when the others have ended, too."""
        self._close(self._linger_s)

    def _close(self, linger_s: float) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        if self.waiting:
            self.wake_waiting()
        # By a thread: torch blocks for as long as its server's machine is silent.
        farewell = Thread(
            target=self._say_farewell, args=(linger_s,), name="rankwise-farewell", daemon=True
        )
        farewell.start()
        farewell.join(linger_s + FAREWELL_S)
        self._ended.set()
        if self._reaper is not None:
            self._reaper.join()
        if self._mark is not None:
            self._mark.close()

    def _say_farewell(self, linger_s: float) -> None:
        with suppress(StoreError), self._lock:
            others = self._log.count_clients(self._connection, -1)
            deadline = monotonic() + linger_s
            pause = Event()
            while others > 0 and monotonic() < deadline:
                pause.wait(LINGER_LOOKS_S)  # torch's stores have no watch for a counter
                others = self._log.count_clients(self._connection, 0)

    def __exit__(self, *exc_info: object) -> None:
        self._close(self._linger_s if not any(exc_info) else 0)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    @property
    def log(self) -> ReplayedLog:
        """The replica of the log that all watches share."""
        return self._log

    def wake_waiting(self) -> None:
        """Write an entry that does nothing, for those who wait; by a thread, as torch may block."""
        Thread(target=self._write_nothing, name="rankwise-wake", daemon=True).start()

    def _write_nothing(self) -> None:
        # A server that does not answer has woken them already.
        with suppress(StoreError), self._lock:
            self._log.append(self._connection, NothingEntry)

    def _append(self, make: Callable[[bytes, int], LogEntry]) -> Result:
        with self._lock:
            self._check_open()
            result = self._log.append(self._connection, make)
        if isinstance(result, LeaseLost):
            raise result
        return result

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise closed_error(self._who)

    def clone(self) -> TorchStoreMethods:
        """A connection of its own, where the store can make one."""
        try:
            clone = getattr(self._torch_store, "clone", lambda: self._torch_store)
            return cast("TorchStoreMethods", clone())
        except RuntimeError as error:
            raise StoreUnavailable(f"{self._who} does not answer: {_first_line(error)}") from error


class C10dWatch:
    """The changes under a prefix; a `rankwise.ports.store.Watch`."""

    def __init__(self, store: C10dStore, prefix: str, after: Revision) -> None:
        self._store = store
        self._prefix = prefix
        self._reported = after
        self._connection: TorchStoreMethods | None = None
        self._closed = Event()

    def next(self, patience: Duration) -> tuple[Change, ...]:
        """Wait for the next changes; empty when there were none for `patience`."""
        self._store.waiting.add(self)
        try:
            return self._next(timedelta(microseconds=patience // 1000))
        finally:
            self._store.waiting.discard(self)

    def close(self) -> None:
        """End the watch and wake a thread that waits in `next`."""
        self._closed.set()
        if self in self._store.waiting and not self._store.is_closed:
            self._store.wake_waiting()

    def _next(self, left: timedelta) -> tuple[Change, ...]:
        while True:
            place = self._store.log.position
            if self._closed.is_set() or self._store.is_closed:
                return ()
            if changes := self._changes():
                return changes
            if left <= timedelta(0):
                return ()
            if self._connection is None:
                self._connection = self._store.clone()
            # torch counts milliseconds, and takes nothing for no limit.
            part = max(min(left, SLICE), timedelta(milliseconds=1))
            if not self._store.log.wait_for(self._connection, place, part):
                left -= part

    def _changes(self) -> tuple[Change, ...]:
        log = self._store.log
        with log.changed:
            changes = log.keyspace.changes_after(self._reported, self._prefix)
            self._reported = max(self._reported, log.keyspace.revision)
            return changes


class _Reaper:
    """Ends leases without a renewal; see the module's text."""

    def __init__(
        self, log: ReplayedLog, connection: TorchStoreMethods, clock: Clock, closed: Event
    ) -> None:
        self._log = log
        self._connection = connection
        self._clock = clock
        self._closed = closed
        self._known: dict[LeaseId, _Watched] = {}
        self._looks_at = clock.now()

    def run(self) -> None:
        """Look again and again until the client is closed."""
        while not self._closed.is_set():
            try:
                self._look()
            except StoreError:
                return  # the server is gone for good, and all leases with it
            self._closed.wait(self._pause_s())

    def _pause_s(self) -> float:
        shortest = min((known.granted.ttl for known in self._known.values()), default=None)
        pause_s = REAPER_PAUSE_S
        if shortest is not None:
            pause_s = min(pause_s, shortest / SECOND / LOOKS_PER_LIFE)
        self._looks_at = after(self._clock.now(), Duration(round(pause_s * SECOND)))
        return pause_s

    def _look(self) -> None:
        self._log.catch_up(self._connection)
        with self._log.changed:
            granted = sorted(self._log.leases.values())
        for one in granted:
            if one.lease not in self._known:
                self._log.beat(self._connection, one.lease, 0)
        counts = (
            self._log.beats_of(self._connection, [one.lease for one in granted]) if granted else []
        )
        now = self._clock.now()
        was_away = now > after(self._looks_at, AWAY)
        self._known = {
            one.lease: self._seen(one, count, now, was_away=was_away)
            for one, count in zip(granted, counts, strict=True)
        }
        for known in self._known.values():
            if now >= after(known.alive_at, known.granted.ttl):
                lease = known.granted.lease
                self._log.append(
                    self._connection,
                    lambda author, number, lease=lease: EndEntry(author, number, lease),  # type: ignore[misc]
                )

    def _seen(self, granted: LiveLease, beats: int, now: Instant, *, was_away: bool) -> "_Watched":
        before = self._known.get(granted.lease)
        if before is None or before.beats != beats or was_away:
            return _Watched(granted, beats, now)
        return before


class _Watched(msgspec.Struct, frozen=True):
    """A lease, how often it had been renewed, and when the reaper first saw that number."""

    granted: LiveLease
    beats: int
    alive_at: Instant


def require_torch() -> None:
    """Look whether torch is installed, without the seconds that importing it takes.

    Raises:
        ConfigError: it is not.
    """
    from importlib.util import find_spec  # noqa: PLC0415 -- with the store only

    try:
        is_there = find_spec("torch") is not None
    except ValueError:  # its entry in sys.modules says that it cannot be imported
        is_there = False
    if not is_there:
        raise _torch_is_missing()


def _torch_is_missing() -> ConfigError:
    return ConfigError(
        "the c10d store needs PyTorch, which cannot be imported",
        hint="pip install 'rankwise[torch]', or use --rdzv-backend embedded, which needs"
        " nothing, or etcd",
    )


_importing = Event()


def preparing() -> str:
    """What this process does before it can ask a store of torch; empty if nothing."""
    return "importing torch" if _importing.is_set() else ""


def _import_torch() -> Any:
    _importing.set()
    try:
        with _quiet_torch():
            from torch import distributed  # noqa: PLC0415 -- takes seconds, and may be absent
    except ImportError as error:
        raise _torch_is_missing() from error
    finally:
        _importing.clear()
    if not distributed.is_available():
        raise ConfigError(
            "the c10d store needs torch.distributed, which this build of PyTorch lacks",
            hint="use --rdzv-backend embedded, which needs nothing, or etcd",
        )
    return distributed


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Import torch so that its C++ does not write about every wait that ends; workers are theirs.

    It looks at the variable when it is loaded, and never again.
    """
    if LOG_LEVEL_VARIABLE in os.environ or "torch" in sys.modules:
        yield
        return
    os.environ[LOG_LEVEL_VARIABLE] = "ERROR"
    try:
        yield
    finally:
        del os.environ[LOG_LEVEL_VARIABLE]


def _is_to_serve(config: C10dConfig) -> bool:
    if config.is_host is not None:
        return config.is_host
    if not is_here(config.host):
        return False
    # Asked before torch is, which reports a taken port on the screen, with its stack.
    try:
        with socket.create_server(("", config.port)):
            return True
    except OSError as error:
        return error.errno != errno.EADDRINUSE


def _tcp_store(distributed: Any, config: C10dConfig, *, serves: bool) -> Any:
    return distributed.TCPStore(
        # torch knows no other address of it than the file of names tells.
        loopback_address() if config.host == "localhost" else config.host,
        config.port,
        is_master=serves,
        timeout=timedelta(microseconds=config.connect_timeout // 1000),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _joined(distributed: Any, config: C10dConfig, who: str) -> Any:
    """A client of the store that another process of this machine serves, at a port that is taken.

    Raises:
        StoreRefused: that one is no agent, and has not answered as a store does, or not soon.
        StoreUnavailable: it has not answered within the whole patience.
    """
    answers: SimpleQueue[Any] = SimpleQueue()

    def join() -> None:
        try:
            answers.put(_tcp_store(distributed, config, serves=False))
        except Exception as error:  # noqa: BLE001  # raised in the thread that waits
            answers.put(error)

    # By a thread: torch waits for ever for one that accepts connections and says nothing.
    Thread(target=join, name="rankwise-store-joining", daemon=True).start()
    patience_s = config.connect_timeout / SECOND
    first_s = min(patience_s, STRANGER_PATIENCE_S)
    for wait_s in (first_s, patience_s - first_s):
        try:
            answer = answers.get(timeout=wait_s)
        except Empty:
            answer = TimeoutError("it accepts connections, and says nothing")
        else:
            break
        refuse_stranger(config.host, config.port)
    if not isinstance(answer, Exception):
        return answer
    refuse_stranger(config.host, config.port)
    raise _nobody_serves(config, who, answer) from answer


def _nobody_serves(config: C10dConfig, who: str, error: Exception) -> StoreUnavailable:
    return StoreUnavailable(
        f"no answer within {config.connect_timeout / SECOND:.3g} s from {who}:"
        f" {_first_line(error)}{_by_owner(config)}",
        hint="start the agent on that machine, or check --rdzv-endpoint",
    )


def _by_owner(config: C10dConfig) -> str:
    owner = port_owner(config.port) if is_here(config.host) else None
    return "" if owner is None or owner.is_rankwise else f"; {owner} listens at that port"


def _first_line(error: BaseException) -> str:
    return next(iter(describe(error).splitlines()), type(error).__name__)
