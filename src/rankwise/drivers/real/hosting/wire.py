"""Frames between the agent and the processes that make workers for it.

A frame is `<u32 body length><u32 descriptor count>` and a body, which is `marshal` of a tuple: the
only serialiser that costs no import, and the guardian's start-up time is counted in single
milliseconds. For the same reason this module takes `_socket` and not `socket`, and has its own
exception. Both ends run these very files, but a fork server may run them under another interpreter
(PYTHON_EXEC), so the format is one that every Python since 3.4 reads and writes.

Descriptors ride in one SCM_RIGHTS message with the frame's first byte. The kernel never merges
two such messages into one `recvmsg`, so every `recvmsg` brings at most one group of descriptors,
and groups arrive in the order of the frames that announce them. A group can be *shorter* than
announced: a receiver that is at its limit of open files loses what does not fit. The frame is
then delivered with what came, and its reader compares the count with what it needs.
"""

import _socket
import marshal
import sys

TYPE_CHECKING = False  # `typing` would cost a third of the guardian's start-up
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    Message = tuple[Any, ...]
    Frame = tuple[Message, list[int]]

HEADER_BYTES = 8
BODY_BYTES_MAX = 64 << 20
"""Far above the largest environment that the kernel lets a process have."""
DESCRIPTORS_MAX = 253
"""The kernel's own limit for one SCM_RIGHTS message."""
_MARSHAL_VERSION = 4
_RECEIVE_BYTES = 1 << 16
_DESCRIPTOR_BYTES = 4


def program_arguments(program: str, control: int | str) -> list[str]:
    """Return the interpreter's arguments that start a process at the other end of a socket.

    Args:
        program: `guardian`, or `forkserver`, whose arguments may be followed by module names.
        control: the number of the program's end of the socket, or the name of the environment
            variable that will hold it.
    """
    flags = ["-I", "-S"] if program == "guardian" else ["-u"]
    return [*flags, f"{__file__.rpartition('/')[0]}/{program}.py", str(control)]


class BadFrame(ValueError):
    """What came, or was to be sent, is not a frame; the connection cannot be used any more."""


def encode(message: "Message", descriptor_count: int = 0) -> bytes:
    """Return the frame of a message that announces so many descriptors."""
    body = marshal.dumps(message, _MARSHAL_VERSION)
    if len(body) > BODY_BYTES_MAX:
        raise BadFrame(f"a message of {len(body)} bytes is more than a frame's {BODY_BYTES_MAX}")
    if descriptor_count > DESCRIPTORS_MAX:
        raise BadFrame(
            f"{descriptor_count} descriptors are more than a frame can carry, {DESCRIPTORS_MAX}"
        )
    return len(body).to_bytes(4, "little") + descriptor_count.to_bytes(4, "little") + body


def send(sock: "_socket.socket", message: "Message", fds: "Iterable[int]" = ()) -> None:
    """Send one frame, waiting until all of it is on its way, also on a non-blocking socket.

    The descriptors stay open here. Raises `OSError` (usually `BrokenPipeError`) when the other
    side is gone.
    """
    descriptors = list(fds)
    rest = memoryview(encode(message, len(descriptors)))
    while rest:
        try:
            sent = send_part(sock, rest, descriptors)
        except BlockingIOError:
            _wait_until_writable(sock)
            continue
        rest = rest[sent:]
        descriptors = []


def send_part(sock: "_socket.socket", part: "memoryview", fds: "list[int]") -> int:
    """Hand a non-blocking socket what it takes of a frame; return how many bytes that was.

    The descriptors go with the frame's first part, and with no other. Raises `OSError`.
    """
    ancillary = []
    if fds:
        packed = b"".join(fd.to_bytes(_DESCRIPTOR_BYTES, sys.byteorder) for fd in fds)
        ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)]
    return sock.sendmsg([part], ancillary, _socket.MSG_NOSIGNAL)


def _wait_until_writable(sock: "_socket.socket") -> None:
    import select  # noqa: PLC0415 - only a full socket needs it

    waiting = select.poll()
    waiting.register(sock.fileno(), select.POLLOUT)
    waiting.poll()


