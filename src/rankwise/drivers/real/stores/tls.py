"""TLS between processes that share the run's token: no other is let in, or can read.

How both sides prove to each other that they know the token depends on the Python, not on the user:

- *a pre-shared key* (TLS-PSK), from Python 3.13 on;
- *a certificate* whose key follows from the token, below that, with the extra `rankwise[tls]`; each
  side trusts that one certificate and no other.

Where neither can be had (`encryption`), the store's own proofs and seals
(`embedded_protocol`), which go on within TLS as well, are all there is. Both ends have to use the
same means; there is no falling back, which an attacker could ask for. ADR 0022 has the reasons.

`TlsStream` does no I/O: bytes of the network go in, bytes for the network come out. So it serves
blocking clients and the server's one thread alike, and no wait has to know of it.
"""

import hmac
import os
import ssl

from rankwise.base.errors import RemoteProtocolError
from rankwise.drivers.real.stores.encryption import has_psk

_IDENTITY = "rankwise"
_PIECE_BYTES = 256 * 1024


class TlsStream:
    """TLS of one connection; an `embedded_protocol.Stream`."""

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self.is_established = False
        """Whether anything can be said yet."""
        self._go_on()

    def feed(self, raw: bytes) -> bytes:
        """Take in bytes of the network; what the other side has said.

        Raises:
            RemoteProtocolError: it breaks TLS, or does not know the token; `unsent` tells it so.
        """
        self._incoming.write(raw)
        try:
            if not self.is_established:
                self._go_on()
            return self._said() if self.is_established else b""
        except ssl.SSLError as error:
            reason = (error.reason or "no TLS").lower().replace("_", " ")
            raise RemoteProtocolError(f"TLS has failed: {reason}") from error

    def wrap(self, data: bytes) -> bytes:
        """What is to be sent, encrypted."""
        assert self.is_established, "nothing is said before the other side is known"
        self._tls.write(data)
        return self.unsent()

    def unsent(self) -> bytes:
        """What TLS itself has to say."""
        return self._outgoing.read()

    def _go_on(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        self.is_established = True

    def _said(self) -> bytes:
        said = bytearray()
        try:
            while piece := self._tls.read(_PIECE_BYTES):
                said += piece
        except ssl.SSLWantReadError:
            pass
        return bytes(said)


def client_context(token: bytes) -> ssl.SSLContext:
    """For who connects."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, token)
    if has_psk():
        key = _psk(token)
        context.set_psk_client_callback(lambda _hint: (_IDENTITY, key))  # type: ignore[attr-defined]
    return context


def server_context(token: bytes) -> ssl.SSLContext:
    """For who is connected to."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, token)
    context.num_tickets = 0  # sessions are not resumed; an idle client takes any byte for the end
    if has_psk():
        key = _psk(token)
        context.set_psk_server_callback(  # type: ignore[attr-defined]
            lambda identity: key if identity == _IDENTITY else b""
        )
    return context


def _context(protocol: int, token: bytes) -> ssl.SSLContext:
    """What both sides have in common.

    A certificate is asked for, of a server by its client at least. Where there are pre-shared keys
    none is sent, and one that is sent is refused, since no authority is trusted: else a process in
    between could take part in TLS with a certificate of its own.
    """
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    if not has_psk():
        _show_certificate(context, token)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _show_certificate(context: ssl.SSLContext, token: bytes) -> None:
    from rankwise.drivers.real.stores.token_certificate import certificate_of  # noqa: PLC0415  # takes long

    own = certificate_of(token)
    context.load_verify_locations(cadata=own.certificate.decode())
    # The only way in is a file: this one has no name, and ends with its descriptor.
    fd = os.memfd_create("rankwise-tls", os.MFD_CLOEXEC)
    try:
        os.write(fd, own.key + own.certificate)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _psk(token: bytes) -> bytes:
    """The key, which is the token's for this purpose only."""
    return hmac.digest(token, b"rankwise tls psk", "sha256")
