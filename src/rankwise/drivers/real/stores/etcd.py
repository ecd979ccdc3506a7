"""etcd, version 3, by way of its JSON gateway: the store for real clusters.

The gateway speaks plain HTTP with JSON, so nothing needs to be installed and a forked process
inherits no broken channel; see ADR 0011. Each call is one request on a connection that is kept. A
watch has a connection of its own, on which etcd tells changes as they happen; when that ends, for
whatever reason, the watch continues from the last revision that it was told, at whichever member is
current. No thread is ours: the caller waits.

While etcd is away, calls repeat until `request_timeout` and raise `StoreUnavailable`; the watch
does the same, and can be asked again. When a majority is back, leases are counted anew by etcd's
new leader, so none ends because of the outage alone.
"""

import socket
import ssl
from contextlib import suppress
from select import POLLIN, poll
from threading import Lock
from time import monotonic

import msgspec

from rankwise.base.errors import (
    Compacted,
    LeaseLost,
    RemoteProtocolError,
    StoreRefused,
    StoreUnavailable,
)
from rankwise.base.keys import Change, Committed, Conflict, LeaseId, Revision, Snapshot, Transaction
from rankwise.base.units import Duration
from rankwise.drivers.real.stores.connections import HungUp, hang_up
from rankwise.drivers.real.stores.etcd_members import (
    HINT_UNAVAILABLE,
    EtcdConfig,
    EtcdMember,
    Members,
    NotAuthenticated,
    NotReached,
    NotServing,
    asks_for_a_user,
)
from rankwise.drivers.real.stores.etcd_messages import (
    GrantReply,
    KeepAliveReply,
    RangeReply,
    TransactionReply,
    WatchLine,
    WatchReply,
    decoded,
    range_of,
    transaction_body,
    watch_body,
    whole_seconds,
)
from rankwise.drivers.real.stores.etcd_stream import ResponseLines
from rankwise.drivers.real.stores.watch_connection import WatchConnection
from rankwise.ports.store import Store

PROBE_AFTER_S = 5.0
"""A watch asks its member for a sign of life when no request has had one for so long."""
RECEIVED_AT_ONCE = 256 * 1024
STREAM_IS_OVER = (OSError, NotAuthenticated, NotServing, NotReached, RemoteProtocolError)


class EtcdStore(Store):
    """A client of an etcd cluster; a `rankwise.ports.store.Store`."""

    def __init__(self, config: EtcdConfig) -> None:
        self._members = Members(config)
        self._watches: set[EtcdWatch] = set()
        self._lock = Lock()

    def read(self, prefix: str) -> Snapshot:
        """All entries whose keys begin with `prefix`; etcd returns them in the order of keys."""
        reply = self._members.ask("/kv/range", range_of(prefix), RangeReply)
        return Snapshot(
            tuple(key_value.entry() for key_value in reply.kvs), Revision(reply.header.revision)
        )

    def commit(self, transaction: Transaction) -> Committed | Conflict:
        """Try a transaction; sent once, since etcd may carry out what it does not answer."""
        reply = self._members.ask(
            "/kv/txn", transaction_body(transaction), TransactionReply, repeats=False
        )
        revision = Revision(reply.header.revision)
        return Committed(revision) if reply.succeeded else Conflict(revision)

    def watch(self, prefix: str, after: Revision) -> "EtcdWatch":
        """Tell every change under `prefix` that is later than `after`."""
        return self._kept(EtcdWatch(self._members, prefix, after))

    def follow(self, prefix: str) -> tuple[Snapshot, "EtcdWatch"]:
        """Read, and tell every change that is later than what was read.

        A watch that is to begin in the past is told nothing until etcd's next round of such
        watches, up to 100 ms later. So this one begins now, and the keys are read after that.
        """
        watch = self._kept(EtcdWatch(self._members, prefix, None))
        try:
            watch.begin()
            snapshot = self.read(prefix)
        except BaseException:
            watch.close()
            raise
        watch.pass_over(snapshot.revision)
        return snapshot, watch

    def grant_lease(self, ttl: Duration) -> LeaseId:
        """A new lease, of whole seconds rounded up, and of at least etcd's own minimum."""
        reply = self._members.ask("/lease/grant", {"TTL": whole_seconds(ttl)}, GrantReply)
        return LeaseId(reply.lease)

    def renew_lease(self, lease: LeaseId) -> None:
        """Let the lease live for its whole time to live again."""
        reply = self._members.ask("/lease/keepalive", {"ID": lease}, KeepAliveReply)
        if reply.error is not None and "lease not found" not in reply.error.message:
            raise StoreUnavailable(
                f"{self._members.who} did not renew lease {lease}: {reply.error.message}",
                hint=HINT_UNAVAILABLE,
            )
        if reply.result is None or not reply.result.ttl:
            raise LeaseLost(
                f"lease {lease} has ended",
                hint="this node was cut off from etcd for longer than the lease's time to live",
            )

    def revoke_lease(self, lease: LeaseId) -> None:
        """End the lease and delete its entries, now; nothing happens if it has ended."""
        with suppress(LeaseLost):
            self._members.ask("/lease/revoke", {"ID": lease}, object)

    def close(self) -> None:
        """Close all connections; leases are left to end by themselves."""
        self._members.close()
        with self._lock:
            watches, self._watches = self._watches, set()
        for watch in watches:
            watch.close()

    def _kept(self, watch: "EtcdWatch") -> "EtcdWatch":
        with self._lock:
            self._watches = {one for one in self._watches if not one.is_closed} | {watch}
        return watch


