"""The embedded store among strangers: who serves, who is let in, and what harms nobody else."""

import os
import random
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress

import msgspec
import pytest
from etcd_servers import free_ports
from running import stop_child

from rankwise.base.errors import Compacted, ConfigError, StoreRefused, StoreUnavailable
from rankwise.base.keys import Committed, Put, Revision, Transaction
from rankwise.base.units import MILLISECOND, SECOND, ZERO, Duration
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.reactor import Reactor
from rankwise.drivers.real.store_client import StoreClient
from rankwise.drivers.real.stores import embedded_server
from rankwise.drivers.real.stores.deferred import DeferredStore
from rankwise.drivers.real.stores.embedded import (
    EmbeddedConfig,
    EmbeddedStore,
    EmbeddedWatch,
    open_embedded,
)
from rankwise.drivers.real.stores.embedded_protocol import (
    ANSWER_BYTES_MAX,
    VERSION,
    CommitAsked,
    Frames,
    Hello,
    Proof,
    ReadAsked,
    Sealer,
    Secret,
    Welcome,
    encoded,
)
from rankwise.drivers.real.stores.encryption import encryption_lack

pytestmark = pytest.mark.system

TOKEN = b"known to all nodes of the run"
PATIENCE = Duration(60 * SECOND)
SHORT = Duration(300 * MILLISECOND)
"""For calls that nobody can answer."""
A_WHILE = Duration(2 * SECOND)
"""For a client whose calls are answered at first, on a busy machine too."""
CLOCK = SystemClock()


def put(store: EmbeddedStore, key: str, value: bytes = b"") -> Revision:
    result = store.commit(Transaction(puts=(Put(key, value),)))
    assert isinstance(result, Committed)
    return result.revision


def config_for(
    port: int,
    *,
    host: str = "127.0.0.1",
    token: bytes = TOKEN,
    is_host: bool | None = None,
    encrypts: bool | None = None,
    timeout: Duration = PATIENCE,
    linger: Duration = PATIENCE,
) -> EmbeddedConfig:
    return EmbeddedConfig(
        host=host,
        port=port,
        token=token,
        is_host=is_host,
        encrypts=encrypts,
        request_timeout=timeout,
        linger=linger,
    )


def address_of(store: EmbeddedStore) -> tuple[str, int]:
    assert store.server is not None
    return store.server.address


needs_encryption = pytest.mark.skipif(
    encryption_lack() is not None, reason=f"nothing can be encrypted: {encryption_lack()}"
)


@pytest.fixture(params=["in the clear", pytest.param("encrypted", marks=needs_encryption)])
def host(request: pytest.FixtureRequest) -> Iterator[EmbeddedStore]:
    config = config_for(0, linger=ZERO, encrypts=request.param == "encrypted")
    with open_embedded(config, CLOCK) as store:
        yield store


in_the_clear = pytest.mark.parametrize("host", ["in the clear"], indirect=True)
encrypted = pytest.mark.parametrize(
    "host", [pytest.param("encrypted", marks=needs_encryption)], indirect=True
)


@pytest.fixture
def port(host: EmbeddedStore) -> int:
    return address_of(host)[1]


def test_the_first_agent_on_a_machine_serves_and_the_second_is_a_client() -> None:
    (port,) = free_ports(1)
    with (
        open_embedded(config_for(port), CLOCK) as first,
        open_embedded(config_for(port), CLOCK) as second,
    ):
        put(first, "a")

        assert first.server is not None
        assert second.server is None
        assert len(second.read("").entries) == 1
        second.close()


def test_an_address_of_another_machine_is_not_served() -> None:
    # Kept for documentation: nobody has it.
    with open_embedded(config_for(29400, host="192.0.2.1", timeout=SHORT), CLOCK) as store:
        assert store.server is None
        with pytest.raises(
            StoreUnavailable, match=r"0\.3 s from the embedded store at 192\.0\.2\.1:29400"
        ):
            store.read("")


def test_a_host_behind_a_translated_address_serves_on_all_its_own() -> None:
    with open_embedded(config_for(0, host="192.0.2.1", is_host=True), CLOCK) as store:
        assert address_of(store)[0] in {"::", "0.0.0.0"}
        put(store, "a")


