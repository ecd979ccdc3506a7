"""The members of an etcd cluster: connections, fail-over, TLS, users.

One member at a time is the *current* one: requests and watches go there. A member that refuses, is
silent for longer than an attempt may take, or says that it cannot serve, is *suspected*: the next
one becomes current, and every watch that hangs on the suspect is woken, so that it moves too. That
is how a stopped machine is noticed, whose kernel goes on acknowledging what is never read.

Connections that carry no request are kept, at most as many as there were requests at the same time;
one on which the member has hung up meanwhile is found out before it is used. A request that changes
something is sent once: when its answer does not come, it may have been carried out, and only the
caller knows how to find out. All others are repeated, with the next member, until the time is over.
"""

import socket
import ssl
from random import randrange
from threading import Event, Lock
from time import monotonic
from typing import Any, NoReturn, TypeVar

import msgspec

from rankwise.base.errors import (
    ConfigError,
    LeaseLost,
    StoreError,
    StoreOfAnotherRun,
    StoreRefused,
    StoreUnavailable,
)
from rankwise.base.units import SECOND, Duration
from rankwise.drivers.real.stores.connections import endpoint_text, hang_up, is_end_of_tls
from rankwise.drivers.real.stores.etcd_connection import EtcdConnection
from rankwise.drivers.real.stores.etcd_messages import AuthenticateReply, Fault, decoded
from rankwise.drivers.real.stores.etcd_stream import NoHttp
from rankwise.drivers.real.stores.names import Names
from rankwise.drivers.real.stores.patience import Patience, closed_error, describe

T = TypeVar("T")

_NO_PASSWORD = ""
"""An encrypted key is an error, instead of a question on the terminal."""
_IS_SELF_SIGNED = 18
"""OpenSSL's number for a self-signed certificate, as those of tokens are."""
API_PATHS = ("/v3", "/v3beta")
"""Where the gateway is: etcd 3.4 and later, and 3.3."""
ATTEMPT_SHARE = 3
"""An attempt may take this part of the request's time when there is another member to try."""
HINT_UNAVAILABLE = "check --rdzv-endpoint, and whether etcd runs there and has a quorum"
HINT_NO_TLS = "if it does not use TLS, leave out protocol=https and cacert"


class EtcdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach an etcd cluster.

    Attributes:
        endpoints: `(host, port)` of its members, at least one.
        use_tls: whether to speak TLS; implied by `cacert` and `cert`.
        cacert: file with the authorities that its certificate must come from; None: the system's.
        cert, key: files with the certificate of this client, and with its key.
        user, password: if etcd asks for them.
        request_timeout: how long one call may take, with all its attempts.
    """

    endpoints: tuple[tuple[str, int], ...]
    use_tls: bool = False
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = None
    request_timeout: Duration = Duration(2 * SECOND)

    @property
    def trusts_itself(self) -> bool:
        """Whether all who may speak to each other have one certificate: that of a run's token."""
        return self.cacert is not None and self.cacert == self.cert


class NotReached(Exception):
    """No connection could be made, so nothing was asked; the cause says why."""


class NotServing(Exception):
    """A member answers that it cannot serve now; another one may."""


class NotAuthenticated(Exception):
    """A token is missing, or not good any more."""


