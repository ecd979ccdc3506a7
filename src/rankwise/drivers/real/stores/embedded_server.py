"""The embedded store's server: a keyspace behind a TCP port, in a thread of one agent.

One thread waits for all sockets at once and for the next lease to end. A connection is
*unauthenticated* until it has proved that it knows the run's token; until then it may say little,
and not for long, and there may not be many such. One that says what the protocol does not allow is
cut off, and harms no other.

A slow reader does not make the server keep much: while something waits to be sent to a client, no
further request of it is read; and a watch is told the next changes when it has taken the last ones,
out of the keyspace's history. When it lags further behind than that goes, it is told so.

The server forgets everything when it ends. `close` lets others read the last words first: it goes
on serving until they have hung up, for a while. A watch that is left then is told of the end.
"""

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from hmac import compare_digest
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from threading import Thread
from typing import TYPE_CHECKING

import msgspec

from rankwise.base.errors import Compacted, LeaseLost, LocalProtocolError, RemoteProtocolError
from rankwise.base.keys import Change, Revision
from rankwise.base.units import SECOND, Duration, Instant, after
from rankwise.core.keyspace.machine import Keyspace
from rankwise.drivers.real.stores import embedded_protocol as protocol
from rankwise.drivers.real.stores.connections import notice_dead_hosts
from rankwise.drivers.real.stores.port_owner import mark_port
from rankwise.ports.clock import Clock

if TYPE_CHECKING:
    import ssl

UNAUTHENTICATED_MAX = 128
AUTHENTICATION_PATIENCE = Duration(10 * SECOND)
"""How long a client may take to prove that it knows the token."""
AWAY = Duration(1 * SECOND)
"""A server that wakes so much too late was stopped, and could take no renewal."""
TOLD_BYTES = 1024 * 1024
"""About how much a watch is told at once."""
HISTORY_MAX = 4096
RECEIVED_AT_ONCE = 256 * 1024


class _Connection:
    """One client's connection."""

    def __init__(self, sock: socket.socket, unauthenticated_until: Instant) -> None:
        self.sock = sock
        self.unauthenticated_until: Instant | None = unauthenticated_until
        """When it is cut off if it has not proved anything by then; None: it has."""
        self.stream: protocol.FrameStream | None = None
        """Whether within TLS or not, the first byte says."""
        self.frames = protocol.Frames()
        self.sealer = protocol.Sealer()
        self.unsent = bytearray()
        self.secret: protocol.Secret | None = None
        self.watch: tuple[str, Revision] | None = None

    def say(self, message: protocol.Answer | protocol.Greeting) -> None:
        assert self.stream is not None, "a client speaks first"
        self.unsent += self.stream.wrap(self.sealer.frame(protocol.encoded(message)))


