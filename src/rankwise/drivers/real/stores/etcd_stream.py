"""One answer that never ends: the lines of a chunked HTTP/1.1 response, as they come.

`http.client` reads such a body only by waiting; whoever waits for changes also waits for a deadline
and for being told to stop. So the bytes are taken from a socket that never blocks, and this is the
part that knows what they mean. It does no I/O.
"""

from rankwise.base.errors import RemoteProtocolError

HEAD_MAX = 64 * 1024
LINE_MAX = 256 * 1024 * 1024
"""Longer than any batch of changes: etcd refuses requests of more than a few MiB."""


class ResponseLines:
    """Feed it bytes, take lines.

    Attributes:
        status: the response's status; None until its head is complete.
        is_over: whether the response has come to its end.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.is_over = False
        self._is_chunked = False
        self._bytes_left: int | None = None  # of the chunk, or of the whole body
        self._raw = bytearray()
        self._line = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete with these bytes; at the body's end, the rest of it.

        Raises:
            RemoteProtocolError: this is no HTTP.
        """
        self._raw += data
        if self.status is None and not self._take_head():
            return []
        while self._take_body():
            pass
        if len(self._line) > LINE_MAX:
            raise RemoteProtocolError(f"a line of an answer is longer than {LINE_MAX} bytes")
        *lines, rest = bytes(self._line).split(b"\n")
        if self.is_over and rest:
            lines, rest = [*lines, rest], b""
        self._line = bytearray(rest)
        return [line for line in lines if line]

    def _take_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > HEAD_MAX or not b"HTTP/1.".startswith(self._raw[:7]):
                raise RemoteProtocolError(f"no HTTP: the answer begins with {self._raw[:40]!r}")
            return False
        status_line, *fields = bytes(self._raw[:end]).decode("latin-1").split("\r\n")
        del self._raw[: end + 4]
        words = status_line.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise RemoteProtocolError(f"no HTTP: the answer begins with {status_line[:40]!r}")
        self.status = int(words[1])
        for field in fields:
            name, _, value = (part.strip().lower() for part in field.partition(":"))
            if (name, value) == ("transfer-encoding", "chunked"):
                self._is_chunked = True
            elif name == "content-length" and value.isdigit():
                self._bytes_left = int(value)
        return True

    def _take_body(self) -> bool:
        """Move on by one step; whether there may be another."""
        if self._bytes_left is None and self._is_chunked:
            return self._take_chunk_size()
        taken = len(self._raw) if self._bytes_left is None else self._bytes_left
        taken = min(taken, len(self._raw))
        self._line += self._raw[:taken]
        del self._raw[:taken]
        if self._bytes_left is None:
            return False  # the body ends with the connection
        self._bytes_left -= taken
        if self._bytes_left:
            return False
        if not self._is_chunked:
            self.is_over = True
            return False
        self._bytes_left = None
        return True

    def _take_chunk_size(self) -> bool:
        # The line break after the chunk before, if there was one, stands in front of the size.
        if self._raw.startswith(b"\r\n"):
            del self._raw[:2]
        end = self._raw.find(b"\r\n")
        if end < 0 or self.is_over:
            return False
        size = bytes(self._raw[:end]).partition(b";")[0].strip()
        try:
            self._bytes_left = int(size, 16)
        except ValueError:
            raise RemoteProtocolError(f"no HTTP: a chunk's size is {size[:40]!r}") from None
        del self._raw[: end + 2]
        if self._bytes_left == 0:
            self._bytes_left, self.is_over = None, True
            return False
        return True