class EtcdWatch:
    """The changes under a prefix; a `rankwise.ports.store.Watch`.

    Args:
        members: the members that are asked.
        prefix: of the keys.
        after: the revision up to which everything is known; None for whatever is present when the
            watch begins.
    """

    def __init__(self, members: Members, prefix: str, after: Revision | None) -> None:
        self._members = members
        self._prefix = prefix
        self._reported = after
        self._connection = WatchConnection(_Stream.close, members.closed.is_set, STREAM_IS_OVER)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._connection.is_closed

    def next(self, patience: Duration) -> tuple[Change, ...]:
        """Wait for the next changes; empty when there were none for `patience`.

        While no connection stands it takes as long as making one takes, at most the request
        timeout.
        """
        return self._connection.next_changes(patience, self._connect, self._receive)

    def begin(self) -> None:
        """Wait until etcd has confirmed the watch.

        Raises:
            StoreUnavailable, StoreRefused: none does.
        """
        with self._connection.waiting():
            self._connect()

    def pass_over(self, revision: Revision) -> None:
        """Do not tell what was changed up to that revision."""
        self._reported = max(self._reported or revision, revision)

    def close(self) -> None:
        """End the watch and wake a thread that waits in `next`."""
        self._connection.close()

    def _receive(self, stream: "_Stream", ends_at: float) -> tuple[Change, ...] | None:
        reply = stream.next(ends_at)
        return None if reply is None else self._changes_of(reply)

    def _connect(self) -> "_Stream":
        """A stream on which etcd has confirmed the watch."""
        patience = self._members.patience()
        last_error: BaseException | None = None
        for _ in patience.attempts():
            if self.is_closed:
                break
            member = self._members.current
            try:
                return self._open(member, monotonic() + patience.left_s)
            except NotAuthenticated as error:
                # An expired token and a missing permission look alike; a new token tells.
                if isinstance(last_error, NotAuthenticated):
                    raise StoreRefused(
                        f"{member.endpoint} does not let user {self._members.config.user!r} watch"
                        f" {self._prefix!r}: {error}",
                        hint="check the roles that etcd grants to that user",
                    ) from error
                self._members.forget_token()
                last_error = error
            except STREAM_IS_OVER as error:
                last_error = error
                self._members.suspect(member)
        raise patience.exhausted(last_error, self._members.hint_for(last_error)) from last_error

    def _open(self, member: EtcdMember, ends_at: float) -> "_Stream":
        sock = self._members.open_stream(member, "/watch", watch_body(self._prefix, self._reported))
        stream = _Stream(self._members, member, sock)
        self._connection.take(stream)
        try:
            # Has no changes: it says that the watch is created, or why not.
            self._changes_of(stream.confirmation(ends_at))
        except BaseException:
            self._connection.hang_up()
            raise
        return stream

    def _changes_of(self, reply: WatchReply) -> tuple[Change, ...]:
        if reply.compact_revision:
            self._connection.hang_up()
            raise Compacted(
                f"etcd has forgotten the changes up to {reply.compact_revision}, the watch of"
                f" {self._prefix!r} has seen those up to {self._reported}",
                reply.compact_revision,
                hint="read again, and watch after the snapshot's revision",
            )
        if "permission denied" in reply.cancel_reason or "auth token" in reply.cancel_reason:
            if self._members.is_anonymous:  # etcd 3.5 says no more to those
                raise asks_for_a_user(self._members.current)
            raise NotAuthenticated(reply.cancel_reason)
        if reply.canceled:
            # A member without a leader does that, and one that restarts, or asks for a user.
            reason = reply.cancel_reason or "the watch was ended"
            self._members.raise_complaint(reason, 503, self._members.current)
        changes = tuple(
            event.change()
            for event in reply.events
            if event.kv.mod_revision > (self._reported or 0)
        )
        if changes:
            self._reported = changes[-1].revision
        elif self._reported is None or not reply.created:
            # Where the watch begins, or a sign of progress: everything up to it has been told.
            self._reported = max(self._reported or Revision(0), Revision(reply.header.revision))
        return changes


