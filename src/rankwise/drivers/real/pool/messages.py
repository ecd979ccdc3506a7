"""Messages between a pool and its workers, over one socket for each worker.

The sockets keep messages apart (SOCK_SEQPACKET) and hand each to one reader. The pool keeps the
worker's end, too: what it reads there, the worker has not taken and will not get.

A message is a header, a line for each buffer, a function's pickle (perhaps) and a pickle. A part
that is longer than a socket takes well lies in a memfd, whose descriptor comes first. Buffers are
memfds, see `memory`.
"""

import os
import struct
from array import array
from pickle import PickleBuffer
from socket import (
    CMSG_SPACE,
    MSG_CMSG_CLOEXEC,
    MSG_CTRUNC,
    MSG_DONTWAIT,
    SCM_RIGHTS,
    SOL_SOCKET,
    socket,
)
from typing import Any, NamedTuple

from rankwise.drivers.real.pool.array_memory import (
    BUFFERS_MAX,
    MappingMode,
    found_shared,
    map_received,
    written,
)

INLINE_BYTES_MAX = 32 << 10
"""Two messages of this size always find room in a socket."""
SLOT_COUNT = 64
"""How many functions a worker remembers."""
NO_SLOT = 0xFFFF
_HEADER = struct.Struct("<BBHHIIQQ")
_BUFFER = struct.Struct("<QQB")
_IN_FILE = 1
# Plain numbers: the standard library's flags take a microsecond to combine.
_CLOEXEC, _TRUNCATED = int(MSG_CMSG_CLOEXEC), int(MSG_CTRUNC)
DONT_WAIT = int(MSG_DONTWAIT)
_OWN, _OWN_PRIVATE, _SHARED = range(3)
_MESSAGE_BYTES_MAX = INLINE_BYTES_MAX + _HEADER.size + BUFFERS_MAX * _BUFFER.size
_NOTHING = memoryview(b"")
_TOO_MANY_FILES = "this process may open no more files (raise `ulimit -n`)"
_NO_BUFFERS: "list[memoryview]" = []
_ANCILLARY_BYTES = CMSG_SPACE((BUFFERS_MAX + 1) * 4)


class MessageKind:
    """What a message is."""

    CALL = 1
    CHUNK = 2
    """Call the function once for each element of a list, from a place on; see `FIRST_SHIFT`."""
    READY = 3
    VALUE = 4
    ERROR = 5
    INITIALIZER_FAILED = 6
    STARRED_CHUNK = 7
    """The same, and each element is a tuple of arguments."""
    PART = 8
    """Results of a chunk that goes on."""
    FUNCTION_MISSING = 9
    """The worker was not sent this function: its pickle lay in a message that was taken back."""


CHUNKS = (MessageKind.CHUNK, MessageKind.STARRED_CHUNK)
FIRST_SHIFT = 40
"""Above that many bits, `extra` of a chunk has the place at which to begin."""
CHUNK_CALLS_MAX = 1 << 24


class PoolMessage(NamedTuple):
    """A message as it has come.

    Attributes:
        kind: what it is.
        slot: where the worker remembers the function; `NO_SLOT` if it is in the pickle.
        generation: which of the functions that are remembered there.
        task: the task's number.
        extra: where in the pickle the sources begin, or how long a task has taken.
        function: a pickle of the function, if it is new to the worker.
        body: the pickle.
        buffers: memory of the pickle's large arrays.
        trouble: why its content cannot be had here; empty if it can.
    """

    kind: int
    slot: int
    generation: int
    task: int
    extra: int
    function: "memoryview"
    body: "memoryview"
    buffers: "list[memoryview]"
    trouble: str = ""


class Packed:
    """A message on its way: its bytes, and descriptors that are closed once it is sent."""

    __slots__ = ("_fds", "_kept", "_owners", "_parts")

    def __init__(  # noqa: PLR0917  # as `send_small` has them
        self,
        kind: int,
        task: int,
        body: "bytes | memoryview",
        described: "Any" = (),
        slot: int = NO_SLOT,
        generation: int = 0,
        extra: int = 0,
        function: bytes = b"",
    ) -> None:
        self._fds: list[int] = []
        self._kept: list[int] = []
        """Those among them that belong to arrays."""
        self._owners: list[PickleBuffer] = []
        """These arrays: their descriptors are closed with them."""
        lines = b""
        flags = count = 0
        try:
            if len(body) + len(function) > INLINE_BYTES_MAX:
                flags = _IN_FILE
                self._fds.append(written(PickleBuffer(function + body if function else body))[0])
            for buffer, is_private in described:
                lines += self._add(buffer, is_private)
                count += 1
        except BaseException:
            self.close()
            raise
        header = _HEADER.pack(kind, flags, slot, count, len(function), generation, task, extra)
        self._parts: list[Any] = [header + lines]
        if not flags:
            self._parts += (function, body) if function else (body,)

    def _add(self, buffer: PickleBuffer, is_private: bool) -> bytes:
        shared = found_shared(buffer)
        if shared is not None and not is_private:
            fd, offset, size_bytes = shared
            self._fds.append(fd)
            self._kept.append(fd)
            self._owners.append(buffer)
            return _BUFFER.pack(offset, size_bytes, _SHARED)
        fd, size_bytes = written(buffer)
        self._fds.append(fd)
        return _BUFFER.pack(0, size_bytes, _OWN_PRIVATE if is_private else _OWN)

    def send(self, sock: socket, flags: int = 0) -> None:
        """Send it; raises BlockingIOError when there is no room and `flags` forbid to wait."""
        if self._fds:
            rights = [(SOL_SOCKET, SCM_RIGHTS, array("i", self._fds))]
            sock.sendmsg(self._parts, rights, flags)
            self.close()
        else:
            sock.sendmsg(self._parts, (), flags)

    def close(self) -> None:
        """Close the descriptors that nothing else needs."""
        fds, self._fds = self._fds, []
        for fd in fds:
            if fd not in self._kept:
                os.close(fd)


