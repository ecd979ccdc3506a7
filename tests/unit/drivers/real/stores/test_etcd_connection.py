"""Requests on one connection, and servers that break off."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rankwise.drivers.real.stores.connections import HungUp
from rankwise.drivers.real.stores.etcd_connection import EtcdConnection
from rankwise.drivers.real.stores.etcd_stream import NoHttp
from rankwise.drivers.real.stores.names import Names

PATIENCE_S = 60.0


@contextmanager
def server(converse: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server of one connection; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            taken, _ = listener.accept()
            with taken:
                taken.settimeout(PATIENCE_S)
                converse(taken)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(PATIENCE_S)


def request_of(taken: socket.socket) -> bytes:
    """One request, whose body ends with a brace."""
    received = b""
    while not received.endswith(b"}"):
        received += taken.recv(1000)
    return received


def test_one_connection_carries_one_request_after_the_other() -> None:
    requests = []

    def converse(taken: socket.socket) -> None:
        for number in range(2):
            requests.append(request_of(taken))
            taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % number)

    with server(converse) as port:
        connection = EtcdConnection("127.0.0.1", port, PATIENCE_S, None, Names())
        first = connection.ask("/v3/a", {"b": 1}, {"Authorization": "t"}, PATIENCE_S)
        is_good = connection.may_be_used_again
        second = connection.ask("/v3/a", {}, {}, PATIENCE_S)
        connection.close()

    assert (first, second, is_good) == ((200, b"0"), (200, b"1"), True)
    host = f"Host: 127.0.0.1:{port}\r\n"
    assert requests == [
        f"POST /v3/a HTTP/1.1\r\n{host}Content-Length: 7\r\n".encode()
        + b'Authorization: t\r\n\r\n{"b":1}',
        f"POST /v3/a HTTP/1.1\r\n{host}Content-Length: 2\r\n\r\n{{}}".encode(),
    ]


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"])
def test_an_answer_that_breaks_off_is_none(said: bytes) -> None:
    def converse(taken: socket.socket) -> None:
        request_of(taken)
        taken.sendall(said)

    with server(converse) as port:
        connection = EtcdConnection("127.0.0.1", port, PATIENCE_S, None, Names())
        with pytest.raises(HungUp):
            connection.ask("/v3/a", {}, {}, PATIENCE_S)
        connection.close()


def test_a_server_that_hangs_up_after_its_answer_is_not_asked_again() -> None:
    def converse(taken: socket.socket) -> None:
        request_of(taken)
        taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close\r\n\r\na")
        assert taken.recv(1) == b""  # it stays open until the client lets go

    with server(converse) as port:
        connection = EtcdConnection("127.0.0.1", port, PATIENCE_S, None, Names())
        answer = connection.ask("/v3/a", {}, {}, PATIENCE_S)
        may_be_used_again = connection.may_be_used_again
        connection.close()

    assert answer == (200, b"a")
    assert not may_be_used_again


def test_another_protocol_is_shown() -> None:
    def converse(taken: socket.socket) -> None:
        request_of(taken)
        taken.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")

    with server(converse) as port:
        connection = EtcdConnection("127.0.0.1", port, PATIENCE_S, None, Names())
        with pytest.raises(NoHttp) as told:
            connection.ask("/v3/a", {}, {}, PATIENCE_S)
        connection.close()

    assert told.value.began == b"SSH-2.0-OpenSSH_9.9\r\n"


def test_a_silent_server_is_waited_for_no_longer_than_allowed() -> None:
    is_over = threading.Event()

    def converse(taken: socket.socket) -> None:
        request_of(taken)
        assert is_over.wait(PATIENCE_S)

    with server(converse) as port:
        connection = EtcdConnection("127.0.0.1", port, PATIENCE_S, None, Names())
        with pytest.raises(TimeoutError):
            connection.ask("/v3/a", {}, {}, 0.01)
        connection.close()
        is_over.set()


def test_who_speaks_no_tls_leaves_nothing_open() -> None:
    def converse(taken: socket.socket) -> None:
        taken.recv(1000)
        taken.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    context = ssl.create_default_context()
    with server(converse) as port, pytest.raises(OSError):  # noqa: PT011 -- which one depends on who is quicker
        EtcdConnection("127.0.0.1", port, PATIENCE_S, context, Names())
