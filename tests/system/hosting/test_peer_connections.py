"""Connections to the named processes end, and no others."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rankwise.drivers.real.peer_connections import end_connections_to

pytestmark = pytest.mark.system

CLIENT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.sendall(b"here")
sys.stdin.read()
"""


@pytest.fixture(params=["127.0.0.1", "::1", "::"])
def server(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """A socket that listens: for IPv4, for IPv6, or for both, as torch's store does."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        with socket.create_server(
            (request.param, 0), family=family, dualstack_ipv6=request.param == "::"
        ) as server:
            yield server
    except OSError:
        pytest.skip("this machine has no IPv6")


def connect(server: socket.socket) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """A process that is connected, and our end."""
    host, port = server.getsockname()[:2]
    address = "127.0.0.1" if host == "::" else host
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, address, str(port)], stdin=subprocess.PIPE
    )
    connection, _ = server.accept()
    assert connection.recv(4) == b"here"
    return client, connection


def end(client: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    client.communicate()


def test_a_connection_to_a_peer_ends_and_one_to_another_process_goes_on(
    server: socket.socket,
) -> None:
    peer, to_peer = connect(server)
    other, to_other = connect(server)
    to_other.settimeout(0)

    assert end_connections_to([peer.pid, os.getpid()]) == 1

    assert to_peer.recv(1) == b""
    with pytest.raises(BlockingIOError):
        to_other.recv(1)
    end(peer, to_peer)
    end(other, to_other)


def test_a_process_that_has_ended_is_no_peer() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    assert end_connections_to([gone.pid]) == 0
