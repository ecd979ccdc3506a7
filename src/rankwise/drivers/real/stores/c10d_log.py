"""An ordered log in one of torch's stores, and a keyspace that replays it.

torch's stores have counters, compare-and-set and a wait for keys; they have no transactions, no
watches and no leases. So nothing is kept in them but a log of what was asked for: an entry takes
the next number from a counter and is put under that number if nothing is there. Every client
replays all entries, in order, into a keyspace of its own, and since equal entries make equal
keyspaces, all of them come to the same results; the one who wrote an entry finds its own result
when it replays it.

A writer that dies between taking a number and putting its entry leaves a hole. A reader that has
waited at one for `HOLE_PATIENCE` fills it with an entry that does nothing; if the writer was only
slow, it finds the place taken, and tries the next one.

The log grows with every change and is never shortened.
"""

from collections.abc import Callable
from datetime import timedelta
from secrets import token_bytes
from threading import Condition, Lock
from typing import Any, NamedTuple, Protocol

import msgspec

from rankwise.base.errors import LeaseLost, StoreUnavailable
from rankwise.base.keys import Committed, Conflict, LeaseId, Transaction
from rankwise.base.units import Duration, Instant
from rankwise.core.keyspace.machine import Keyspace

HOLE_PATIENCE = timedelta(seconds=1)
BATCH = 256
"""How many entries are fetched at once."""
NO_TIME = Instant(0)
"""A replica counts no time: leases end when an entry says so."""