class EmbeddedServer:
    """Serves a keyspace on sockets that listen already.

    Args:
        listeners: belong to the server from now on.
        token: what clients must know.
        clock: whose leases it counts.
        tls: encrypts what is said, and clients that do not are refused; None: so are those that do.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        token: bytes,
        clock: Clock,
        tls: "ssl.SSLContext | None" = None,
    ) -> None:
        self._listeners = listeners
        self._token = token
        self._tls = tls
        self._clock = clock
        self._keyspace = Keyspace(history_max=HISTORY_MAX)
        self._life = protocol.new_nonce()
        self._selector = DefaultSelector()
        self._connections: dict[socket.socket, _Connection] = {}
        self._is_accepting = False
        self._ends_at: Instant | None = None  # set when it is to close
        self._linger = Duration(0)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.address: tuple[str, int] = listeners[0].getsockname()[:2]
        """Where the first socket listens."""
        self._mark = mark_port(self.address[1])
        self._thread = Thread(target=self._run, name="rankwise-store-server", daemon=True)
        self._thread.start()

    def close(self, linger: Duration) -> None:
        """End when all clients have hung up, after `linger` at the latest."""
        self._linger = linger
        with suppress(OSError):
            os.write(self._wake_write, b"\0")
        self._thread.join()

    def _run(self) -> None:
        self._selector.register(self._wake_read, EVENT_READ, self._on_close_asked)
        self._accept_again()
        try:
            while not self._is_over():
                self._turn()
        finally:
            for connection in list(self._connections.values()):
                self._dismiss(connection)
            for listener in self._listeners:
                listener.close()
            if self._mark is not None:
                self._mark.close()
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _is_over(self) -> bool:
        if self._ends_at is None:
            return False
        return not self._connections or self._clock.now() >= self._ends_at

    def _turn(self) -> None:
        """Wait for something, serve all connections, and only then let leases end."""
        deadline = min(self._deadlines(), default=None)
        for key, events in self._selector.select(self._seconds_until(deadline)):
            handle: Callable[[int], None] = key.data
            handle(events)
        now = self._clock.now()
        if deadline is not None and now > after(deadline, AWAY):
            # This process was stopped: renewals wait in its sockets, and no lease is to end by it.
            self._keyspace.prolong_leases(now)
        self._keyspace.end_leases(now)
        for connection in list(self._connections.values()):
            if (
                connection.unauthenticated_until is not None
                and now >= connection.unauthenticated_until
            ):
                self._cut_off(connection)
            else:
                # After the requests of all: a watch gets the changes of one turn in one message.
                self._tell(connection)

    def _deadlines(self) -> Iterator[Instant]:
        if (lease_ends_at := self._keyspace.next_deadline) is not None:
            yield lease_ends_at
        if self._ends_at is not None:
            yield self._ends_at
        for connection in self._connections.values():
            if connection.unauthenticated_until is not None:
                yield connection.unauthenticated_until

    def _seconds_until(self, deadline: Instant | None) -> float | None:
        if deadline is None:
            return None
        return max(0, deadline - self._clock.now()) / SECOND

    def _on_close_asked(self, _events: int) -> None:
        os.read(self._wake_read, 64)
        self._ends_at = after(self._clock.now(), self._linger)

    def _accept_again(self) -> None:
        if not self._is_accepting:
            self._is_accepting = True
            for listener in self._listeners:
                listener.setblocking(False)  # noqa: FBT003
                self._selector.register(listener, EVENT_READ, self._acceptor(listener))

    def _acceptor(self, listener: socket.socket) -> Callable[[int], None]:
        return lambda _events: self._accept(listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                # The same connection would be reported for ever; the next one that ends makes room.
                for one in self._listeners:
                    self._selector.unregister(one)
                self._is_accepting = False
            return
        waiting = [
            one for one in self._connections.values() if one.unauthenticated_until is not None
        ]
        if len(waiting) >= UNAUTHENTICATED_MAX:
            # The oldest: a client that only connects, as a port scan, must not keep nodes out.
            self._cut_off(waiting[0])
        sock.setblocking(False)  # noqa: FBT003
        # Answers are small, and a client waits for each: Nagle would add 40 ms.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_dead_hosts(sock)
        connection = _Connection(sock, after(self._clock.now(), AUTHENTICATION_PATIENCE))
        self._connections[sock] = connection
        self._selector.register(sock, EVENT_READ, lambda events: self._on_ready(connection, events))

    def _cut_off(self, connection: _Connection) -> None:
        if self._connections.pop(connection.sock, None) is None:
            return
        self._selector.unregister(connection.sock)
        connection.sock.close()
        if self._ends_at is None:
            self._accept_again()

    def _dismiss(self, connection: _Connection) -> None:
        """Cut off a client that would have stayed; a watch learns that no answer will come."""
        if connection.watch is not None:
            with suppress(OSError):
                connection.say(protocol.Ended())
                self._send(connection)
        self._cut_off(connection)

    def _on_ready(self, connection: _Connection, events: int) -> None:
        if connection.sock not in self._connections:
            return  # cut off in this same turn
        try:
            if events & EVENT_READ:
                data = connection.sock.recv(RECEIVED_AT_ONCE)
                if not data:
                    self._cut_off(connection)
                    return
                connection.frames.feed(self._said(connection, data))
            self._converse(connection)
        except BlockingIOError:
            pass
        except (OSError, msgspec.MsgspecError, RemoteProtocolError):
            with suppress(OSError):
                connection.sock.send(connection.unsent)  # why; the client may still read it
            self._cut_off(connection)

    def _said(self, connection: _Connection, raw: bytes) -> bytes:
        """What a client has said, beneath the TLS that it may have begun with."""
        if connection.stream is None:
            connection.stream = self._stream(connection, raw[0])
        try:
            return connection.stream.feed(raw)
        finally:
            connection.unsent += connection.stream.unsent()

    def _stream(self, connection: _Connection, first: int) -> protocol.FrameStream:
        if first != protocol.TLS_HANDSHAKE:
            return protocol.PlainStream()
        if self._tls is None:
            connection.stream = protocol.PlainStream()
            connection.say(
                protocol.Refusal("this node encrypts what it says, and the store cannot")
            )
            raise RemoteProtocolError("a client speaks TLS, and this server does not")
        from rankwise.drivers.real.stores.tls import TlsStream  # noqa: PLC0415  # loads ssl

        return TlsStream(self._tls, is_server=True)

    def _converse(self, connection: _Connection) -> None:
        """Send what waits, then answer the requests that have come, one after another."""
        self._send(connection)
        while not connection.unsent and (body := connection.frames.next()) is not None:
            if connection.unauthenticated_until is not None:
                self._greet(connection, body)
            else:
                request: protocol.Request = protocol.decode_request(body)
                self._answer(connection, request)
            self._send(connection)

    def _send(self, connection: _Connection) -> None:
        if connection.unsent:
            with suppress(BlockingIOError):
                sent = connection.sock.send(connection.unsent)
                del connection.unsent[:sent]
        # Back-pressure: a client that does not read its answers is not read either.
        events = EVENT_WRITE if connection.unsent else EVENT_READ
        key = self._selector.get_key(connection.sock)
        if key.events != events:
            self._selector.modify(connection.sock, events, key.data)

    def _greet(self, connection: _Connection, body: bytes) -> None:
        match protocol.decode_greeting(body):
            case protocol.Hello(version, _) if version != protocol.VERSION:
                connection.say(
                    protocol.Refusal(
                        f"it has version {protocol.VERSION} of the protocol, you have {version}"
                    )
                )
            case protocol.Hello() if self._tls is not None and isinstance(
                connection.stream, protocol.PlainStream
            ):
                connection.say(
                    protocol.Refusal("what is said here is encrypted, and this node cannot")
                )
            case protocol.Hello(_, nonce) if connection.secret is None:
                own = protocol.new_nonce()
                connection.secret = protocol.Secret(self._token, nonce, own)
                proof = connection.secret.server_proof
                connection.say(protocol.Welcome(protocol.VERSION, own, proof, self._life))
            case protocol.Proof(proof) if connection.secret is not None and compare_digest(
                proof, connection.secret.client_proof
            ):
                connection.unauthenticated_until = None
                connection.frames.seal_with(
                    connection.secret.requests_key, protocol.REQUEST_BYTES_MAX
                )
                connection.sealer.seal_with(connection.secret.answers_key)
            case _:
                raise RemoteProtocolError("a client does not know the token")

    def _answer(self, connection: _Connection, request: protocol.Request) -> None:
        try:
            answer = self._carry_out(connection, request)
        except LeaseLost as error:
            answer = protocol.Lost(str(error))
        except LocalProtocolError as error:
            answer = protocol.Misunderstood(str(error))
        if answer is not None:
            connection.say(answer)

    def _carry_out(
        self, connection: _Connection, request: protocol.Request
    ) -> protocol.Answer | None:
        now = self._clock.now()
        match request:
            case protocol.ReadAsked(prefix):
                return protocol.Read(self._keyspace.read(prefix))
            case protocol.CommitAsked(transaction):
                return protocol.Tried(self._keyspace.commit(transaction))
            case protocol.GrantAsked(ttl):
                return protocol.Granted(self._keyspace.grant_lease(ttl, now))
            case protocol.RenewAsked(lease):
                self._keyspace.renew_lease(lease, now)
                return protocol.Done()
            case protocol.RevokeAsked(lease):
                self._keyspace.revoke_lease(lease)
                return protocol.Done()
            case protocol.WatchAsked(prefix, revision):
                connection.watch = (prefix, revision)
                return protocol.ChangesReported((), revision)

    def _tell(self, connection: _Connection) -> None:
        """Tell a watch what has changed, if it has taken what it was told before."""
        while connection.watch is not None and not connection.unsent:
            prefix, told = connection.watch
            if told >= self._keyspace.revision:
                return
            try:
                changes = self._keyspace.changes_after(told, prefix)
            except Compacted as error:
                connection.watch = None
                connection.say(protocol.Forgotten(error.message, Revision(error.revision)))
            else:
                portion = first_portion(changes)
                is_all = len(portion) == len(changes)
                up_to = self._keyspace.revision if is_all else portion[-1].revision
                connection.watch = (prefix, up_to)
                if portion:
                    connection.say(protocol.ChangesReported(portion, up_to))
            try:
                self._send(connection)
            except OSError:
                self._cut_off(connection)
                return


def first_portion(changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """As many of the changes as are good to send at once, and whole revisions only."""
    size = 0
    for index, change in enumerate(changes):
        if size >= TOLD_BYTES and change.revision != changes[index - 1].revision:
            return changes[:index]
        size += len(change.key) + len(change.value or b"")
    return changes
