"""How a run lies in the store: where its records are, and as which bytes.

What everybody reads and watches (`shared/`) lies apart from what the leader alone reads (`nodes/`),
since a store reads and watches by prefix: otherwise each node that joins would read all others.

Records are JSON, with the protocol's version in each. What cannot be read is never guessed at. The
error names the key and who writes it, because that is where a person has to look: a node with
another version of rankwise, or somebody else's use of the same keys.
"""

from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from rankwise.base.errors import RemoteProtocolError
from rankwise.core.rendezvous.records import (
    PROTOCOL_VERSION,
    BooksNote,
    Charter,
    Inquiry,
    NodeRecord,
    Round,
)


class RunKeys(NamedTuple):
    """The keys of one run. No key is the beginning of another, but for node ids that are."""

    run_id: str

    @property
    def shared(self) -> str:
        """The prefix of what every node reads and watches."""
        return f"rankwise/{self.run_id}/shared/"

    @property
    def charter(self) -> str:
        """What all nodes must want alike."""
        return f"{self.shared}charter"

    @property
    def leader(self) -> str:
        """The node that leads, as `<id> on <host>`."""
        return f"{self.shared}leader"

    @property
    def round(self) -> str:
        """The present round."""
        return f"{self.shared}round"

    @property
    def inquiry(self) -> str:
        """What the leader asks all nodes about their ranks' calls."""
        return f"{self.shared}inquiry"

    @property
    def nodes(self) -> str:
        """The prefix of all node records."""
        return f"rankwise/{self.run_id}/nodes/"

    def node(self, node_id: str) -> str:
        """The record of one node."""
        return f"{self.nodes}{node_id}"

    @property
    def done_notes(self) -> str:
        """The prefix of what remains of nodes that were done."""
        return f"{self.nodes}done/"

    def done_note(self, node_id: str) -> str:
        """The record of one node as it was when it was done; it outlives the node's lease."""
        return f"{self.done_notes}{node_id}"

    @property
    def books_notes(self) -> str:
        """The prefix of what nodes tell of their ranks' calls."""
        return f"{self.nodes}books/"

    def books_note(self, node_id: str) -> str:
        """What one node tells of its ranks' calls."""
        return f"{self.books_notes}{node_id}"

    def node_id(self, key: str) -> str:
        """The node whose record, or note, lies at `key`."""
        return key.rpartition("/")[2]


Record = Charter | NodeRecord | Round | BooksNote | Inquiry
RecordT = TypeVar("RecordT", Charter, NodeRecord, Round, BooksNote, Inquiry)

SHOWN_MAX = 60
_ENCODER = msgspec.json.Encoder()


class _Versioned(msgspec.Struct):
    """The part of a record that all versions have."""

    version: int = PROTOCOL_VERSION


_VERSION = msgspec.json.Decoder(_Versioned)
# Made here, since two threads that meet a type for the first time at once crash msgspec (0.22).
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (Charter, NodeRecord, Round, BooksNote, Inquiry)
}


def encode(record: Record) -> bytes:
    """Write a record as it lies in the store."""
    return _ENCODER.encode(record)


def decode_charter(value: bytes, key: str) -> Charter:
    """Read the charter.

    Raises:
        RemoteProtocolError: it is of another version, or no charter.
    """
    return _decode(value, Charter, key, "the first node of the run")


def decode_node(value: bytes, key: str, node_id: str) -> NodeRecord:
    """Read a node's record.

    Raises:
        RemoteProtocolError: it is of another version, or no node record.
    """
    return _decode(value, NodeRecord, key, f"node {node_id}")


def decode_books_note(value: bytes, key: str, node_id: str) -> BooksNote:
    """Read what a node tells of its ranks' calls.

    Raises:
        RemoteProtocolError: it is of another version, or no such note.
    """
    return _decode(value, BooksNote, key, f"node {node_id}")


def decode_inquiry(value: bytes, key: str) -> Inquiry:
    """Read what the leader asks.

    Raises:
        RemoteProtocolError: it is of another version, or no inquiry.
    """
    return _decode(value, Inquiry, key, "the leader of the run")


# A round reaches every node; where many live in one process, as in a simulation, it is read once.
@lru_cache(maxsize=8)
def decode_round(value: bytes, key: str) -> Round:
    """Read the round.

    Raises:
        RemoteProtocolError: it is of another version, or no round.
    """
    return _decode(value, Round, key, "the leader of the run")


@lru_cache(maxsize=8)
def places_in(value: bytes, key: str) -> dict[str, int]:
    """Read the round for each member's place among all of them."""
    return {node: place for place, node in enumerate(decode_round(value, key).members)}


def _decode(value: bytes, kind: type[RecordT], key: str, writer: str) -> RecordT:
    try:
        version = _VERSION.decode(value).version
        if version == PROTOCOL_VERSION:
            record: RecordT = _DECODERS[kind].decode(value)
            return record
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = value[:SHOWN_MAX].decode("utf-8", "backslashreplace")
        dots = "…" if len(value) > SHOWN_MAX else ""
        raise RemoteProtocolError(
            f"the key {key}, which {writer} writes, holds {shown!r}{dots}: {error}",
            hint="does something else use this store under the same run id?",
        ) from error
    raise RemoteProtocolError(
        f"the key {key}, which {writer} writes, has protocol version {version}, and this rankwise "
        f"speaks version {PROTOCOL_VERSION}",
        hint="run the same version of rankwise on every node",
    )
