"""Names of machines, where name servers take their time."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rankwise.drivers.real.stores.names import Names, full_name_of

HERE = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
PATIENCE_S = 60.0


class Servers:
    """Name servers that answer when they are let."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        self._genuine = socket.getaddrinfo

    def resolve(self, host: str, *words: object, **more: object) -> object:
        if host != "slow.test" or more["flags"] == socket.AI_NUMERICHOST:
            return self._genuine(host, *words, **more)  # type: ignore[arg-type]
        self.asked.append(host)
        self.is_asked.set()
        assert self.may_answer.wait(PATIENCE_S)
        return HERE


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    servers = Servers()
    monkeypatch.setattr(socket, "getaddrinfo", servers.resolve)
    yield servers
    servers.may_answer.set()


def test_an_address_is_no_question() -> None:
    before = set(threading.enumerate())

    (found,) = Names().addresses("127.0.0.1", 80, 0)

    assert found[4] == ("127.0.0.1", 80)
    assert set(threading.enumerate()) <= before


def test_a_name_is_connected_to_when_name_servers_have_told_it(servers: Servers) -> None:
    servers.may_answer.set()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        with Names().connect("slow.test", port, PATIENCE_S) as connection:
            assert connection.getpeername() == ("127.0.0.1", port)


def test_name_servers_are_not_waited_for_longer_than_asked(servers: Servers) -> None:
    names = Names()

    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"no name server answered for slow\.test"):
            names.addresses("slow.test", 80, 0.01)

    assert servers.asked == ["slow.test"], "one question at a time"


def test_who_waits_is_woken_when_nobody_needs_the_answer(servers: Servers) -> None:
    names = Names()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(names.addresses, "slow.test", 80)
        assert servers.is_asked.wait(PATIENCE_S)

        names.close()

        with pytest.raises(TimeoutError):
            waiting.result(PATIENCE_S)


def test_a_name_that_is_none_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="cannot be the name of a machine"):
        Names().addresses("a" * 70 + ".test", 80)


def test_a_refused_connection_is_told_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    with pytest.raises(ConnectionRefusedError):
        Names().connect("127.0.0.1", port, PATIENCE_S)


def test_signals_are_heard_while_the_full_name_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_answer = threading.Event()

    def look_up(host: str) -> str:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert may_answer.wait(PATIENCE_S)
        return f"{host}.test"

    def receive(*_: object) -> None:
        assert not may_answer.is_set()
        may_answer.set()

    monkeypatch.setattr(socket, "getfqdn", look_up)
    before = signal.signal(signal.SIGUSR1, receive)
    try:
        assert full_name_of("here") == "here.test"
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("host", ["a..b", 64 * "x"])
def test_a_name_that_no_server_can_be_asked_for_is_its_own_full_name(host: str) -> None:
    assert full_name_of(host) == host
