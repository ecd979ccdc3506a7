"""A store in one value that can be read, and replaced if it is unchanged; nothing else.

This is what a `RendezvousBackend` of torch's offers, and programs bring their own. The value is an
image of a whole keyspace. A change is made on a copy, which replaces the value if that is still the
old one; otherwise it is made again, on what is there now.

Such a place cannot tell that it has changed: **it is polled, here**. A watch looks after 0.1 s, and
then after ever longer pauses, until it looks once a second; every change lets it begin anew, and
what this client changes is told at once.

Leases are counters in the value. A client that renews one raises its counter; every client
remembers when, by its own clock, it first saw the counter as it is, and ends a lease whose counter
has not changed for the whole time to live. So clocks are not compared. A client that could not look
for a while (it was stopped, or the place did not answer) counts anew from when it looks again: no
client could have been seen alive meanwhile.

The cost: every renewal of every node rewrites the value, and every node reads all of it every
second. That is bearable for tens of nodes. Changes are remembered within limits (`HISTORY_BATCHES`,
`HISTORY_BYTES`); a watch that is further behind reads anew.
"""

from collections.abc import Callable
from secrets import token_bytes
from threading import Condition, Event, Lock
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from rankwise.base.errors import StoreRefused, StoreUnavailable
from rankwise.base.keys import Change, Committed, Conflict, LeaseId, Revision, Snapshot, Transaction
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant, after, format_duration
from rankwise.core.keyspace.machine import Keyspace, KeyspaceImage
from rankwise.drivers.real.stores.patience import Patience, closed_error
from rankwise.ports.clock import Clock
from rankwise.ports.store import Store

FORMAT = "rankwise keyspace 1"
HISTORY_BATCHES = 256
HISTORY_BYTES = 256 * 1024
FIRST_PAUSE = Duration(100 * MILLISECOND)
LONGEST_PAUSE = Duration(1 * SECOND)
LOOKS_PER_LIFE = 5
"""How often a watch looks, at least, while a lease could live without being renewed."""
AWAY = Duration(1 * SECOND)
"""If a check runs this late, the client was stopped, or got no answer."""

T = TypeVar("T")


class ValueBackend(Protocol):
    """Where the value is: what a `RendezvousBackend` of torch's has.

    Both calls raise `StoreUnavailable` without an answer, `StoreRefused` if none will ever come.
    """

    def get_state(self) -> tuple[bytes, Any] | None:
        """The value, and a token for this state of it; None if there is none yet."""
        ...

    def set_state(
        self, state: bytes, token: Any | None = None, /
    ) -> tuple[bytes, Any, bool] | None:
        """Replace the value if the token is still right; None: if there was none.

        The value then, its token, and whether it was replaced; or None, which says nothing.
        """
        ...


class NotOurs(StoreRefused):
    """What is in the place was written by another program."""


class Value(msgspec.Struct, frozen=True, array_like=True):
    """What is kept. No two writes are equal, since places may compare values to know who won."""

    format: str
    write: bytes
    keyspace: KeyspaceImage
    renewals: dict[LeaseId, int]
    """How often each lease was renewed."""


# Made here, since two threads that meet a type for the first time at once crash msgspec (0.22).
_decode = msgspec.msgpack.Decoder[Value](Value).decode
_encode = msgspec.msgpack.Encoder().encode
_NOTHING = Value(FORMAT, b"", Keyspace().image, {})


class _Seen(NamedTuple):
    """A lease as it was when its counter was first seen as it is."""

    renewals: int
    at: Instant


class _Draft:
    """A copy of the value that a change is made on."""

    def __init__(self, value: Value, now: Instant) -> None:
        self.now = now
        self.keyspace = Keyspace.from_image(value.keyspace, now)
        self.renewals = dict(value.renewals)

    def finished(self) -> Value:
        image = self.keyspace.image
        image = msgspec.structs.replace(image, history=_recent(image.history))
        alive = {lease: self.renewals.get(lease, 0) for lease, _ in image.leases}
        return Value(FORMAT, token_bytes(12), image, alive)


