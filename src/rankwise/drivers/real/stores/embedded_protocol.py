"""What is said between an embedded store and its clients: frames, proofs, messages.

A frame is `<u32 length><seal><body>`; a body is MessagePack. A client that connects says hello with
a nonce, the server answers with one of its own and proves that it knows the run's token, the client
proves the same, and from then on each frame bears a seal: an HMAC over the frame's number and body,
under a key that comes from the token, both nonces and the direction. So without the token, a
process can say nothing that is accepted, change no message, and repeat none.

None can be read either where all of this is said within TLS (`tls`): the client begins with a
handshake then, and the server sees from the first byte which of the two is meant. One that encrypts
refuses one that does not, and the other way round, in the clear: there is nothing to fall back to.
Without TLS, a listener on the network can read the keys and values.

Each request is answered once, in order; after `WatchAsked` the server tells changes for as long as
the connection lasts. A server that ends tells so to the watches that are still there.
"""

import hmac
import secrets
from struct import Struct
from typing import Protocol

import msgspec

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.keys import Change, Committed, Conflict, LeaseId, Revision, Snapshot, Transaction
from rankwise.base.units import Duration

VERSION = 2
NONCE_BYTES = 16
SEAL_BYTES = 16
HELLO_BYTES_MAX = 256
"""A side keeps no more than this of a peer that has proved nothing yet."""
REQUEST_BYTES_MAX = 64 * 1024 * 1024
ANSWER_BYTES_MAX = 1024 * 1024 * 1024

TLS_HANDSHAKE = 0x16
"""The first byte of what begins with TLS, and of no frame of an unproved client."""
TLS_RECORDS = range(0x14, 0x18)
"""The first bytes that TLS may answer with."""

_LENGTH = Struct("!I")
_NUMBER = Struct("!Q")


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The client's first word."""

    version: int
    nonce: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The server's first word: it knows the token."""

    version: int
    nonce: bytes
    proof: bytes
    life: bytes
    """Names this life of the server, which forgets everything when it ends."""


