"""Sockets of clients and servers: where they are, noticing dead hosts, and waking who waits."""

import socket
from contextlib import suppress
from select import POLLIN, poll

from rankwise.base.errors import ConfigError


class HungUp(ConnectionResetError):
    """The other end has closed a connection on which an answer was waited for."""


def notice_dead_hosts(sock: socket.socket) -> None:
    """Let the kernel end a connection to a machine that has vanished without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def has_hung_up(sock: socket.socket) -> bool:
    """Whether the other end of an idle connection has something to say: only a farewell can be."""
    waiter = poll()
    waiter.register(sock, POLLIN)
    return bool(waiter.poll(0))


def is_end_of_tls(error: BaseException) -> bool:
    """Whether the other end has closed a connection on which TLS was spoken, or should have been.

    Which of the two errors that is, and its words, depend on the versions of Python and OpenSSL.
    They are known by their names here, since most stores have no need to load `ssl`.
    """
    return type(error).__name__ in ("SSLEOFError", "SSLZeroReturnError")


def hang_up(sock: socket.socket) -> None:
    """Wake the thread that waits on a connection, beneath TLS: its state belongs to that thread."""
    with suppress(OSError):  # it has been closed already
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def split_endpoint(endpoint: str) -> tuple[str, int | None]:
    """Read `HOST`, `HOST:PORT` or `[IPV6]:PORT`, also after `http://` or `https://`.

    Raises:
        ConfigError: there is no host, or the port is no number from 0 to 65535.
    """
    text = endpoint.strip().removeprefix("http://").removeprefix("https://").rstrip("/")
    is_bare_ipv6 = text.count(":") > 1 and not text.startswith("[")
    host, colon, port = text.rpartition(":")
    if is_bare_ipv6 or not colon or text.endswith("]"):
        host, port = text, "0"
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--rdzv-endpoint is {endpoint!r}, expected HOST or HOST:PORT, the port up to 65535",
            hint="an IPv6 address needs brackets, as in [fd00::1]:29400",
        )
    return host.strip("[]"), None if host == text else int(port)


def endpoint_text(host: str, port: int) -> str:
    """An address as people write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
