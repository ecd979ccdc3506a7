"""How many bytes pass between the nodes and the store.

An estimate for etcd's JSON gateway, the largest of the real protocols: values travel in base64, and
each request and each answer carries the headers of HTTP/1.1 on a connection that is kept.
"""

from dataclasses import dataclass, field

from rankwise.base.keys import Change, Snapshot, Transaction
from rankwise.core.rendezvous.vocabulary import (
    Commit,
    GrantLease,
    KeysChanged,
    KeysRead,
    ReadKeys,
    RenewLease,
    RevokeLease,
)

REQUEST_HEADERS = 170
ANSWER_HEADERS = 130
WATCH_CHUNK = 130
"""The header that the store puts around each batch of changes, and the chunk's own length."""
PER_KEY = 110
"""Names of fields, revisions and lease of one key, beside its name and its value."""


@dataclass
class Traffic:
    """Bytes to and from the store so far, in all and by kind of message."""

    bytes_total: int = 0
    messages: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str, size: int) -> None:
        """Note a message."""
        self.bytes_total += size
        self.messages += 1
        self.by_kind[kind] = self.by_kind.get(kind, 0) + size


def size_of(message: object) -> int:
    """How many bytes a message takes."""
    match message:
        case ReadKeys():
            keys = _base64(len(message.prefix)) * 2
            watch = REQUEST_HEADERS + keys + 40 + WATCH_CHUNK + ANSWER_HEADERS
            return REQUEST_HEADERS + keys + (0 if message.watch is None else watch)
        case Commit():
            return REQUEST_HEADERS + _transaction(message.transaction)
        case GrantLease() | RenewLease() | RevokeLease():
            return REQUEST_HEADERS + 30
        case KeysRead():
            return ANSWER_HEADERS + _snapshot(message.snapshot)
        case KeysChanged():
            return WATCH_CHUNK + sum(_change(change) for change in message.changes)
        case _:
            return ANSWER_HEADERS + 90


def _transaction(transaction: Transaction) -> int:
    conditions = sum(80 + _base64(len(each.key)) for each in transaction.conditions)
    puts = sum(80 + _base64(len(put.key)) + _base64(len(put.value)) for put in transaction.puts)
    return 40 + conditions + puts + sum(60 + _base64(len(key)) for key in transaction.deletes)


def _snapshot(snapshot: Snapshot) -> int:
    return 100 + sum(
        PER_KEY + _base64(len(entry.key)) + _base64(len(entry.value)) for entry in snapshot.entries
    )


def _change(change: Change) -> int:
    value = change.value or b""
    return PER_KEY + _base64(len(change.key)) + _base64(len(value))


def _base64(size: int) -> int:
    return (size + 2) // 3 * 4