class FrameReader:
    """Cuts a stream of bytes, with descriptors beside it, into messages.

    Attributes:
        ended: whether the other side has closed the connection, or is gone.
    """

    def __init__(self) -> None:
        self.ended = False
        self._bytes = bytearray()
        self._groups: list[list[int]] = []

    def receive(self, sock: "_socket.socket") -> "list[Frame]":
        """Do one `recvmsg` and return the frames that it completed, perhaps none.

        Returns nothing when a non-blocking socket has nothing to give. The caller owns the
        descriptors, which are not inheritable. Look at `ended` afterwards. Raises `BadFrame`.
        """
        try:
            data, ancillary, flags, _ = sock.recvmsg(
                _RECEIVE_BYTES,
                _socket.CMSG_SPACE(DESCRIPTORS_MAX * _DESCRIPTOR_BYTES),
                _socket.MSG_CMSG_CLOEXEC,
            )
        except BlockingIOError:
            return []
        except ConnectionResetError:
            self.ended = True
            return []
        if not data:
            self.ended = True
            return []
        fds: list[int] = []
        for level, kind, packed in ancillary:
            if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                whole = len(packed) - len(packed) % _DESCRIPTOR_BYTES
                fds += memoryview(packed)[:whole].cast("i").tolist()
        # MSG_CTRUNC without a descriptor: there was a group, and this process had no room for it.
        has_group = bool(fds) or bool(flags & _socket.MSG_CTRUNC)
        return self.feed(data, fds if has_group else None)

    def feed(self, data: bytes, fds: "list[int] | None" = None) -> "list[Frame]":
        """Take in bytes, and the group of descriptors that came with them; return whole frames.

        Raises `BadFrame`; what was complete before the bad frame is lost with the connection.
        """
        self._bytes += data
        if fds is not None:
            self._groups.append(fds)
        frames: list[Frame] = []
        start = 0
        while len(self._bytes) - start >= HEADER_BYTES:
            body = start + HEADER_BYTES
            body_bytes = int.from_bytes(self._bytes[start : start + 4], "little")
            descriptor_count = int.from_bytes(self._bytes[start + 4 : body], "little")
            if body_bytes > BODY_BYTES_MAX or descriptor_count > DESCRIPTORS_MAX:
                raise BadFrame(
                    f"the other side announced a frame of {body_bytes} bytes and "
                    f"{descriptor_count} descriptors; at most {BODY_BYTES_MAX} bytes and "
                    f"{DESCRIPTORS_MAX} descriptors are possible"
                )
            if len(self._bytes) - body < body_bytes:
                break
            start = body + body_bytes
            frames.append((_decode(bytes(self._bytes[body:start])), self._take(descriptor_count)))
        del self._bytes[:start]
        return frames

    def close(self) -> None:
        """Close descriptors that came for frames which were never completed."""
        import os  # noqa: PLC0415 - at the end of a connection only

        for group in self._groups:
            for fd in group:
                os.close(fd)
        self._groups.clear()

    def _take(self, descriptor_count: int) -> list[int]:
        if not descriptor_count:
            return []
        if not self._groups:
            raise BadFrame(
                f"a frame announced {descriptor_count} descriptors, but none came with it"
            )
        group = self._groups.pop(0)
        if len(group) > descriptor_count:
            raise BadFrame(
                f"a frame announced {descriptor_count} descriptors, but {len(group)} came with it"
            )
        return group


class FrameWriter:
    """Replies that wait until the other side reads: a slow reader never blocks the writer."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether everything has been handed to the kernel."""
        return not self._bytes

    def add(self, message: "Message") -> None:
        """Put a message, without descriptors, at the end of the queue."""
        self._bytes += encode(message)

    def flush(self, sock: "_socket.socket") -> None:
        """Hand to a non-blocking socket what it takes. Raises `OSError` when the peer is gone."""
        while self._bytes:
            try:
                sent = sock.send(self._bytes, _socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            del self._bytes[:sent]


def _decode(body: bytes) -> "Message":
    try:
        message = marshal.loads(body)  # noqa: S302 - a private socket pair of our own processes
    except (EOFError, ValueError, TypeError) as error:
        raise BadFrame(f"a frame of {len(body)} bytes is not a marshalled value: {error}") from None
    if not isinstance(message, tuple) or not message:
        raise BadFrame(f"a frame holds a {type(message).__name__}, expected a tuple with a name")
    return message
