"""One message between a parent and a worker, in bytes: a frame.

    u32 magic, u16 version, u8 kind, u8 lane, u64 sequence, u64 bytes of the body, then the body

in native byte order, since both ends are on one machine. A frame says how long it is and who wrote
it, so one that was cut, comes from another release, or is none at all is found out before anything
in it is believed. There is no limit on the body: a frame that does not fit where its carrier would
like to put it is the carrier's business.

The *lane* keeps apart what must not wait for, or overwrite, one another: tasks, and control
(memory, copies, shutdown). Each lane counts its requests by itself.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum

import msgspec

from rankwise.base.errors import MailboxCorrupt

MAGIC = 0x4D42_5752  # "RWBM" in memory
VERSION = 1
_HEADER = struct.Struct("=IHBBQQ")
HEADER_BYTES = _HEADER.size
BODY_BYTES_MAX = 1 << 40
"""More than any machine has: a longer one is a broken header."""


class FrameKind(IntEnum):
    """What a frame is for."""

    HELLO = 1
    """The worker is up; its body says what it is."""
    REQUEST = 2
    """The parent wants something done."""
    REPLY = 3
    """It is done; the body is the result."""
    FAILURE = 4
    """It could not be done; the body says why."""
    SHUTDOWN = 5
    """The parent wants the worker to end, after what it has been asked before."""


class Lane(IntEnum):
    """Requests of one lane are answered in order; lanes do not wait for one another."""

    TASK = 0
    CONTROL = 1


class Frame(msgspec.Struct, frozen=True):
    """A message.

    Attributes:
        sequence: counts the requests of a lane from 1; an answer has its request's.
    """

    kind: FrameKind
    lane: Lane
    sequence: int
    body: bytes = b""


def encode_frame(frame: Frame) -> bytes:
    """A frame as bytes."""
    head = _HEADER.pack(MAGIC, VERSION, frame.kind, frame.lane, frame.sequence, len(frame.body))
    return head + frame.body


def decode_frame(data: bytes | bytearray | memoryview) -> Frame:
    """Read exactly one frame.

    Raises:
        MailboxCorrupt: it was cut, is longer than it says, or is from another release.
    """
    kind, lane, sequence, size = _decode_header(data)
    present = len(data) - HEADER_BYTES
    if present != size:
        raise MailboxCorrupt(
            f"a message was cut: its body has {present} bytes, and should have {size}"
            if present < size
            else f"a message is followed by {present - size} bytes that are not its own"
        )
    return Frame(kind, lane, sequence, bytes(data[HEADER_BYTES:]))


def _decode_header(data: bytes | bytearray | memoryview) -> tuple[FrameKind, Lane, int, int]:
    if len(data) < HEADER_BYTES:
        raise MailboxCorrupt(
            f"a message was cut: it has {len(data)} bytes, and its header alone {HEADER_BYTES}"
        )
    magic, version, kind, lane, sequence, size = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise MailboxCorrupt(
            f"a message begins with {magic:#010x}, expected {MAGIC:#010x}: it is no message of "
            "rankwise, or the channel has lost its place"
        )
    if version != VERSION:
        raise MailboxCorrupt(
            f"a message has layout version {version}, expected {VERSION}",
            hint="parent and workers must use the same release of rankwise",
        )
    try:
        kinds = FrameKind(kind), Lane(lane)
    except ValueError:
        raise MailboxCorrupt(
            f"a message has kind {kind} on lane {lane}, which this release does not know"
        ) from None
    if size > BODY_BYTES_MAX:
        raise MailboxCorrupt(f"a message says that its body has {size} bytes")
    return *kinds, sequence, size


class FrameDecoder:
    """Cuts frames out of a stream of bytes that comes in pieces of any size."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Take bytes in; yield the frames that are complete by now.

        Raises:
            MailboxCorrupt: what came is no frame of this release; nothing after it can be
                believed, so the channel must be given up.
        """
        self._pending += data
        while len(self._pending) >= HEADER_BYTES:
            kind, lane, sequence, size = _decode_header(self._pending)
            end = HEADER_BYTES + size
            if len(self._pending) < end:
                return
            body = bytes(self._pending[HEADER_BYTES:end])
            del self._pending[:end]
            yield Frame(kind, lane, sequence, body)

    def end(self) -> None:
        """Note that the stream is over.

        Raises:
            MailboxCorrupt: it ended within a frame.
        """
        if self._pending:
            raise MailboxCorrupt(
                f"the channel ended within a message, after {len(self._pending)} bytes of it"
            )