class TorchStoreMethods(Protocol):
    """What is needed of a store of torch; its own stores have more."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, from 0; its new value."""
        ...

    def compare_set(self, key: str, expected: str, desired: Any, /) -> bytes:
        """Set a key if it is as expected (empty: not there); what is there then."""
        ...

    def set(self, key: str, value: Any, /) -> None:
        """Set a key, and wake those who wait for it."""
        ...

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """The values of keys that are there."""
        ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until all keys are there; an exception if they are not, or without an answer."""
        ...


class CommitEntry(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """A transaction was asked for."""

    author: bytes
    number: int
    transaction: Transaction


class GrantEntry(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """A lease was asked for."""

    author: bytes
    number: int
    ttl: Duration


class EndEntry(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """A lease was revoked, or was not renewed in time."""

    author: bytes
    number: int
    lease: LeaseId


class NothingEntry(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """A hole was filled, or waiting clients are to be woken."""

    author: bytes
    number: int


LogEntry = CommitEntry | GrantEntry | EndEntry | NothingEntry
# Made here, since two threads that meet a type for the first time at once crash msgspec (0.22).
_decode_entry = msgspec.msgpack.Decoder[LogEntry](LogEntry).decode
Result = Committed | Conflict | LeaseId | LeaseLost | None


class LiveLease(NamedTuple):
    """A lease that is alive, for the one that looks after it."""

    lease: LeaseId
    ttl: Duration


class ReplayedLog:
    """One client's replica of the log.

    Any thread may call; each hands in the connection that it waits on, since a connection that
    waits can do nothing else.

    Args:
        namespace: separates the log from other keys in the same store.
        who: names the store in errors.
    """

    def __init__(self, namespace: str, who: str) -> None:
        self.keyspace = Keyspace()
        self.changed = Condition(Lock())
        """Guards the keyspace, and is notified when it has moved on."""
        self.leases: dict[LeaseId, LiveLease] = {}
        self._namespace = namespace
        self._who = who
        self._author = token_bytes(8)
        self._entries_written = 0
        self._position = 0  # of the next entry to replay
        self._results: dict[int, Result] = {}

    def append(
        self, connection: TorchStoreMethods, make: Callable[[bytes, int], LogEntry]
    ) -> Result:
        """Write an entry and replay the log up to it; its result.

        Args:
            connection: to write with.
            make: makes the entry from its author and number.

        Raises:
            StoreUnavailable: whether it was written is unknown.
        """
        with self.changed:
            self._entries_written += 1
            number = self._entries_written
        entry = msgspec.msgpack.encode(make(self._author, number))
        while True:
            place = self._ask(lambda: connection.add(self._counter, 1)) - 1
            if self._put(connection, place, entry):
                break
        self.catch_up(connection, place + 1)
        with self.changed:
            return self._results.pop(number)

    def catch_up(self, connection: TorchStoreMethods, end: int | None = None) -> None:
        """Replay all entries before `end`; None: all whose number was taken."""
        if end is None:
            end = self._ask(lambda: connection.add(self._counter, 0))
        while True:
            with self.changed:
                start = self._position
            if start >= end:
                return
            keys = [self._key(place) for place in range(start, min(end, start + BATCH))]
            if not self.is_there(connection, keys, HOLE_PATIENCE):
                self._fill_holes(connection, range(start, start + len(keys)))
            self._replay(start, self._ask(lambda keys=keys: connection.multi_get(keys)))  # type: ignore[misc]

    @property
    def position(self) -> int:
        """The place of the next entry to replay."""
        with self.changed:
            return self._position

    def wait_for(self, connection: TorchStoreMethods, place: int, patience: timedelta) -> bool:
        """Wait until there is an entry at a place, and replay it; False if none comes.

        The place is the position *before* the caller looked whether there is anything to do: what
        another thread replays meanwhile then ends the wait at once, and is not slept through.
        """
        if not self.is_there(connection, [self._key(place)], patience):
            return False
        self.catch_up(connection)
        return True

    def is_there(self, connection: TorchStoreMethods, keys: list[str], patience: timedelta) -> bool:
        """Wait for keys, at most for `patience`."""
        try:
            connection.wait(keys, patience)
        except Exception as error:  # noqa: BLE001  # whatever torch raises
            # Neither the type nor the words of a wait that is over are the same in all of torch's
            # stores and versions; but the store still answers then.
            try:
                connection.add(self._counter, 0)
            except Exception:  # noqa: BLE001  # the first one says more
                raise self._lost(error) from error
            return False
        return True

    def count_clients(self, connection: TorchStoreMethods, change: int) -> int:
        """Count one who comes (1), goes (-1), or only asks (0); how many there are now."""
        return int(self._ask(lambda: connection.add(f"{self._namespace}/clients", change)))

    def beats_of(self, connection: TorchStoreMethods, leases: list[LeaseId]) -> list[int]:
        """How often each of these leases was renewed."""
        keys = [self._beats(lease) for lease in leases]
        return [int(value) for value in self._ask(lambda: connection.multi_get(keys))]

    def beat(self, connection: TorchStoreMethods, lease: LeaseId, amount: int = 1) -> None:
        """Renew a lease, for the one that looks after it to see; 0 just makes the counter."""
        self._ask(lambda: connection.add(self._beats(lease), amount))

    @property
    def _counter(self) -> str:
        return f"{self._namespace}/next"

    def _key(self, place: int) -> str:
        return f"{self._namespace}/{place}"

    def _beats(self, lease: LeaseId) -> str:
        return f"{self._namespace}/beats/{lease}"

    def _put(self, connection: TorchStoreMethods, place: int, entry: bytes) -> bool:
        key = self._key(place)
        there: bytes = self._ask(lambda: connection.compare_set(key, "", entry))
        if there != entry:
            return False
        # TCPStore wakes those who wait for a key when it is set, but not when it is compared and
        # set; so it is set once more, to what it is.
        self._ask(lambda: connection.set(key, entry))
        return True

    def _fill_holes(self, connection: TorchStoreMethods, places: range) -> None:
        nothing = msgspec.msgpack.encode(NothingEntry(self._author, 0))
        for place in places:
            self._put(connection, place, nothing)

    def _replay(self, start: int, entries: list[bytes]) -> None:
        with self.changed:
            for place, raw in enumerate(entries, start):
                # Another thread of ours may have come here first.
                if place == self._position:
                    self._position += 1
                    self._replay_one(raw)
            self.changed.notify_all()

    def _replay_one(self, raw: bytes) -> None:
        try:
            entry = _decode_entry(raw)
        except msgspec.MsgspecError:
            return  # whatever it is, all clients pass over it alike
        try:
            result = self._carry_out(entry)
        except LeaseLost as error:
            result = error
        if entry.author == self._author and entry.number:
            self._results[entry.number] = result

    def _carry_out(self, entry: LogEntry) -> Result:
        match entry:
            case CommitEntry():
                return self.keyspace.commit(entry.transaction)
            case GrantEntry(_, _, ttl):
                lease = self.keyspace.grant_lease(ttl, NO_TIME)
                self.leases[lease] = LiveLease(lease, ttl)
                return lease
            case EndEntry(_, _, lease):
                self.keyspace.revoke_lease(lease)
                self.leases.pop(lease, None)
                return None
            case NothingEntry():
                return None

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> StoreUnavailable:
        # torch appends its C++ stack to some messages.
        (first_line, *_) = str(error).splitlines() or [type(error).__name__]
        return StoreUnavailable(
            f"{self._who} does not answer: {first_line}",
            hint="it lives in the agent that serves it, and ends with it",
        )
