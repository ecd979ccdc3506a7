"""What is said on etcd's JSON gateway, as far as a store needs it.

The gateway writes 64-bit integers as strings and bytes as base64, leaves out what is zero, and
accepts plain numbers; so what is read here is decoded leniently, and what is written is short.
See the files `rpc.proto` and `kv.proto` of etcd's API, version 3.
"""

from base64 import b64encode
from typing import Any, TypeVar

import msgspec

from rankwise.base.keys import ABSENT, Change, Entry, LeaseId, Put, Revision, Transaction
from rankwise.base.units import SECOND, Duration

T = TypeVar("T")


class Header(msgspec.Struct):
    """Every answer has one."""

    revision: int = 0


class KeyValue(msgspec.Struct):
    """One key."""

    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0

    @property
    def name(self) -> str:
        """The key as text; other programs' keys need not be any."""
        return self.key.decode(errors="surrogateescape")

    @property
    def lease_id(self) -> LeaseId | None:
        """The lease it is bound to."""
        return LeaseId(self.lease) if self.lease else None

    def entry(self) -> Entry:
        """It, in our words."""
        return Entry(self.name, self.value, Revision(self.mod_revision), self.lease_id)


class RangeReply(msgspec.Struct):
    """The answer to `/kv/range`."""

    header: Header
    kvs: list[KeyValue] = []


class TransactionReply(msgspec.Struct):
    """The answer to `/kv/txn`."""

    header: Header
    succeeded: bool = False


class GrantReply(msgspec.Struct):
    """The answer to `/lease/grant`."""

    lease: int = msgspec.field(name="ID")


class KeepAlive(msgspec.Struct):
    """A renewed lease; one that has ended has no time to live."""

    ttl: int = msgspec.field(name="TTL", default=0)


class StreamFault(msgspec.Struct):
    """An error in the middle of a stream of answers."""

    message: str = ""


class KeepAliveReply(msgspec.Struct):
    """The answer to `/lease/keepalive`, a stream of one."""

    result: KeepAlive | None = None
    error: StreamFault | None = None


class AuthenticateReply(msgspec.Struct):
    """The answer to `/auth/authenticate`."""

    token: str


class WatchEvent(msgspec.Struct):
    """One change of one key."""

    kv: KeyValue
    type: str = "PUT"

    def change(self) -> Change:
        """It, in our words."""
        revision = Revision(self.kv.mod_revision)
        if self.type == "DELETE":
            return Change(self.kv.name, None, revision)
        return Change(self.kv.name, self.kv.value, revision, self.kv.lease_id)


class WatchReply(msgspec.Struct):
    """One message of a watch."""

    header: Header
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: list[WatchEvent] = []


class WatchLine(msgspec.Struct):
    """One line of the stream that answers `/watch`."""

    result: WatchReply | None = None
    error: StreamFault | None = None


class Fault(msgspec.Struct):
    """What comes with a status other than 200; where a stream was asked for, `error` has parts."""

    message: str = ""
    error: str | StreamFault = ""

    @property
    def text(self) -> str:
        """What etcd says."""
        return self.message or (self.error if isinstance(self.error, str) else self.error.message)


# Made here and not where they are used: two threads that meet a type for the first time at the same
# moment crash msgspec (0.22), and with it the process.
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind, strict=False)
    for kind in (
        RangeReply, TransactionReply, GrantReply, KeepAliveReply, AuthenticateReply, WatchLine,
        Fault, object,
    )
}  # fmt: skip


def decoded(body: bytes, kind: type[T]) -> T:
    """Read an answer.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    answer: T = _DECODERS[kind].decode(body)
    return answer


def range_of(prefix: str) -> dict[str, str]:
    """The keys that begin with a prefix, as etcd wants it: from it, to before the next one."""
    if not prefix:
        return {"key": _text(b"\0"), "range_end": _text(b"\0")}
    first = prefix.encode()
    # UTF-8 has no byte 255, so the last one can always be raised.
    return {"key": _text(first), "range_end": _text(first[:-1] + bytes((first[-1] + 1,)))}


def transaction_body(transaction: Transaction) -> dict[str, Any]:
    """A transaction for `/kv/txn`."""
    return {
        "compare": [
            {
                "key": _text(condition.key.encode()),
                "target": "MOD",
                "mod_revision": int(condition.revision or ABSENT),
            }
            for condition in transaction.conditions
        ],
        "success": [
            *({"request_put": _put_body(put)} for put in transaction.puts),
            *(
                {"request_delete_range": {"key": _text(key.encode())}}
                for key in transaction.deletes
            ),
        ],
    }


def _put_body(put: Put) -> dict[str, Any]:
    body: dict[str, Any] = {"key": _text(put.key.encode()), "value": _text(put.value)}
    if put.lease is not None:
        body["lease"] = put.lease
    return body


def watch_body(prefix: str, after: Revision | None) -> dict[str, Any]:
    """A watch for `/watch` whose first message may repeat what `after` itself has changed.

    Without `after` it begins with whatever comes next, and its confirmation tells when that is.

    A deletion that happened in just the revision up to which etcd is compacted is not told to a
    watch that begins with it, so ours begins one earlier, and is refused if that is compacted.
    """
    create: dict[str, Any] = {**range_of(prefix), "progress_notify": True}
    if after is not None:
        create["start_revision"] = max(1, after)
    return {"create_request": create}


def whole_seconds(ttl: Duration) -> int:
    """A lease's time to live as etcd counts it, rounded up."""
    return max(1, -(-ttl // SECOND))


def _text(data: bytes) -> str:
    return b64encode(data).decode("ascii")