class Receiver:
    """Reads messages from sockets, one at a time: the next one overwrites the last one's pickle.

    Args:
        is_writable: whether arrays are to be writable.
    """

    def __init__(self, *, is_writable: bool) -> None:
        self._memory = memoryview(bytearray(_MESSAGE_BYTES_MAX))
        self._into = [self._memory]
        self._own = MappingMode.PRIVATE if is_writable else MappingMode.READ
        self._shared = MappingMode.SHARED if is_writable else MappingMode.READ

    def receive(self, sock: socket, flags: int = 0) -> PoolMessage | None:
        """The next message; None at the end. Raises BlockingIOError if `flags` forbid to wait."""
        length, ancillary, status, _ = sock.recvmsg_into(
            self._into, _ANCILLARY_BYTES, flags | _CLOEXEC
        )
        if not length:
            return None
        memory = self._memory
        unpacked = _HEADER.unpack_from(memory)
        kind, marks, slot, count, function_bytes, generation, task, extra = unpacked
        at = _HEADER.size
        if not ancillary and not count:
            at_body = at + function_bytes
            function = memory[at:at_body] if function_bytes else _NOTHING
            trouble = _TOO_MANY_FILES if status & _TRUNCATED or marks else ""
            body = memory[at_body:length]
            rest = function, body, _NO_BUFFERS, trouble
            return PoolMessage(kind, slot, generation, task, extra, *rest)
        fds = array("i")
        for _, _, packed in ancillary:
            fds.frombytes(packed[: len(packed) - len(packed) % fds.itemsize])
        lines = [_BUFFER.unpack_from(memory, at + place * _BUFFER.size) for place in range(count)]
        at += count * _BUFFER.size
        wanted = count + bool(marks & _IN_FILE)
        content, buffers, trouble = memory[at:length], _NO_BUFFERS, ""
        left = [*fds]
        try:
            if len(fds) < wanted:
                trouble = _TOO_MANY_FILES
            else:
                if marks & _IN_FILE:
                    content = self._content(left.pop(0))
                buffers = [self._mapped(left.pop(0), *line) for line in lines]
        except OSError as error:  # out of address space, or of mappings
            trouble = error.strerror or str(error)
        for fd in left:
            os.close(fd)
        if trouble:
            content, buffers, function_bytes = memory[:0], _NO_BUFFERS, 0
        function, body = content[:function_bytes], content[function_bytes:]
        return PoolMessage(kind, slot, generation, task, extra, function, body, buffers, trouble)

    @staticmethod
    def _content(fd: int) -> "memoryview":
        return map_received(fd, 0, os.fstat(fd).st_size, MappingMode.READ, is_shared=False)

    def _mapped(self, fd: int, offset: int, size_bytes: int, manner: int) -> "memoryview":
        if manner == _SHARED:
            return map_received(fd, offset, size_bytes, self._shared, is_shared=True)
        mapping = MappingMode.PRIVATE if manner == _OWN_PRIVATE else self._own
        return map_received(fd, 0, size_bytes, mapping, is_shared=False)


def send_small(  # noqa: PLR0917  # by name they take a tenth of it all
    sock: socket,
    kind: int,
    task: int,
    body: bytes,
    slot: int = NO_SLOT,
    generation: int = 0,
    extra: int = 0,
    function: bytes = b"",
    flags: int = 0,
) -> bool:
    """Send a message without buffers; whether it is short enough for that."""
    if len(body) + len(function) > INLINE_BYTES_MAX:
        return False
    header = _HEADER.pack(kind, 0, slot, 0, len(function), generation, task, extra)
    sock.send(header + function + body, flags)
    return True


def task_of_unread(sock: socket) -> int | None:
    """Take a message that its reader has not taken; its task, or None if there is none.

    Its descriptors are closed: a task that is sent again is packed anew.
    """
    try:
        data, ancillary, _, _ = sock.recvmsg(_HEADER.size, _ANCILLARY_BYTES, DONT_WAIT | _CLOEXEC)
    except BlockingIOError:
        return None
    for _, _, packed in ancillary:
        fds = array("i")
        fds.frombytes(packed[: len(packed) - len(packed) % fds.itemsize])
        for fd in fds:
            os.close(fd)
    return int(_HEADER.unpack_from(data)[6]) if len(data) >= _HEADER.size else None