class Proof(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The client knows the token, too."""

    proof: bytes


class Refusal(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The server will not talk to this client."""

    reason: str


Greeting = Hello | Welcome | Proof | Refusal


class ReadAsked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read a prefix; `Read`."""

    prefix: str


class CommitAsked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Try a transaction; `Committed`, `Conflict` or `Lost`."""

    transaction: Transaction


class GrantAsked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Begin a lease; `Granted`."""

    ttl: Duration


class RenewAsked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Prolong a lease; `Done` or `Lost`."""

    lease: LeaseId


class RevokeAsked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a lease; `Done`."""

    lease: LeaseId


class WatchAsked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Tell changes from now on; `ChangesReported` again and again, or `Forgotten`."""

    prefix: str
    after: Revision


Request = ReadAsked | CommitAsked | GrantAsked | RenewAsked | RevokeAsked | WatchAsked


class Read(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `ReadAsked`."""

    snapshot: Snapshot


class Granted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `GrantAsked`."""

    lease: LeaseId


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """It has been done."""


class Lost(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The lease has ended."""

    reason: str


class ChangesReported(msgspec.Struct, frozen=True, tag="Told", array_like=True):
    """Changes under the watch's prefix, and up to which revision they are all."""

    changes: tuple[Change, ...]
    up_to: Revision


class Forgotten(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The watch lags too far behind."""

    reason: str
    revision: Revision


class Ended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The server ends, in good order, and with it all that it knew."""


class Misunderstood(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The request breaks a rule."""

    reason: str


# Committed and Conflict are tagged maps, so what is array-like here is wrapped around them.
class Tried(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `CommitAsked`."""

    result: Committed | Conflict


Answer = Read | Tried | Granted | Done | Lost | ChangesReported | Forgotten | Ended | Misunderstood


# Made here, since two threads that meet a type for the first time at once crash msgspec (0.22).
decode_greeting = msgspec.msgpack.Decoder[Greeting](Greeting).decode
decode_request = msgspec.msgpack.Decoder[Request](Request).decode
decode_answer = msgspec.msgpack.Decoder[Answer](Answer).decode


def encoded(message: Greeting | Request | Answer) -> bytes:
    """A message as a frame's body."""
    return msgspec.msgpack.encode(message)


class FrameStream(Protocol):
    """What stands between a connection's frames and its socket."""

    def feed(self, raw: bytes) -> bytes:
        """Take in bytes of the network; what the other side has said."""
        ...

    def wrap(self, data: bytes) -> bytes:
        """What is to be sent, as bytes for the network."""
        ...

    def unsent(self) -> bytes:
        """What the stream itself has to say, once."""
        ...


class PlainStream:
    """Nothing stands between them."""

    def feed(self, raw: bytes) -> bytes:
        """Take in bytes."""
        return raw

    def wrap(self, data: bytes) -> bytes:
        """Give out bytes."""
        return data

    def unsent(self) -> bytes:
        """Nothing."""
        return b""


class Frames:
    """One direction's bytes, cut into bodies; plain until `seal_with` is called."""

    def __init__(self, bytes_max: int = HELLO_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._key = b""
        self._number = 0
        self._raw = bytearray()

    def seal_with(self, key: bytes, bytes_max: int) -> None:
        """Expect a seal under this key on every frame from now on, and allow longer ones."""
        self._key = key
        self._bytes_max = bytes_max

    def feed(self, data: bytes) -> None:
        """Take in bytes."""
        self._raw += data

    def next(self) -> bytes | None:
        """The next body; None while it is not complete.

        Raises:
            RemoteProtocolError: it is too long, or not sealed under the key.
        """
        if len(self._raw) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._raw)
        if length > self._bytes_max:
            raise RemoteProtocolError(
                f"a frame of {length} bytes has come, expected at most {self._bytes_max}"
            )
        start = _LENGTH.size + (SEAL_BYTES if self._key else 0)
        if len(self._raw) < start + length:
            return None
        body = bytes(self._raw[start : start + length])
        seal = bytes(self._raw[_LENGTH.size : start])
        del self._raw[: start + length]
        if self._key and not hmac.compare_digest(seal, _seal(self._key, self._number, body)):
            raise RemoteProtocolError("a frame has come whose seal is wrong")
        self._number += bool(self._key)
        return body


class Sealer:
    """The other direction: bodies become frames."""

    def __init__(self) -> None:
        self._key = b""
        self._number = 0

    def seal_with(self, key: bytes) -> None:
        """Seal every frame from now on."""
        self._key = key

    def frame(self, body: bytes) -> bytes:
        """The body as a frame."""
        length = _LENGTH.pack(len(body))
        if not self._key:
            return length + body
        seal = _seal(self._key, self._number, body)
        self._number += 1
        return length + seal + body


class Secret:
    """What both sides make of the token and their nonces."""

    def __init__(self, token: bytes, client_nonce: bytes, server_nonce: bytes) -> None:
        self._token = token
        self._nonces = client_nonce + server_nonce

    def derive(self, purpose: bytes) -> bytes:
        """A proof or a key."""
        return hmac.digest(self._token, b"rankwise " + purpose + self._nonces, "sha256")

    @property
    def client_proof(self) -> bytes:
        """What only a client that knows the token can say."""
        return self.derive(b"client")

    @property
    def server_proof(self) -> bytes:
        """What only a server that knows the token can say."""
        return self.derive(b"server")

    @property
    def requests_key(self) -> bytes:
        """Seals what the client says."""
        return self.derive(b"requests")

    @property
    def answers_key(self) -> bytes:
        """Seals what the server says."""
        return self.derive(b"answers")


def new_nonce() -> bytes:
    """Bytes that were never used before."""
    return secrets.token_bytes(NONCE_BYTES)


def _seal(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + body, "sha256")[:SEAL_BYTES]
