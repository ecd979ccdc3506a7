"""The last lines of a stream, kept cheaply for the report of a failure.

Only bytes are kept while the stream runs; they are split into lines on request. Memory is at most
twice `byte_limit`, which makes trimming rare.
"""

from rankwise.base.units import Instant

TAIL_LINES = 20
TAIL_BYTES = 32 << 10
KEPT_LINES_MAX = 2 * TAIL_BYTES
"""More lines than are ever kept."""


class Tail:
    """A sink that remembers the end of a stream."""

    is_congested = False

    def __init__(self, *, byte_limit: int = TAIL_BYTES) -> None:
        self._byte_limit = byte_limit
        self._kept = bytearray()
        self._is_trimmed = False

    def take(self, chunk: bytes, now: Instant) -> None:  # noqa: ARG002 - a sink is told the time
        """Remember the chunk, forget what it has pushed out."""
        limit = self._byte_limit
        if len(chunk) > limit:
            self._kept = bytearray(memoryview(chunk)[-limit:])
            self._is_trimmed = True
            return
        self._kept += chunk
        if len(self._kept) > 2 * limit:
            del self._kept[:-limit]
            self._is_trimmed = True

    def end(self, now: Instant) -> None:
        """Nothing changes when the stream ends."""

    @property
    def kept(self) -> bytes:
        """What is remembered; it begins with a whole line, if it has more than one."""
        kept = bytes(self._kept)
        return kept[kept.find(b"\n") + 1 :] if self._is_trimmed else kept

    def lines(self, count: int = TAIL_LINES) -> tuple[str, ...]:
        """The last lines, oldest first, at most `count`, without newlines.

        A line that was redrawn with carriage returns shows its last state. Bytes that are not UTF-8
        are shown as replacement characters. A line whose beginning has been forgotten starts with
        an ellipsis.
        """
        lines = bytes(self._kept).split(b"\n")
        if not lines[-1]:
            lines.pop()
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines[-count:]]
        texts = [line.decode("utf-8", "replace") for line in shown]
        if self._is_trimmed and texts and len(lines) <= count:
            if len(texts) == 1:
                return ("…" + texts[0],)
            # Which part of the first line is missing is unknown, and there are others to show.
            del texts[0]
        return tuple(texts)