class _Stream:
    """One connection of a watch."""

    def __init__(self, members: Members, member: EtcdMember, sock: socket.socket) -> None:
        self._members = members
        self._member = member
        self._sock = sock
        self._sock.settimeout(0)
        self._lines = ResponseLines()
        self._waiting: list[bytes] = []
        self._poll = poll()
        self._poll.register(sock, POLLIN)

    def next(self, ends_at: float) -> WatchReply | None:
        """The next message; None when there was none until `ends_at`.

        Raises:
            OSError, NotServing, NotAuthenticated, RemoteProtocolError: the stream is over.
            StoreRefused: etcd does not let us watch.
        """
        while not self._waiting:
            data = self._receive()
            if data is None:
                if not self._wait(ends_at):
                    return None
                continue
            if not data:
                raise HungUp("the member has hung up")
            self._waiting += self._lines.feed(data)
            if self._lines.status not in (None, 200) and self._waiting:
                assert self._lines.status is not None, "a body has come, so its head has"
                self._members.raise_fault(self._lines.status, self._waiting[0], self._member)
        try:
            line = decoded(self._waiting.pop(0), WatchLine)
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"{self._member.endpoint} says no message: {error}") from None
        if line.error is not None:
            self._members.raise_complaint(line.error.message, 503, self._member)
        if line.result is None:
            raise RemoteProtocolError(f"{self._member.endpoint} says nothing in a message")
        return line.result

    def confirmation(self, ends_at: float) -> WatchReply:
        """The first message.

        Raises:
            TimeoutError: it did not come.
        """
        reply = self.next(min(ends_at, monotonic() + self._members.attempt_s))
        if reply is None:
            raise TimeoutError(f"{self._member.endpoint} does not confirm a watch")
        return reply

    def wake(self) -> None:
        """End it from another thread, which then sees that its member has hung up."""
        hang_up(self._sock)

    def close(self) -> None:
        """Let go of the connection."""
        self._members.close_stream(self._member, self._sock)

    def _receive(self) -> bytes | None:
        """What has come; None when there is nothing yet, empty at the end."""
        try:
            return self._sock.recv(RECEIVED_AT_ONCE)
        except (BlockingIOError, ssl.SSLWantReadError):
            return None

    def _wait(self, ends_at: float) -> bool:
        """Wait for bytes, and look after the member while there are none; False: time is over."""
        while True:
            now = monotonic()
            silent_until = self._member.answered_at + PROBE_AFTER_S
            if now >= ends_at:
                return False
            if now >= silent_until:
                self._members.probe(self._member)
                silent_until = monotonic() + PROBE_AFTER_S
            wait_s = max(0.0, min(ends_at, silent_until) - monotonic())
            if self._poll.poll(min(wait_s, 86_400.0) * 1000):
                return True