class EtcdMember:
    """One member of the cluster."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.idle: list[EtcdConnection] = []
        self.watching: set[socket.socket] = set()
        self.answered_at = 0.0
        """When it last answered a request, on the clock of `monotonic`."""

    @property
    def endpoint(self) -> str:
        """As people write it."""
        return endpoint_text(self.host, self.port)


class Members:
    """All members, and which one is current. Any thread may call."""

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self.closed = Event()
        self._names = Names()
        self.members = [EtcdMember(host, port) for host, port in config.endpoints]
        self.who = "etcd at " + ", ".join(member.endpoint for member in self.members)
        self._tls = _tls_context(config)
        # Spread over the members, since watches of all nodes stay where they begin.
        self._current = randrange(len(self.members))  # noqa: S311 -- no secret
        self._api_path = API_PATHS[0]
        self._token: str | None = None
        self._lock = Lock()
        self._busy: set[EtcdConnection] = set()

    @property
    def timeout_s(self) -> float:
        """How long one call may take."""
        return self.config.request_timeout / SECOND

    @property
    def attempt_s(self) -> float:
        """How long one attempt may take."""
        return self.timeout_s / (1 if len(self.members) == 1 else ATTEMPT_SHARE)

    @property
    def current(self) -> EtcdMember:
        """The member that is asked."""
        return self.members[self._current]

    def patience(self) -> Patience:
        """For one call."""
        return Patience(self.timeout_s, self.closed, self.who)

    def ask(self, path: str, body: dict[str, Any], kind: type[T], *, repeats: bool = True) -> T:
        """Send a request and return its answer.

        Args:
            path: below the API's, as `/kv/range`.
            body: the request.
            kind: what the answer is read as.
            repeats: whether it may be sent again when its answer does not come.

        Raises:
            StoreUnavailable, StoreRefused, LeaseLost: see the port.
        """
        patience = self.patience()
        last_error: BaseException | None = None
        for _ in patience.attempts():
            member = self.current
            try:
                return self._ask_authenticated(member, path, body, kind, patience)
            except NotReached as error:
                last_error = _telling(last_error, error.__cause__)
            except (OSError, NotServing) as error:
                self._raise_if_not_etcd(error, member)
                last_error = _telling(last_error, error)
                if not repeats:
                    self.suspect(member)
                    raise self._unanswered(member, error) from error
            self.suspect(member)
        raise patience.exhausted(last_error, self.hint_for(last_error)) from last_error

    def hint_for(self, error: BaseException | None) -> str:
        """What to do without an answer."""
        if "space exceeded" in str(error):
            return "etcd's quota is spent: compact and defragment it, then `etcdctl alarm disarm`"
        if not _is_cut(error):
            return HINT_UNAVAILABLE
        # Both sides just hang up at what they do not understand.
        if self._tls is None:
            return f"{HINT_UNAVAILABLE}; if it accepts TLS only, give protocol=https"
        return f"{HINT_UNAVAILABLE}; {HINT_NO_TLS}"

    def probe(self, member: EtcdMember) -> None:
        """Find out whether a member still serves; suspect it if not."""
        patience = Patience(self.attempt_s, self.closed, member.endpoint)
        body = {"key": "AA==", "count_only": True}
        try:
            self._ask_authenticated(member, "/kv/range", body, object, patience)
        except (OSError, NotReached, NotServing):
            self.suspect(member)

    def suspect(self, member: EtcdMember) -> None:
        """Go on with the next member, and wake the watches that hang on this one."""
        with self._lock:
            if self.current is member:
                self._current = (self._current + 1) % len(self.members)
            idle, member.idle = member.idle, []
            for sock in member.watching:
                hang_up(sock)
        for connection in idle:
            connection.close()

    def open_stream(self, member: EtcdMember, path: str, body: dict[str, Any]) -> socket.socket:
        """Send a request whose answer is a stream; its socket belongs to the caller.

        Raises:
            OSError, NotReached, NotServing: it could not be sent.
        """
        patience = Patience(self.attempt_s, self.closed, member.endpoint)
        token = self._token_for(member, patience)
        headers = _authorization(token)
        # Told to etcd itself: end the stream when this member is cut off from the others.
        headers["Grpc-Metadata-Hasleader"] = "true"
        connection = self._connect(member, patience.left_s)
        sock = connection.sock
        try:
            connection.send(self._api_path + path, body, headers, patience.left_s)
        except BaseException:
            sock.close()
            raise
        with self._lock:
            member.watching.add(sock)
            if self.closed.is_set():
                hang_up(sock)
        return sock

    def close_stream(self, member: EtcdMember, sock: socket.socket) -> None:
        """Let go of a stream's socket."""
        with self._lock:
            member.watching.discard(sock)
        sock.close()

    def close(self) -> None:
        """Close all connections, and wake who waits on them."""
        with self._lock:
            self.closed.set()
            for member in self.members:
                for connection in member.idle:
                    connection.close()
                member.idle.clear()
                for sock in member.watching:
                    hang_up(sock)
            for connection in self._busy:
                hang_up(connection.sock)
        self._names.close()

    def raise_fault(self, status: int, body: bytes, member: EtcdMember) -> NoReturn:
        """Raise what an answer other than 200 means.

        Raises:
            StoreRefused, LeaseLost, NotServing, NotAuthenticated, StoreError: what it means.
        """
        try:
            text = decoded(body, Fault).text
        except msgspec.MsgspecError:
            raise _not_etcd(body, member) from None
        self.raise_complaint(text, status, member)

    def raise_complaint(self, text: str, status: int, member: EtcdMember) -> NoReturn:
        """Raise what etcd's words mean.

        Raises:
            StoreRefused, LeaseLost, NotServing, NotAuthenticated, StoreError: what they mean.
        """
        if "lease not found" in text:
            raise LeaseLost("the lease has ended", hint=f"{member.endpoint} says: {text}")
        if status == 401 or "invalid auth token" in text or "revision in auth header" in text:
            raise NotAuthenticated(text)
        if "user name is empty" in text:
            raise asks_for_a_user(member)
        if status == 403 or "authentication failed" in text or "permission denied" in text:
            raise StoreRefused(
                f"{member.endpoint} refuses user {self.config.user!r}: {text}",
                hint="check user and password, and the roles that etcd grants to that user",
            )
        if status >= 500 or status in (408, 412, 429):
            raise NotServing(f"{member.endpoint} says: {text}")
        raise StoreError(f"{member.endpoint} refuses a request: {text}")

    @property
    def is_anonymous(self) -> bool:
        """Whether this client has no name for the server."""
        return self.config.user is None and self.config.cert is None

    def forget_token(self) -> None:
        """Ask for a new one when the next is needed."""
        self._token = None

    def _ask_authenticated(
        self, member: EtcdMember, path: str, body: dict[str, Any], kind: type[T], patience: Patience
    ) -> T:
        try:
            return self._ask_once(member, path, body, kind, patience)
        except NotAuthenticated:
            # It has expired, or users have been changed; etcd has not looked at the request.
            self.forget_token()
        try:
            return self._ask_once(member, path, body, kind, patience)
        except NotAuthenticated as error:
            raise NotServing(describe(error)) from error

    def _ask_once(
        self, member: EtcdMember, path: str, body: dict[str, Any], kind: type[T], patience: Patience
    ) -> T:
        token = self._token_for(member, patience)
        return self._exchange(member, path, body, kind, patience, token=token)

    def _token_for(self, member: EtcdMember, patience: Patience) -> str | None:
        user, password = self.config.user, self.config.password
        if user is None:
            return None
        if self._token is None:
            body = {"name": user, "password": password or ""}
            try:
                self._token = self._exchange(
                    member, "/auth/authenticate", body, AuthenticateReply, patience
                ).token
            except (NotServing, StoreError) as error:  # the status is another one since 3.5
                if "authentication is not enabled" in describe(error):
                    return None
                raise
        return self._token

    def _exchange(
        self,
        member: EtcdMember,
        path: str,
        body: dict[str, Any],
        kind: type[T],
        patience: Patience,
        *,
        token: str | None = None,
    ) -> T:
        """One request, one answer, on a connection of their own while it lasts."""
        headers = _authorization(token)
        timeout_s = min(self.attempt_s, patience.left_s)
        connection = self._take(member, timeout_s)
        try:
            status, answer = connection.ask(self._api_path + path, body, headers, timeout_s)
            if status == 404 and path != "/auth/authenticate" and answer[:1] != b"{":
                status, answer = self._ask_older(connection, path, body, headers, timeout_s)
        except NoHttp as error:
            self._drop(connection)
            raise _not_etcd(error.began, member) from error
        except BaseException:
            self._drop(connection)
            raise
        self._give_back(member, connection)
        if status != 200:
            self.raise_fault(status, answer, member)
        try:
            return decoded(answer, kind)
        except msgspec.MsgspecError:
            raise _not_etcd(answer, member) from None

    def _ask_older(
        self,
        connection: EtcdConnection,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str],
        timeout_s: float,
    ) -> tuple[int, bytes]:
        """There is no such page: ask where older versions have it, and remember what worked."""
        before = self._api_path
        self._api_path = next(other for other in API_PATHS if other != before)
        status, answer = connection.ask(self._api_path + path, body, headers, timeout_s)
        if status == 404 and answer[:1] != b"{":
            self._api_path = before
        return status, answer

    def _take(self, member: EtcdMember, timeout_s: float) -> EtcdConnection:
        while True:
            with self._lock:
                if self.closed.is_set():
                    raise closed_error(self.who)
                connection = member.idle.pop() if member.idle else None
            if connection is None:
                connection = self._connect(member, timeout_s)
                break
            if connection.may_be_used_again:
                break
            connection.close()
        with self._lock:
            self._busy.add(connection)
            if self.closed.is_set():
                hang_up(connection.sock)
        return connection

    def _connect(self, member: EtcdMember, timeout_s: float) -> EtcdConnection:
        try:
            return EtcdConnection(member.host, member.port, timeout_s, self._tls, self._names)
        except OSError as error:
            self._raise_if_not_etcd(error, member)
            raise NotReached(describe(error)) from error

    def _give_back(self, member: EtcdMember, connection: EtcdConnection) -> None:
        member.answered_at = monotonic()
        with self._lock:
            self._busy.discard(connection)
            if not self.closed.is_set():
                member.idle.append(connection)
                return
        connection.close()

    def _drop(self, connection: EtcdConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    def _raise_if_not_etcd(self, error: BaseException, member: EtcdMember) -> None:
        """A certificate that is not good now will not be good in a second.

        Raises:
            StoreRefused: who refuses whom.
        """
        if isinstance(error, ssl.SSLCertVerificationError):
            if self.config.trusts_itself and error.verify_code == _IS_SELF_SIGNED:
                raise StoreOfAnotherRun(
                    f"the etcd at {member.endpoint} belongs to another run: its token is not ours,"
                    " or its nodes were given other endpoints",
                    hint="give all nodes of a run the same --rdzv-id, --rdzv-endpoint and"
                    " RANKWISE_STORE_TOKEN",
                ) from error
            if self.config.trusts_itself:
                raise StoreRefused(
                    f"what answers at {member.endpoint} is not an etcd of this or another run: the"
                    f" certificate that it shows is not from rankwise ({error.verify_message})",
                    hint="check --rdzv-endpoint, and whether a proxy answers in its place",
                ) from error
            raise StoreRefused(
                f"the certificate of {member.endpoint} is not good: {error.verify_message}",
                hint="check cacert, and that the certificate names the host of the endpoint",
            ) from error
        if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLSyscallError):
            return
        if not is_end_of_tls(error):
            # Only OpenSSL's words tell whether that was TLS at all, and no version keeps them.
            reason = (error.reason or str(error)).lower().replace("_", " ")
            raise StoreRefused(
                f"{member.endpoint} refuses TLS: {reason}",
                hint=f"{HINT_NO_TLS}; if it asks for a client's certificate, give cert and key",
            ) from error

    def _unanswered(self, member: EtcdMember, error: BaseException) -> StoreUnavailable:
        if self.closed.is_set():
            return closed_error(self.who)
        return StoreUnavailable(
            f"{member.endpoint} did not answer a transaction: {describe(error)}",
            hint="it may have taken place: read before trying again",
        )