def test_the_name_of_this_machine_stands_for_all_its_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian gives it 127.0.1.1, which nobody else can reach."""
    genuine = socket.getaddrinfo

    def resolve(host: str, *arguments: object, **more: object) -> object:
        if host == "this.machine.test":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
        return genuine(host, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with open_embedded(config_for(0, host="this.machine.test"), CLOCK) as store:
        assert address_of(store)[0] in {"::", "0.0.0.0"}
        put(store, "a")


def test_who_must_serve_and_cannot_says_why(port: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"listen at 127\.0\.0\.1:{port}: Address already in use"
    ):
        open_embedded(config_for(port, is_host=True), CLOCK)


def test_who_must_not_serve_waits_for_who_does() -> None:
    (port,) = free_ports(1)
    with (
        open_embedded(config_for(port, is_host=False), CLOCK) as early,
        ThreadPoolExecutor(1) as pool,
    ):
        reading = pool.submit(early.read, "")
        with open_embedded(config_for(port, is_host=True), CLOCK) as late:
            assert late.server is not None
            assert reading.result(PATIENCE / SECOND).entries == ()
            early.close()


def test_another_token_is_refused_with_what_to_do(host: EmbeddedStore, port: int) -> None:
    config = config_for(port, token=b"another", encrypts=host.encrypts)
    with open_embedded(config, CLOCK) as stranger:
        with pytest.raises(StoreRefused, match="belongs to another run") as refused:
            stranger.read("")
        with (
            closing(stranger.watch("", Revision(0))) as watch,
            pytest.raises(StoreRefused, match="belongs to another run"),
        ):
            watch.next(PATIENCE)

    assert refused.value.hint is not None
    assert "an endpoint of its own" in refused.value.hint
    put(host, "still-there")


def test_a_server_of_another_kind_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(4096)

        answering = pool.submit(answer)
        config = config_for(other.getsockname()[1], is_host=False)
        with (
            open_embedded(config, CLOCK) as store,
            pytest.raises(StoreRefused, match="is not an embedded store"),
        ):
            store.read("")
        answering.result(PATIENCE / SECOND)


@in_the_clear
def test_a_client_of_another_version_is_told_so(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE / SECOND) as sock:
        sock.sendall(Sealer().frame(encoded(Hello(VERSION + 1, bytes(16)))))

        assert f"it has version {VERSION}".encode() in sock.recv(4096)


def frame(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


HOSTILE = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "a TLS record of nothing": b"\x16\x03\x01\x00\x05hello",
    "the beginning of a TLS record": b"\x16\x03\x01\xff\xff",
    "an enormous length": b"\xff\xff\xff\xff",
    "no message": frame(b"\xc1\xc1\xc1"),
    "a message out of turn": frame(encoded(Proof(b"x"))),
    "an empty frame": frame(b""),
    "a proof of nothing": frame(encoded(Hello(VERSION, bytes(16)))) + frame(encoded(Proof(b"x"))),
    "a second hello": 2 * frame(encoded(Hello(VERSION, bytes(16)))),
    "a frame of the wrong kind": frame(encoded(Welcome(1, b"", b"", b""))),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_who_says_what_is_not_allowed_is_cut_off(host: EmbeddedStore, port: int, name: str) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE / SECOND) as sock:
        sock.sendall(HOSTILE[name])
        while wait_for_bytes(sock):
            pass

    put(host, "still-there")


class Between:
    """Somebody between a client and the server, who hears all, and may change it."""

    def __init__(self, port: int) -> None:
        self.heard = bytearray()
        self.changes_next = threading.Event()
        """Set: one byte of what the server says next is changed."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._server_port = port
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:  # the first of them adds the others
            thread.join()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += [client, server]
                for pair in ((client, server), (server, client)):
                    thread = threading.Thread(target=self._carry, args=pair, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        is_servers = source.getpeername()[1] == self._server_port
        with suppress(OSError):
            while data := bytearray(source.recv(65536)):
                self.heard += data
                if is_servers and self.changes_next.is_set():
                    self.changes_next.clear()
                    data[-1] ^= 1
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def test_who_is_between_can_read_what_is_said_only_in_the_clear(
    host: EmbeddedStore, port: int
) -> None:
    with closing(Between(port)) as between:
        config = config_for(between.port, is_host=False, encrypts=host.encrypts)
        with open_embedded(config, CLOCK) as client:
            put(client, "a-key-of-the-run", b"what a node says")
            assert client.read("").entries[0].value == b"what a node says"

    assert (b"a-key-of-the-run" in between.heard) is not host.encrypts
    assert (b"what a node says" in between.heard) is not host.encrypts
    assert TOKEN not in between.heard


def test_what_somebody_changes_on_its_way_is_asked_for_again(
    host: EmbeddedStore, port: int
) -> None:
    with closing(Between(port)) as between:
        config = config_for(between.port, is_host=False, encrypts=host.encrypts)
        with open_embedded(config, CLOCK) as client:
            put(client, "a", b"1")
            between.changes_next.set()

            assert client.read("").entries[0].value == b"1"
    assert not between.changes_next.is_set()


@encrypted
def test_a_node_that_does_not_encrypt_is_refused_by_a_store_that_does(
    host: EmbeddedStore, port: int
) -> None:
    config = config_for(port, is_host=False, encrypts=False)
    with (
        open_embedded(config, CLOCK) as client,
        pytest.raises(StoreRefused, match="encrypted, and this node cannot") as refused,
    ):
        client.read("")

    assert refused.value.hint is not None
    assert "encrypts=false" in refused.value.hint


@in_the_clear
@needs_encryption
def test_a_node_that_encrypts_is_refused_by_a_store_that_does_not(
    host: EmbeddedStore, port: int
) -> None:
    config = config_for(port, is_host=False, encrypts=True)
    with (
        open_embedded(config, CLOCK) as client,
        pytest.raises(StoreRefused, match="this node encrypts what it says, and the store cannot"),
    ):
        client.read("")


def impostor(answer: Callable[[socket.socket], None]) -> "AbstractContextManager[int]":
    """A port behind which one connection is answered by somebody else."""

    @contextmanager
    def serving() -> Iterator[int]:
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

            def serve() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(PATIENCE / SECOND)
                    answer(connection)

            answering = pool.submit(serve)
            yield listener.getsockname()[1]
            answering.result(PATIENCE / SECOND)

    return serving()


@needs_encryption
def test_nobody_talks_a_node_out_of_encrypting() -> None:
    def welcome(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(Sealer().frame(encoded(Welcome(VERSION, bytes(16), bytes(32), b""))))
        assert connection.recv(65536) == b"", "the node hangs up"

    with (
        impostor(welcome) as port,
        open_embedded(config_for(port, is_host=False), CLOCK) as client,
        pytest.raises(StoreRefused, match="is not an embedded store: it answers TLS with Welcome"),
    ):
        client.read("")


@needs_encryption
def test_a_certificate_that_is_not_the_runs_opens_no_door() -> None:
    certificates = pytest.importorskip("rankwise.drivers.real.stores.token_certificate")

    def take_part(connection: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        own = certificates.certificate_of(b"another token")
        with memory_file(own.key + own.certificate) as path:
            context.load_cert_chain(path)
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(connection, server_side=True)

    with (
        impostor(take_part) as port,
        open_embedded(config_for(port, is_host=False), CLOCK) as client,
        pytest.raises(StoreRefused, match=r"belongs to another run.*certificate verify failed"),
    ):
        client.read("")


@contextmanager
def memory_file(content: bytes) -> Iterator[str]:
    fd = os.memfd_create("test")
    try:
        os.write(fd, content)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def wait_for_bytes(sock: socket.socket) -> bytes:
    try:
        return sock.recv(4096)
    except ConnectionResetError:
        return b""


def test_random_bytes_harm_nobody(host: EmbeddedStore, port: int) -> None:
    dice = random.Random(7)
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE / SECOND) as sock:
            sock.sendall(dice.randbytes(dice.randrange(1, 400)))

    put(host, "still-there")


def introduced(port: int) -> tuple[socket.socket, Sealer, Frames]:
    """A connection that has proved that it knows the token, to do harm with."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE / SECOND)
    sealer, frames = Sealer(), Frames()
    sock.sendall(sealer.frame(encoded(Hello(VERSION, bytes(16)))))
    while (body := frames.next()) is None:
        frames.feed(sock.recv(4096))
    _, _, nonce, _, _ = msgspec.msgpack.decode(body)
    secret = Secret(TOKEN, bytes(16), nonce)
    sock.sendall(sealer.frame(encoded(Proof(secret.client_proof))))
    sealer.seal_with(secret.requests_key)
    frames.seal_with(secret.answers_key, ANSWER_BYTES_MAX)
    return sock, sealer, frames


@in_the_clear
def test_a_frame_that_is_sent_again_by_somebody_else_is_cut_off(
    host: EmbeddedStore, port: int
) -> None:
    sock, sealer, _ = introduced(port)
    with sock:
        words = sealer.frame(encoded(CommitAsked(Transaction(puts=(Put("replayed", b""),)))))
        sock.sendall(words)
        assert wait_for_bytes(sock)
        sock.sendall(words)

        assert wait_for_bytes(sock) == b""
    assert host.read("replayed").revision == 1


@in_the_clear
def test_a_frame_that_was_changed_on_its_way_is_cut_off(host: EmbeddedStore, port: int) -> None:
    sock, sealer, _ = introduced(port)
    with sock:
        words = sealer.frame(encoded(CommitAsked(Transaction(puts=(Put("mine", b"1"),)))))
        sock.sendall(words.replace(b"mine", b"thei"))

        assert wait_for_bytes(sock) == b""
    assert host.read("").entries == ()


@in_the_clear
def test_who_asks_and_never_reads_does_not_fill_the_servers_memory(
    host: EmbeddedStore, port: int
) -> None:
    put(host, "big", bytes(1024 * 1024))
    sock, sealer, _ = introduced(port)
    with sock:
        sock.settimeout(0)
        # It does not read what it could not answer, so this side cannot write any more.
        with suppress(BlockingIOError):
            while True:
                sock.send(sealer.frame(encoded(ReadAsked("big"))))
        assert host.server is not None
        kept = max(len(one.unsent) for one in host.server._connections.values())

        assert kept < 4 * 1024 * 1024
        put(host, "still-there")


def test_a_watch_that_is_never_read_is_told_that_it_lags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedded_server, "HISTORY_MAX", 10)
    with open_embedded(config_for(0, linger=ZERO), CLOCK) as store:
        watch = store.watch("", Revision(0))
        watch.next(Duration(1))
        for _ in range(60):
            put(store, "a", bytes(1024 * 1024))

        # What was on its way when the server had to stop telling comes first.
        with pytest.raises(Compacted, match="forgotten"):
            _drain(watch)


def _drain(watch: EmbeddedWatch) -> None:
    while watch.next(PATIENCE):
        pass


def test_many_strangers_at_the_door_keep_nobody_out(
    host: EmbeddedStore, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_server, "UNAUTHENTICATED_MAX", 8)
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    try:
        config = config_for(port, is_host=False, encrypts=host.encrypts)
        with open_embedded(config, CLOCK) as client:
            put(client, "a")
    finally:
        for stranger in strangers:
            stranger.close()


def test_who_says_nothing_is_cut_off_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_server, "AUTHENTICATION_PATIENCE", Duration(SECOND // 10))
    with open_embedded(config_for(0, linger=ZERO), CLOCK) as store:
        with socket.create_connection(address_of(store), timeout=PATIENCE / SECOND) as sock:
            assert sock.recv(1) == b""
        put(store, "still-there")


def test_a_server_lingers_until_the_others_have_heard_the_last_words() -> None:
    host = open_embedded(config_for(0), CLOCK)
    _, port = address_of(host)
    client = open_embedded(config_for(port, is_host=False), CLOCK)
    watch = client.watch("", client.read("").revision)
    put(host, "verdict")
    closing_host = threading.Thread(target=host.close)
    closing_host.start()

    assert [change.key for change in watch.next(PATIENCE)] == ["verdict"]
    assert len(client.read("").entries) == 1
    client.close()
    closing_host.join(PATIENCE / SECOND)
    assert not closing_host.is_alive()


def test_a_server_does_not_linger_after_an_exception_since_there_are_no_last_words() -> None:
    host = open_embedded(config_for(0), CLOCK)
    _, port = address_of(host)
    store = DeferredStore(lambda: host, "the store", PATIENCE)
    store.read("")
    reactor = Reactor(CLOCK)
    agent = StoreClient(
        store, reactor=reactor, clock=CLOCK, deliver=print, request_timeout=PATIENCE
    )
    with open_embedded(config_for(port, is_host=False, timeout=A_WHILE), CLOCK) as other:
        other.read("")
        begun = CLOCK.now()
        with suppress(KeyboardInterrupt), reactor, agent:
            raise KeyboardInterrupt

        assert CLOCK.now() - begun < PATIENCE / 2
        with pytest.raises(StoreUnavailable):
            other.read("")


def test_a_server_that_opens_when_nobody_wants_it_any_more_does_not_linger() -> None:
    host = open_embedded(config_for(0), CLOCK)
    _, port = address_of(host)
    is_closed = threading.Event()

    def open_late() -> EmbeddedStore:
        is_closed.wait(PATIENCE / SECOND)
        return host

    with open_embedded(config_for(port, is_host=False, timeout=A_WHILE), CLOCK) as other:
        other.read("")
        store = DeferredStore(open_late, "the store", A_WHILE)
        with pytest.raises(StoreUnavailable, match="no answer"):
            store.read("")
        store.close()
        begun = CLOCK.now()
        is_closed.set()
        for thread in threading.enumerate():
            if thread.name == "rankwise-store-opening":
                thread.join(PATIENCE / SECOND)

        assert CLOCK.now() - begun < PATIENCE / 2


def test_a_server_does_not_linger_for_ever() -> None:
    host = open_embedded(config_for(0, linger=Duration(SECOND // 10)), CLOCK)
    _, port = address_of(host)
    with open_embedded(config_for(port, is_host=False, timeout=A_WHILE), CLOCK) as client:
        client.read("")
        host.close()

        with pytest.raises(StoreUnavailable):
            client.read("")


def test_who_watches_a_server_that_ends_is_told_so_and_asks_nobody_any_more() -> None:
    host = open_embedded(config_for(0, linger=ZERO), CLOCK)
    _, port = address_of(host)
    with open_embedded(config_for(port, is_host=False), CLOCK) as client:
        watch = client.watch("", client.read("").revision)
        put(host, "a")
        assert [change.key for change in watch.next(PATIENCE)] == ["a"]
        host.close()

        with pytest.raises(StoreRefused, match=r"the run ends here: the agent that served .* left"):
            watch.next(PATIENCE)
        begun = CLOCK.now()
        with pytest.raises(StoreUnavailable, match="has ended"):
            client.read("")
        assert CLOCK.now() - begun < PATIENCE / 2


def test_a_server_that_has_begun_anew_is_refused_by_who_knew_it_before() -> None:
    (port,) = free_ports(1)
    first = open_embedded(config_for(port, linger=ZERO), CLOCK)
    with open_embedded(config_for(port, is_host=False), CLOCK) as client:
        put(client, "a")
        first.close()
        with (
            open_embedded(config_for(port, linger=ZERO, is_host=True), CLOCK),
            pytest.raises(StoreRefused, match="was restarted"),
        ):
            client.read("")


SERVE = """
import sys
from rankwise.base.units import Duration
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.stores.embedded import EmbeddedConfig, open_embedded
config = EmbeddedConfig(host="127.0.0.1", port=0, token=sys.argv[1].encode(), linger=Duration(0))
with open_embedded(config, SystemClock()) as store:
    print(store.server.address[1], flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def served() -> "Iterator[tuple[subprocess.Popen[str], int]]":
    """A server in a process of its own, and its port."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, TOKEN.decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def test_leases_outlive_a_server_that_was_stopped_for_longer_than_they_last(
    served: "tuple[subprocess.Popen[str], int]",
) -> None:
    process, port = served
    with open_embedded(config_for(port, is_host=False), CLOCK) as store:
        lease = store.grant_lease(Duration(2 * SECOND))
        store.commit(Transaction(puts=(Put("node", b"", lease),)))
        stop_child(process)
        with (
            open_embedded(config_for(port, is_host=False, timeout=SHORT), CLOCK) as hasty,
            pytest.raises(StoreUnavailable),
        ):
            hasty.read("")
        assert not threading.Event().wait(4)
        os.kill(process.pid, signal.SIGCONT)

        store.renew_lease(lease)

        assert len(store.read("node").entries) == 1


def test_a_server_that_was_killed_is_unavailable_to_requests_and_watches(
    served: "tuple[subprocess.Popen[str], int]",
) -> None:
    process, port = served
    with open_embedded(config_for(port, is_host=False, timeout=A_WHILE), CLOCK) as store:
        watch = store.watch("", store.read("").revision)
        watch.next(Duration(1))
        process.kill()

        with pytest.raises(
            StoreUnavailable, match=f"the embedded store at 127.0.0.1:{port}"
        ) as dead:
            watch.next(PATIENCE)
        with pytest.raises(StoreUnavailable):
            store.commit(Transaction())

    assert "ends with it" in str(dead.value)
