"""One message between a parent and a worker, in bytes: a frame.

    u32 magic, u16 version, u8 kind, u8 lane, u64 sequence, u64 bytes of the body, then the body

in native byte order, since both ends are on one machine. A frame says how long it is and who wrote
it, so one that was cut, comes from another release, or is none at all is found out before anything
in it is believed. There is no limit on the body: a frame that does not fit where its carrier would
like to put it is the carrier's business.

The *lane* keeps tasks apart from control (memory, copies, domains).
"""

import struct
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

    REQUEST = 2
    """The parent wants something done."""
    REPLY = 3
    """It is done; the body is the result."""
    FAILURE = 4
    """It could not be done; the body says why."""


class RequestLane(IntEnum):
    """What a request is about: a task, or anything else."""

    TASK = 0
    CONTROL = 1


class Frame(msgspec.Struct, frozen=True):
    """A message.

    Attributes:
        sequence: counts the requests from 1; an answer has its request's.
    """

    kind: FrameKind
    lane: RequestLane
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


def _decode_header(data: bytes | bytearray | memoryview) -> tuple[FrameKind, RequestLane, int, int]:
    if len(data) < HEADER_BYTES:
        raise MailboxCorrupt(
            f"a message was cut: it has {len(data)} bytes, and its header alone {HEADER_BYTES}"
        )
    magic, version, kind, lane, sequence, size = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise MailboxCorrupt(
            f"a message begins with {magic:#010x}, expected {MAGIC:#010x}: it is not a message of "
            "rankwise, or the channel has lost its place"
        )
    if version != VERSION:
        raise MailboxCorrupt(
            f"a message has layout version {version}, expected {VERSION}",
            hint="parent and workers must use the same release of rankwise",
        )
    try:
        kinds = FrameKind(kind), RequestLane(lane)
    except ValueError:
        raise MailboxCorrupt(
            f"a message has kind {kind} on lane {lane}, which this release does not know"
        ) from None
    if size > BODY_BYTES_MAX:
        raise MailboxCorrupt(f"a message says that its body has {size} bytes")
    return *kinds, sequence, size
