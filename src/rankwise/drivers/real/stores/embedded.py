"""The embedded store: a small server in one of the agents, for a laptop or a few nodes.

Nothing has to be installed or started: every agent is told the same endpoint, and the one whose
machine has that address serves (`open_embedded`). All agents, that one too, are clients: each call
is one exchange on a connection that is kept, a watch has a connection of its own. A client without
the run's token is refused, on both sides, and cannot read what is said where Python can encrypt;
see `embedded_protocol`.

It does not survive the agent that serves. When that ends or dies, or its machine, everything the
nodes had agreed is gone. A watch is told of an orderly end (`StoreRefused`). Otherwise the others
find no server (`StoreUnavailable`), or, if it was started again, one that knows nothing: a client
that has known another life of it refuses to go on (`StoreRefused`), since a store that forgets
could let two nodes have one rank. Lost connections, and a server that was stopped for a while, are
survived. For more, use etcd.
"""

import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from select import POLLIN, poll
from threading import Event, Lock
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import msgspec

from rankwise.base.errors import (
    Compacted,
    ConfigError,
    LeaseLost,
    LocalProtocolError,
    RemoteProtocolError,
    StoreOfAnotherRun,
    StoreRefused,
    StoreUnavailable,
)
from rankwise.base.keys import Change, Committed, Conflict, LeaseId, Revision, Snapshot, Transaction
from rankwise.base.units import SECOND, ZERO, Duration
from rankwise.drivers.real.stores import embedded_protocol as protocol
from rankwise.drivers.real.stores.addresses import listen
from rankwise.drivers.real.stores.connections import (
    endpoint_text,
    hang_up,
    has_hung_up,
    notice_dead_hosts,
)
from rankwise.drivers.real.stores.embedded_server import EmbeddedServer
from rankwise.drivers.real.stores.encryption import encryption_lack
from rankwise.drivers.real.stores.names import Names
from rankwise.drivers.real.stores.patience import Patience, closed_error, describe
from rankwise.drivers.real.stores.port_owner import STRANGER_PATIENCE_S, port_owner, refuse_stranger
from rankwise.drivers.real.stores.watch_connection import WatchConnection
from rankwise.ports.clock import Clock
from rankwise.ports.store import Store

if TYPE_CHECKING:
    import ssl

AnswerT = TypeVar("AnswerT", bound=protocol.Answer)

RECEIVED_AT_ONCE = 256 * 1024
HINT = "check --rdzv-endpoint; the store lives in the agent of that machine, and ends with it"


class EmbeddedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an embedded store is, and who may use it.

    Attributes:
        host, port: its address; port 0 lets the server choose one.
        token: the secret of all nodes of the run.
        is_host: whether this process serves; None: if `host` is an address of this machine, and
            none serves there yet.
        encrypts: whether to speak within TLS, as all nodes of the run have to or none; None: if
            this Python can.
        request_timeout: how long one call may take, with all its attempts.
        linger: how long a server that is closed goes on for clients that have not hung up.
    """

    host: str
    port: int
    token: bytes
    is_host: bool | None = None
    encrypts: bool | None = None
    request_timeout: Duration = Duration(2 * SECOND)
    linger: Duration = Duration(5 * SECOND)


def open_embedded(config: EmbeddedConfig, clock: Clock) -> "EmbeddedStore":
    """A client of the store, and its server too if that is this process's part.

    Raises:
        ConfigError: this process must serve or encrypt, and cannot.
    """
    config = with_encryption(config)
    is_taken, server = _serve_if_due(config, clock)
    if server is not None:
        return EmbeddedStore(config, *_near_address(server), server)
    serve = (lambda: _serve_if_due(config, clock)[1]) if is_taken else None
    return EmbeddedStore(config, config.host, config.port, serve=serve)


def with_encryption(config: EmbeddedConfig) -> EmbeddedConfig:
    """The same, with `encrypts` decided upon.

    Raises:
        ConfigError: this process must encrypt, and cannot.
    """
    lack = None if config.encrypts is False else encryption_lack()
    if lack is not None and config.encrypts:
        raise ConfigError(
            f"--rdzv-conf: encrypts is true, and {lack}",
            hint="pip install 'rankwise[tls]' on all nodes, or leave it out",
        )
    encrypts = config.encrypts is not False and lack is None
    return msgspec.structs.replace(config, encrypts=encrypts)


class EmbeddedStore(Store):
    """A client of an embedded store; a `rankwise.ports.store.Store`.

    Args:
        config: see `EmbeddedConfig`.
        host, port: the address of the server.
        server: the server, if it lives in this process. It ends with this client.
        serve: starts the server in this process, where the port was taken at first; None if the
            port is still taken.
    """

    def __init__(
        self,
        config: EmbeddedConfig,
        host: str,
        port: int,
        server: EmbeddedServer | None = None,
        *,
        serve: Callable[[], EmbeddedServer | None] | None = None,
    ) -> None:
        self.server = server
        self._serve = serve
        self._serving = Lock()
        self._config = config
        self._address = (host, port)
        self._who = f"the embedded store at {endpoint_text(host, port)}"
        self._closed = Event()
        self._names = Names()
        self._lock = Lock()
        self._idle: list[_Conversation] = []
        self._open: set[_Conversation] = set()
        self._watches: set[EmbeddedWatch] = set()
        self._life: bytes | None = None
        self._has_server_ended = False
        self._stranger_from = None if serve is None else monotonic() + STRANGER_PATIENCE_S
        """From when on one who has not greeted is a stranger, where we would serve ourselves."""
        self._tls: ssl.SSLContext | None = None
        if config.encrypts:
            from rankwise.drivers.real.stores.tls import client_context  # noqa: PLC0415  # loads ssl

            self._tls = client_context(config.token)

    def read(self, prefix: str) -> Snapshot:
        """All entries whose keys begin with `prefix`."""
        return self._ask(protocol.ReadAsked(prefix), protocol.Read).snapshot

    def commit(self, transaction: Transaction) -> Committed | Conflict:
        """Try a transaction; sent once, since it may be carried out and not answered."""
        return self._ask(protocol.CommitAsked(transaction), protocol.Tried, repeats=False).result

    def watch(self, prefix: str, after: Revision) -> "EmbeddedWatch":
        """Tell every change under `prefix` that is later than `after`."""
        watch = EmbeddedWatch(self, prefix, after)
        with self._lock:
            self._watches = {one for one in self._watches if not one.is_closed} | {watch}
        return watch

    def grant_lease(self, ttl: Duration) -> LeaseId:
        """A new lease."""
        return self._ask(protocol.GrantAsked(ttl), protocol.Granted).lease

    def renew_lease(self, lease: LeaseId) -> None:
        """Let the lease live for its whole time to live again."""
        self._ask(protocol.RenewAsked(lease), protocol.Done)

    def revoke_lease(self, lease: LeaseId) -> None:
        """End the lease and delete its entries."""
        self._ask(protocol.RevokeAsked(lease), protocol.Done)

    def close(self) -> None:
        """Hang up; if the server lives here, it ends when the others have hung up, too."""
        self._close(self._config.linger)

    def _close(self, linger: Duration) -> None:
        with self._lock:
            self._closed.set()
            for conversation in self._idle:
                self._open.discard(conversation)
                conversation.close()
            self._idle.clear()
            for conversation in self._open:
                conversation.wake()
            watches, self._watches = self._watches, set()
        self._names.close()
        for watch in watches:
            watch.close()
        with self._lock:
            server, self.server = self.server, None
        if server is not None:
            server.close(linger)

    def __exit__(self, *exc_info: object) -> None:
        self._close(self._config.linger if not any(exc_info) else ZERO)

    @property
    def encrypts(self) -> bool:
        """Whether others cannot read what is said."""
        return self._tls is not None

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def connect(self) -> "_Conversation":
        """A new connection on which both sides have proved that they know the token.

        Raises:
            StoreUnavailable: there is no server for the whole request timeout.
            StoreRefused: there is one, but not ours.
        """
        patience = self._patience()
        last_error: BaseException | None = None
        for _ in patience.attempts():
            try:
                return self._connect_once(patience)
            except ConnectionRefusedError as error:
                last_error = error
                self._serve_instead()
            except OSError as error:
                last_error = error
            except (RemoteProtocolError, StoreRefused):
                self._refuse_stranger(has_spoken=True)
                raise
        self._refuse_stranger()
        raise patience.exhausted(last_error, HINT) from last_error

    def _serve_instead(self) -> None:
        """Serve here if the process that had the port does not listen any more.

        Two agents that call `listen` at the same moment get EADDRINUSE both: Linux marks both
        sockets as listening before it looks for conflicts.
        """
        with self._serving:
            if self._serve is None or self._life is not None or self._closed.is_set():
                return  # a server that was known has taken what the nodes had agreed on with it
            server = self._serve()
            if server is None:
                return
            self._serve = self._stranger_from = None
            with self._lock:
                self._address = _near_address(server)
                self.server = server
                is_late = self._closed.is_set()
        if is_late:
            server.close(ZERO)

    def _refuse_stranger(self, *, has_spoken: bool = False) -> None:
        """End the run if a process of this machine holds the port that is no agent.

        An agent may be slow, or stopped: it is waited for. So is one that has greeted before.
        """
        if self._stranger_from is None or self._life is not None or self._closed.is_set():
            return
        if not has_spoken and monotonic() < self._stranger_from:
            return
        refuse_stranger(self._config.host, self._config.port)

    def note_end(self) -> StoreRefused:
        """Remember that the server has ended, so that no call tries it any more; what to raise."""
        self._has_server_ended = True
        return StoreRefused(
            f"the run ends here: the agent that served {self._who} has left",
            hint="start the run again; etcd survives the loss of any agent",
        )

    def let_go(self, conversation: "_Conversation") -> None:
        """Close a connection."""
        with self._lock:
            self._open.discard(conversation)
        conversation.close()

    def _patience(self) -> Patience:
        return Patience(self._config.request_timeout / SECOND, self._closed, self._who)

    def _connect_once(self, patience: Patience) -> "_Conversation":
        if self._has_server_ended:
            raise StoreUnavailable(f"{self._who} has ended", hint=HINT)
        sock = self._names.connect(*self._address, patience.left_s)
        conversation = _Conversation(sock, self._who)
        try:
            if sock.getsockname() == sock.getpeername():
                # Trying a free port of the own machine may, by chance, reach oneself.
                raise ConnectionRefusedError(errno.ECONNREFUSED, "no server listens")  # noqa: TRY301
            if self._tls is not None:
                conversation.encrypt(self._tls)
            life = conversation.greet(self._config.token)
            self._check_life(life)
        except BaseException:
            conversation.close()
            raise
        with self._lock:
            self._open.add(conversation)
            if self._closed.is_set():
                conversation.wake()
        return conversation

    def _check_life(self, life: bytes) -> None:
        with self._lock:
            if self._life is None:
                self._life = life
            if self._life == life:
                return
        raise StoreRefused(
            f"{self._who} was restarted and has lost what the nodes had agreed on",
            hint="the agent that serves it has died meanwhile; start the run again,"
            " and use etcd where that must be survived",
        )

    def _ask(
        self, request: protocol.Request, kind: type[AnswerT], *, repeats: bool = True
    ) -> AnswerT:
        patience = self._patience()
        last_error: BaseException | None = None
        for _ in patience.attempts():
            conversation = self._take() or self.connect()
            try:
                answer = conversation.ask(request, patience.left_s)
            except OSError as error:
                self.let_go(conversation)
                last_error = error
                if not repeats and not self._closed.is_set():
                    raise StoreUnavailable(
                        f"{self._who} did not answer a transaction: {describe(error)}",
                        hint="it may have taken place: read before trying again",
                    ) from error
            except BaseException:
                self.let_go(conversation)
                raise
            else:
                self._give_back(conversation)
                return _expected(answer, kind, self._who)
        raise patience.exhausted(last_error, HINT) from last_error

    def _take(self) -> "_Conversation | None":
        while True:
            with self._lock:
                if self._closed.is_set():
                    raise closed_error(self._who)
                conversation = self._idle.pop() if self._idle else None
            if conversation is None or not conversation.has_ended:
                return conversation
            self.let_go(conversation)

    def _give_back(self, conversation: "_Conversation") -> None:
        with self._lock:
            if not self._closed.is_set():
                self._idle.append(conversation)
                return
        self.let_go(conversation)


class EmbeddedWatch:
    """The changes under a prefix; a `rankwise.ports.store.Watch`."""

    def __init__(self, store: EmbeddedStore, prefix: str, after: Revision) -> None:
        self._store = store
        self._prefix = prefix
        self._reported = after
        self._connection = WatchConnection[_Conversation](
            store.let_go, lambda: store.is_closed, (OSError,)
        )

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._connection.is_closed

    def next(self, patience: Duration) -> tuple[Change, ...]:
        """Wait for the next changes; empty when there were none for `patience`."""
        return self._connection.next_changes(patience, self._connect, self._receive_changes)

    def close(self) -> None:
        """End the watch and wake a thread that waits in `next`."""
        self._connection.close()

    def _receive_changes(
        self, conversation: "_Conversation", ends_at: float
    ) -> tuple[Change, ...] | None:
        answer = conversation.receive(ends_at)
        return None if answer is None else self._changes_of(answer)

    def _changes_of(self, answer: protocol.Answer) -> tuple[Change, ...]:
        if isinstance(answer, protocol.Forgotten):
            self._connection.hang_up()
            raise Compacted(
                answer.reason, answer.revision, hint="read again, and watch after that revision"
            )
        if isinstance(answer, protocol.Ended):
            self._connection.hang_up()
            raise self._store.note_end()
        told = _expected(answer, protocol.ChangesReported, "the embedded store")
        self._reported = max(self._reported, told.up_to)
        return told.changes

    def _connect(self) -> "_Conversation":
        conversation = self._store.connect()
        self._connection.take(conversation)
        conversation.say(protocol.WatchAsked(self._prefix, self._reported))
        return conversation


class _Conversation:
    """One connection to the server."""

    def __init__(self, sock: socket.socket, who: str) -> None:
        self._sock = sock
        self._who = who
        self._stream: protocol.FrameStream = protocol.PlainStream()
        self._frames = protocol.Frames(4096)
        self._sealer = protocol.Sealer()
        self._poll = poll()
        self._poll.register(sock, POLLIN)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_dead_hosts(sock)

    @property
    def has_ended(self) -> bool:
        """Whether the server has hung up on it while it was idle."""
        return has_hung_up(self._sock)

    def encrypt(self, context: "ssl.SSLContext") -> None:
        """Speak within TLS from now on.

        Raises:
            StoreRefused: this is another run's store, or one that does not encrypt.
            OSError: it hangs up.
        """
        from rankwise.drivers.real.stores.tls import TlsStream  # noqa: PLC0415  # loads ssl

        stream, is_first = TlsStream(context, is_server=False), True
        while not stream.is_established:
            self._sock.sendall(stream.unsent())
            raw = self._received()
            if is_first and raw[0] not in protocol.TLS_RECORDS:
                self._frames.feed(raw)
                raise self._not_ours(f"it answers TLS with {self._first_word()!r}")
            is_first = False
            try:
                self._frames.feed(stream.feed(raw))
            except RemoteProtocolError as error:
                with suppress(OSError):
                    self._sock.sendall(stream.unsent())
                raise StoreOfAnotherRun(
                    f"{self._who} belongs to another run: its token is not ours, or it has another"
                    f" way to encrypt ({error})",
                    hint="give all nodes of a run the same --rdzv-id, RANKWISE_STORE_TOKEN and"
                    " version of Python, and each run an endpoint of its own",
                ) from error
        self._sock.sendall(stream.unsent())
        self._stream = stream

    def greet(self, token: bytes) -> bytes:
        """Prove to each other that both know the token; the name of the server's life.

        Raises:
            StoreRefused: this is another run's store, another version, or none at all.
            OSError: it hangs up.
        """
        nonce = protocol.new_nonce()
        self._send(protocol.Hello(protocol.VERSION, nonce))
        match self._first_word():
            case protocol.Welcome(_, own, proof, life):
                secret = protocol.Secret(token, nonce, own)
                if proof != secret.server_proof:
                    raise StoreOfAnotherRun(
                        f"{self._who} belongs to another run: its token is not ours",
                        hint="give all nodes of a run the same --rdzv-id and RANKWISE_STORE_TOKEN,"
                        " and each run an endpoint of its own",
                    )
                self._send(protocol.Proof(secret.client_proof))
                self._sealer.seal_with(secret.requests_key)
                self._frames.seal_with(secret.answers_key, protocol.ANSWER_BYTES_MAX)
                return life
            case other:
                raise self._not_ours(f"it begins with {other!r}")

    def say(self, request: protocol.Request) -> None:
        """Send a request."""
        self._send(request)

    def ask(self, request: protocol.Request, patience_s: float) -> protocol.Answer:
        """Send a request and wait for its answer.

        Raises:
            OSError: it does not come.
        """
        self._sock.settimeout(patience_s)
        self.say(request)
        answer = self.receive(monotonic() + patience_s)
        if answer is None:
            raise TimeoutError(errno.ETIMEDOUT, f"no answer for {patience_s:.3g} s")
        return answer

    def receive(self, ends_at: float) -> protocol.Answer | None:
        """The next thing the server says; None when it says nothing until then.

        Raises:
            OSError: it has hung up.
        """
        while (body := self._body()) is None:
            wait_s = min(max(0.0, ends_at - monotonic()), 86_400.0)
            if not self._poll.poll(wait_s * 1000):
                return None
            self._receive()
        answer: protocol.Answer = protocol.decode_answer(body)
        return answer

    def wake(self) -> None:
        """End it from another thread, which then sees that the server has hung up."""
        hang_up(self._sock)

    def close(self) -> None:
        """Let go of the socket."""
        self._sock.close()

    def _first_word(self) -> protocol.Greeting:
        try:
            while (body := self._frames.next()) is None:
                self._receive()
            word: protocol.Greeting = protocol.decode_greeting(body)
        except (RemoteProtocolError, msgspec.MsgspecError) as error:
            raise self._not_ours(str(error)) from error
        if isinstance(word, protocol.Refusal):
            raise StoreRefused(
                f"{self._who} refuses this node: {word.reason}",
                hint="run the same version of rankwise on all nodes, and of Python with the same"
                " extras, or give all of them --rdzv-conf encrypts=false",
            )
        return word

    def _not_ours(self, reason: str) -> StoreRefused:
        return StoreRefused(
            f"{self._who} is not an embedded store: {reason}", hint="check --rdzv-endpoint"
        )

    def _send(self, message: protocol.Request | protocol.Greeting) -> None:
        self._sock.sendall(self._stream.wrap(self._sealer.frame(protocol.encoded(message))))

    def _body(self) -> bytes | None:
        try:
            return self._frames.next()
        except RemoteProtocolError as error:
            # A proxy between us has meddled with it; on a new connection all is well or refused.
            raise ConnectionAbortedError(errno.ECONNABORTED, str(error)) from error

    def _receive(self) -> None:
        raw = self._received()
        try:
            self._frames.feed(self._stream.feed(raw))
        except RemoteProtocolError as error:
            raise ConnectionAbortedError(errno.ECONNABORTED, str(error)) from error

    def _received(self) -> bytes:
        raw = self._sock.recv(RECEIVED_AT_ONCE)
        if not raw:
            raise ConnectionResetError(errno.ECONNRESET, "the server has hung up")
        return raw


def _expected(answer: protocol.Answer, kind: type[AnswerT], who: str) -> AnswerT:
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, protocol.Lost):
        raise LeaseLost(answer.reason)
    if isinstance(answer, protocol.Misunderstood):
        raise LocalProtocolError(f"{who} says: {answer.reason}")
    raise RemoteProtocolError(f"{who} answers {type(answer).__name__}, expected {kind.__name__}")


def _near_address(server: EmbeddedServer) -> tuple[str, int]:
    host, port = server.address
    # A server on all addresses is reached on the one that never leaves the machine.
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port  # noqa: S104 -- compared only


def _serve_if_due(config: EmbeddedConfig, clock: Clock) -> tuple[bool, EmbeddedServer | None]:
    """Whether another process has the port that is ours to serve at; else the server, if we do."""
    if config.is_host is False:
        return False, None
    address = endpoint_text(config.host, config.port)
    try:
        listener = listen(config.host, config.port, must=config.is_host is True)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        if config.is_host is None and (is_taken or error.errno == errno.EADDRNOTAVAIL):
            return is_taken, None
        owner = port_owner(config.port) if is_taken else None
        by = "" if owner is None else f" by {owner}"
        raise ConfigError(
            f"no store can listen at {address}: {describe(error)}{by}",
            hint="give another --rdzv-endpoint, or is_host=false where another agent serves",
        ) from error
    if not config.encrypts:
        return False, EmbeddedServer([listener], config.token, clock)
    from rankwise.drivers.real.stores.tls import server_context  # noqa: PLC0415  # loads ssl

    return False, EmbeddedServer([listener], config.token, clock, server_context(config.token))