def asks_for_a_user(member: EtcdMember) -> StoreRefused:
    """What is told to a client that is no user where users are wanted."""
    return StoreRefused(
        f"{member.endpoint} asks for a user", hint="give user and password in --rdzv-conf"
    )


def _authorization(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": token}


def _tls_context(config: EtcdConfig) -> ssl.SSLContext | None:
    if not (config.use_tls or config.cacert or config.cert):
        return None
    try:
        context = ssl.create_default_context(cafile=config.cacert)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"etcd's cacert {config.cacert!r} cannot be used: {describe(error)}",
            hint="expected a file with certificates in PEM",
        ) from error
    if config.cert is not None:
        try:
            context.load_cert_chain(config.cert, config.key, password=_NO_PASSWORD)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"etcd's cert {config.cert!r} and key {config.key!r} cannot be used:"
                f" {describe(error)}",
                hint="expected files in PEM that belong together; without key, cert holds both",
            ) from error
    return context


def _telling(before: BaseException | None, now: BaseException | None) -> BaseException | None:
    """The error that says more: the last attempt may just have had no time."""
    is_answer = isinstance(before, NotServing) or _is_cut(before)
    return before if is_answer and isinstance(now, TimeoutError) else now


def _is_cut(error: BaseException | None) -> bool:
    """Whether the member has closed the connection without a word."""
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return True
    return error is not None and is_end_of_tls(error)


def _not_etcd(body: bytes, member: EtcdMember) -> StoreRefused:
    if b"HTTPS server" in body:
        return StoreRefused(
            f"{member.endpoint} accepts TLS only", hint="give protocol=https, and cacert if needed"
        )
    start = body[:60].decode(errors="replace").strip()
    return StoreRefused(
        f"{member.endpoint} is not an etcd with a JSON gateway: it answers {start!r}",
        hint="etcd 3.3 or later has one unless it runs with --enable-grpc-gateway=false",
    )
