"""What a store keeps and tells: revisioned keys, transactions, changes, leases.

The words that machines, ports and stores share. The model is that of etcd v3: one counter of
revisions for the whole store, raised by each transaction that changes anything; an entry knows the
revision that wrote it last; a key that does not exist has revision 0.
"""

from typing import NewType

import msgspec

from rankwise.base.errors import LocalProtocolError

Revision = NewType("Revision", int)
"""The store's counter of changes; grows, and never comes back."""

ABSENT = Revision(0)
"""The revision of a key that does not exist."""

LeaseId = NewType("LeaseId", int)
"""A promise of life: entries bound to it vanish when it is not renewed in time."""


class Entry(msgspec.Struct, frozen=True):
    """A key with its value, as it is at one revision of the store."""

    key: str
    value: bytes
    revision: Revision
    """The revision that wrote it."""
    lease: LeaseId | None = None


class Snapshot(msgspec.Struct, frozen=True):
    """All entries under a prefix at one revision of the store, in the order of their keys."""

    entries: tuple[Entry, ...]
    revision: Revision


class Unchanged(msgspec.Struct, frozen=True):
    """A condition: the key was last written at `revision`; `ABSENT` means it must not exist."""

    key: str
    revision: Revision


class Put(msgspec.Struct, frozen=True):
    """Write a key, and bind it to a lease, or free it from one."""

    key: str
    value: bytes
    lease: LeaseId | None = None


class Transaction(msgspec.Struct, frozen=True, kw_only=True):
    """All puts and deletes at once if every condition holds, else none.

    Raises:
        LocalProtocolError: a key is empty, or is written twice.
    """

    conditions: tuple[Unchanged, ...] = ()
    puts: tuple[Put, ...] = ()
    deletes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        written = [put.key for put in self.puts]
        written += self.deletes
        if len(set(written)) < len(written):
            twice = next(key for key in written if written.count(key) > 1)
            raise LocalProtocolError(f"a transaction writes the key {twice!r} twice, expected once")
        if "" in written or any(not condition.key for condition in self.conditions):
            raise LocalProtocolError(
                "a transaction names an empty key, expected one character or more"
            )


class Committed(msgspec.Struct, frozen=True, tag=True):
    """A transaction has taken place, as `revision`."""

    revision: Revision


class Conflict(msgspec.Struct, frozen=True, tag=True):
    """A condition did not hold; nothing was written. A daily business, not an error."""

    revision: Revision


class Change(msgspec.Struct, frozen=True):
    """A key was written, or deleted (`value` is None), at `revision`."""

    key: str
    value: bytes | None
    revision: Revision
    lease: LeaseId | None = None
