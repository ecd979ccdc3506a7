"""One connection to a member of etcd: a request in one piece, and its answer to the end.

One thread at a time asks; any may hang up, which wakes the one that waits.
"""

import socket
import ssl
from collections.abc import Mapping
from time import monotonic

import msgspec

from rankwise.drivers.real.stores.connections import (
    HungUp,
    endpoint_text,
    has_hung_up,
    notice_dead_hosts,
)
from rankwise.drivers.real.stores.etcd_stream import Response
from rankwise.drivers.real.stores.names import LEAST_S, Names

RECEIVED_AT_ONCE = 64 * 1024


class EtcdConnection:
    """A connection, with TLS if there is a context for it.

    Args:
        host, port: of the member.
        timeout_s: how long connecting may take.
        tls: whom to believe; None speaks in the clear.
        names: tells where the host is.

    Raises:
        OSError: it could not be made.
    """

    def __init__(
        self, host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None, names: Names
    ) -> None:
        self._endpoint = endpoint_text(host, port)
        self._is_spent = False
        sock = names.connect(host, port, timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            notice_dead_hosts(sock)
            self.sock = sock if tls is None else tls.wrap_socket(sock, server_hostname=host)
        except BaseException:
            sock.close()
            raise

    @property
    def may_be_used_again(self) -> bool:
        """Whether the member still listens, as far as can be told."""
        return not self._is_spent and not has_hung_up(self.sock)

    def send(self, path: str, body: object, headers: Mapping[str, str], timeout_s: float) -> None:
        """Send a request.

        Raises:
            OSError: it could not be sent.
        """
        payload = msgspec.json.encode(body)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._endpoint}\r\nContent-Length: {len(payload)}\r\n"
        )
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.sock.settimeout(max(LEAST_S, timeout_s))
        # In one piece, so that etcd is woken once.
        self.sock.sendall(f"{head}{fields}\r\n".encode() + payload)

    def ask(
        self, path: str, body: object, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        """Send a request, and wait for the whole answer: its status, and its body.

        Raises:
            NoHttp: something else answers.
            OSError: no answer came, or not all of it.
        """
        ends_at = monotonic() + timeout_s
        self.send(path, body, headers, timeout_s)
        response = Response()
        answer = b""
        while not response.is_over:
            data = self.sock.recv(RECEIVED_AT_ONCE)
            if data:
                answer += response.feed(data)
                self.sock.settimeout(max(LEAST_S, ends_at - monotonic()))
            elif not response.end():
                raise HungUp("the member has hung up")
        assert response.status is not None, "an answer that is over has a head"
        self._is_spent = response.ends_with_connection
        return response.status, answer

    def close(self) -> None:
        """Let go of it."""
        self.sock.close()