class OneValueStore(Store):
    """A client of a store in one value; a `rankwise.ports.store.Store`.

    Args:
        place: where the value is; asked by one thread at a time, as long as this client alone uses
            it.
        who: names it in errors.
        clock: counts how long a lease was not renewed.
        request_timeout: how long a call tries to replace a value that others change all the time.
    """

    def __init__(
        self,
        place: ValueBackend,
        *,
        who: str,
        clock: Clock,
        request_timeout: Duration,
    ) -> None:
        self._place = place
        self._who = who
        self.clock = clock
        self._request_timeout = request_timeout
        self._asking = Lock()
        """Held while the place is asked, and while what it said is taken in."""
        self._value = _NOTHING
        self._raw = b""
        self._token: Any | None = None
        self._keyspace = Keyspace()
        self._seen: dict[LeaseId, _Seen] = {}
        self._looked_at = clock.now()
        self._closed = Event()
        self.changed = Condition()
        """Notified when watches may have something to tell: a change of ours, or the end."""
        self.changes = 0
        """How often it was notified."""

    def read(self, prefix: str) -> Snapshot:
        """All entries whose keys begin with `prefix`."""
        with self._asking:
            self._look()
            return self._keyspace.read(prefix)

    def commit(self, transaction: Transaction) -> Committed | Conflict:
        """Try a transaction."""
        return self._change(lambda draft: draft.keyspace.commit(transaction))

    def watch(self, prefix: str, after: Revision) -> "OneValueWatch":
        """Tell every change under `prefix` that is later than `after`."""
        return OneValueWatch(self, prefix, after)

    def grant_lease(self, ttl: Duration) -> LeaseId:
        """A new lease, which all clients look after."""
        return self._change(lambda draft: draft.keyspace.grant_lease(ttl, draft.now))

    def renew_lease(self, lease: LeaseId) -> None:
        """Let the lease live for its whole time to live again."""

        def renew(draft: _Draft) -> None:
            draft.keyspace.renew_lease(lease, draft.now)
            draft.renewals[lease] += 1

        self._change(renew)

    def revoke_lease(self, lease: LeaseId) -> None:
        """End the lease and delete its entries."""
        self._change(lambda draft: draft.keyspace.revoke_lease(lease))

    def close(self) -> None:
        """Wake the threads that wait in a watch."""
        self._closed.set()
        self.notify()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def notify(self) -> None:
        """Let watches see whether anything concerns them."""
        with self.changed:
            self.changes += 1
            self.changed.notify_all()

    def poll(self, prefix: str, told: Revision) -> tuple[tuple[Change, ...], Revision, Duration]:
        """Look, and end what leases have to end.

        Returns:
            The changes under `prefix` since `told`, up to which revision, and the longest
            pause that leases allow before the next look.
        """
        with self._asking:
            self._look()
            overdue = self._overdue()
        if overdue:
            self._change(lambda draft: self._end(draft, overdue))
        with self._asking:
            changes = self._keyspace.changes_after(told, prefix)
            shortest = min((ttl for _, ttl in self._value.keyspace.leases), default=None)
            pause = LONGEST_PAUSE if shortest is None else Duration(shortest // LOOKS_PER_LIFE)
            return changes, max(told, self._keyspace.revision), min(pause, LONGEST_PAUSE)

    def _end(self, draft: _Draft, overdue: dict[LeaseId, int]) -> None:
        for lease, renewals in overdue.items():
            # It may have been renewed since we looked.
            if draft.renewals.get(lease) == renewals:
                draft.keyspace.revoke_lease(lease)

    def _overdue(self) -> dict[LeaseId, int]:
        """Leases that did not change for their whole life, with their counters."""
        now = self.clock.now()
        return {
            lease: self._seen[lease].renewals
            for lease, ttl in self._value.keyspace.leases
            if now >= after(self._seen[lease].at, ttl)
        }

    def _change(self, change: Callable[[_Draft], T]) -> T:
        patience = Patience(self._request_timeout / SECOND, self._closed, self._who)
        with self._asking:
            self._look()
        for _ in patience.attempts():
            with self._asking:
                draft = _Draft(self._value, self.clock.now())
                result = change(draft)
                value = draft.finished()
                if (
                    value.keyspace == self._value.keyspace
                    and value.renewals == self._value.renewals
                ):
                    return result
                is_ours = self._replace(value)
            if is_ours:
                self.notify()
                return result
        if self._closed.is_set():
            raise closed_error(self._who)
        raise StoreUnavailable(
            f"others have changed {self._who} for {format_duration(self._request_timeout)}, each"
            " time before this node could",
            hint="use a real store for so many nodes: --rdzv-backend etcd or embedded",
        )

    def _replace(self, value: Value) -> bool:
        """Try to write the value, and take in what is there then; whether it is ours."""
        raw = _encode(value)
        answer = self._place.set_state(raw, self._token)
        if answer is None:  # says nothing
            self._look()
            return self._raw == raw
        self._on_value(answer[0], answer[1])
        return bool(answer[2])

    def _look(self) -> None:
        if self._closed.is_set():
            raise closed_error(self._who)
        self._on_value(*(self._place.get_state() or (b"", None)))

    def _on_value(self, raw: bytes, token: Any | None) -> None:
        now = self.clock.now()
        was_away = now > after(self._looked_at, Duration(LONGEST_PAUSE + AWAY))
        self._looked_at = now
        self._token = token
        if raw != self._raw:
            self._value = _understood(raw, self._who) if raw else _NOTHING
            self._raw = raw
            self._keyspace = Keyspace.from_image(self._value.keyspace, now)
        seen = {} if was_away else self._seen
        self._seen = {
            lease: seen[lease]
            if lease in seen and seen[lease].renewals == renewals
            else _Seen(renewals, now)
            for lease, renewals in self._value.renewals.items()
        }


class OneValueWatch:
    """The changes under a prefix; a `rankwise.ports.store.Watch`. It polls: see the module."""

    def __init__(self, store: OneValueStore, prefix: str, after: Revision) -> None:
        self._store = store
        self._prefix = prefix
        self._reported = after
        self._is_closed = False

    def next(self, patience: Duration) -> tuple[Change, ...]:
        """Look for the next changes, for `patience` at most; empty when there were none."""
        store = self._store
        give_up_at = after(store.clock.now(), patience)
        pause = FIRST_PAUSE
        while not self._is_over():
            known = store.changes
            before = self._reported
            changes, self._reported, longest = store.poll(self._prefix, self._reported)
            left = give_up_at - store.clock.now()
            if changes or left <= 0:
                return changes
            if self._reported != before:
                pause = FIRST_PAUSE
            with store.changed:
                store.changed.wait_for(
                    lambda: store.changes != known or self._is_over(),  # noqa: B023  # called here
                    min(pause, longest, left) / SECOND,
                )
            pause = Duration(2 * pause)
        return ()

    def close(self) -> None:
        """End the watch and wake a thread that waits in `next`."""
        self._is_closed = True
        self._store.notify()

    def _is_over(self) -> bool:
        return self._is_closed or self._store.is_closed


def _recent(history: tuple[tuple[Change, ...], ...]) -> tuple[tuple[Change, ...], ...]:
    """The last batches, as many as there is room for, and always the very last."""
    left = HISTORY_BYTES
    kept = 0
    for batch in reversed(history[-HISTORY_BATCHES:]):
        left -= sum(len(change.key) + len(change.value or b"") for change in batch)
        if left < 0 and kept:
            break
        kept += 1
    return history[len(history) - kept :]


def _understood(raw: bytes, who: str) -> Value:
    """Read the value.

    Raises:
        StoreRefused: it belongs to another program.
    """
    try:
        value = _decode(raw)
    except msgspec.MsgspecError as error:
        raise NotOurs(
            f"{who} holds {len(raw)} bytes that rankwise did not write",
            hint="torch's own nodes keep their state there: give every run a run id of its own",
        ) from error
    if value.format != FORMAT:
        raise NotOurs(
            f"{who} holds {value.format!r}, expected {FORMAT!r}",
            hint="use one version of rankwise on all nodes",
        )
    return value
