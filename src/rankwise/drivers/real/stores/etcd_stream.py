"""Answers of HTTP/1.1 as their bytes come: whole ones, and one that never ends, line by line.

`http.client` reads a body only by waiting; a thread that waits for changes also waits for a
deadline and for being told to stop. It also takes the head for an e-mail's, which costs more than
all else that a request needs. So the caller takes the bytes from a socket, and this is the part
that knows what they mean. It does no I/O.
"""

from rankwise.base.errors import RemoteProtocolError

HEAD_MAX = 64 * 1024
LINE_MAX = 256 * 1024 * 1024
"""Longer than any batch of changes: etcd refuses requests of more than a few MiB."""
SHOWN_MAX = 40


class NoHttp(RemoteProtocolError):
    """What has come is no answer of HTTP.

    Attributes:
        began: with which bytes it begins.
    """

    def __init__(self, what: str, began: bytes) -> None:
        super().__init__(f"no HTTP: {what} {began[:SHOWN_MAX]!r}")
        self.began = began


class Response:
    """Feed it bytes, take the body's.

    Attributes:
        status: the response's status; None until its head is complete.
        is_over: whether the response has come to its end.
        ends_with_connection: whether nothing but the connection's end tells the body's, or whether
            the server hangs up after it.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.is_over = False
        self.ends_with_connection = False
        self._is_chunked = False
        self._bytes_left: int | None = None  # of the chunk, or of the whole body
        self._raw = bytearray()
        self._body = bytearray()

    def feed(self, data: bytes) -> bytes:
        """What of the body has come with these bytes.

        Raises:
            NoHttp: this is none.
        """
        self._raw += data
        if self.status is None and not self._take_head():
            return b""
        while self._take_body():
            pass
        body, self._body = bytes(self._body), bytearray()
        return body

    def end(self) -> bool:
        """The server has hung up: whether that is the body's end, and not in its middle."""
        if self.status is not None and self._bytes_left is None and not self._is_chunked:
            self.is_over = True
        return self.is_over

    def _take_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > HEAD_MAX or not b"HTTP/1.".startswith(self._raw[:7]):
                raise NoHttp("the answer begins with", bytes(self._raw))
            return False
        head = bytes(self._raw[:end])
        del self._raw[: end + 4]
        status_line, *fields = head.decode("latin-1").split("\r\n")
        words = status_line.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise NoHttp("the answer begins with", head)
        self.status = int(words[1])
        self.ends_with_connection = words[0] == "HTTP/1.0"
        for field in fields:
            name, _, value = field.lower().partition(":")
            if name == "transfer-encoding":
                self._is_chunked = value.strip() == "chunked"
            elif name == "content-length" and value.strip().isdigit():
                self._bytes_left = int(value)
            elif name == "connection":
                self.ends_with_connection = value.strip() == "close"
        if self._bytes_left is None and not self._is_chunked:
            self.ends_with_connection = True
        return True

    def _take_body(self) -> bool:
        """Move on by one step; whether there may be another."""
        if self._bytes_left is None and self._is_chunked:
            return self._take_chunk_size()
        taken = len(self._raw) if self._bytes_left is None else self._bytes_left
        taken = min(taken, len(self._raw))
        self._body += self._raw[:taken]
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
            raise NoHttp("a chunk's size is", size) from None
        if self._bytes_left:
            del self._raw[: end + 2]
            return True
        # After the last chunk there may be trailing fields, and then there is an empty line.
        self._bytes_left = None
        if b"\r\n\r\n" in self._raw:
            self._raw.clear()
            self.is_over = True
        return False


class ResponseLines:
    """Feed it bytes, take the lines of the body."""

    def __init__(self) -> None:
        self._response = Response()
        self._line = b""

    @property
    def status(self) -> int | None:
        """The response's status; None until its head is complete."""
        return self._response.status

    @property
    def is_over(self) -> bool:
        """Whether the response has come to its end."""
        return self._response.is_over

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete with these bytes; at the body's end, the rest of it.

        Raises:
            NoHttp: this is none.
            RemoteProtocolError: a line has no end.
        """
        *lines, rest = (self._line + self._response.feed(data)).split(b"\n")
        if len(rest) > LINE_MAX:
            raise RemoteProtocolError(f"a line of an answer is longer than {LINE_MAX} bytes")
        if self.is_over and rest:
            lines, rest = [*lines, rest], b""
        self._line = rest
        return [line for line in lines if line]
