"""From chunks of bytes to whole lines for the console.

A `LineSplitter` turns the chunks of one stream into blocks of whole lines. It holds back what
follows the last newline, so that a line which was written in ten pieces is still one line, and a
line without newline at the end of the stream gets one. Log files do not pass through here: they
receive the bytes as they are.

Three kinds of unfinished line leave early, so that memory stays bounded and progress is seen:

- A line of which more than `line_limit` bytes have been held back leaves in pieces, all of which
  but the last end in `CUT_MARK`.
- A line that is being redrawn with carriage returns (a progress bar) is shown as a line of its own
  when its stream has shown none for a second. Only what follows the last carriage return counts;
  what it has overwritten is forgotten, as on a terminal.
- The same goes for finished lines: they show what follows their last carriage return. Those
  directly before the newline are part of the line's end and vanish.

The `unfinished` line of a stream that has fallen silent, such as a prompt, can be shown on a
terminal; it is still a part of its line when that is finished.

Nothing here looks at a clock: the instants come with the chunks, and so an update that arrives
within the second waits for the next chunk.
"""

import re

from rankwise.base.units import SECOND, Duration, Instant

LINE_LIMIT = 64 << 20
"""Bytes of an unfinished line that are held back before it leaves in pieces. Longer than what
programs print as one line (results as JSON, arrays in full), and still bounded for each stream."""

CUT_MARK = b" [cut by rankwise, the line goes on]"
"""What ends a piece of a line on the console; log files have the line as it was written."""

REDRAW_PAUSE = Duration(1 * SECOND)
"""How long a stream is silent about a line that is being redrawn, once it has shown it."""

_LINE_END = re.compile(rb"(?<!\r)\r+\n")
_OVERWRITTEN = re.compile(rb"^.*\r", re.MULTILINE)


def prefixed(lines: bytes, prefix: bytes) -> bytes:
    """A block of whole lines, each with `prefix` in front."""
    if not prefix:
        return lines
    # One replacement for the whole block: a loop over lines costs fifteen times as much. It
    # leaves a prefix too many behind the last newline.
    text = memoryview(lines.replace(b"\n", b"\n" + prefix))[: -len(prefix)]
    return b"".join((prefix, text))


class LineSplitter:
    """Splits one stream into whole lines."""

    def __init__(self, *, line_limit: int = LINE_LIMIT) -> None:
        self._line_limit = line_limit
        # Holds no carriage return but for at most one at its end, which may belong to a "\r\n".
        self._held = bytearray()
        self._is_continuation = False
        self._is_redrawn = False
        self._shown = b""
        self._shown_at: Instant | None = None

    @property
    def unfinished(self) -> bytes:
        """What has come of a line that has no end yet, unless it is being redrawn."""
        return b"" if self._is_redrawn else bytes(self._held).rstrip(b"\r")

    def feed(self, chunk: bytes, now: Instant) -> bytes:
        """Take the stream's next bytes; return the lines that are due, perhaps none."""
        end = chunk.rfind(b"\n") + 1
        if not end:
            return self._hold(chunk, now)
        text = self._finish(chunk[:end])
        return text + self._hold(chunk[end:], now) if end < len(chunk) else text

    def flush(self) -> bytes:
        """Take note that the stream has ended; return its unfinished last line, with a newline."""
        return self._finish(b"\n") if self._held.rstrip(b"\r") else b""

    def _finish(self, ending: bytes) -> bytes:
        """Complete the line that is held with `ending`, which may contain further lines."""
        text = bytes(self._held) + ending if self._held else ending
        is_continuation = self._is_continuation
        if b"\r" in text:
            text = _LINE_END.sub(b"\n", text)
            text = _OVERWRITTEN.sub(b"", text)
        # A finished line that equals what was shown of it already is not shown twice.
        if self._shown and text.startswith(self._shown):
            text = text[len(self._shown) :]
        elif is_continuation and text.startswith(b"\n"):
            # The newline of a line whose pieces have each been given one.
            text = text[1:]
        self._held.clear()
        self._shown = b""
        self._is_continuation = self._is_redrawn = False
        return text

    def _hold(self, part: bytes, now: Instant) -> bytes:
        """Hold back `part`, which has no newline; return what of the line must leave already."""
        held = self._held
        old_length = len(held)
        held += part
        if b"\r" in part or held[old_length - 1 : old_length] == b"\r":
            self._forget_overwritten(old_length)
        if self._is_redrawn and self._is_time_to_show(now):
            shown = bytes(held).rstrip(b"\r") + b"\n"
            if len(shown) > 1:
                self._shown, self._shown_at = shown, now
                return shown
        if len(held) > self._line_limit:
            # A line of its own, with the prefix: others' lines may come before the next piece.
            piece = bytes(held).rstrip(b"\r") + CUT_MARK + b"\n"
            held.clear()
            self._shown = b""
            self._is_continuation = True
            return piece
        return b""

    def _forget_overwritten(self, old_length: int) -> None:
        held = self._held
        end = len(held)
        while end and held[end - 1] == 0x0D:
            end -= 1
        del held[end + 1 :]
        overwritten = held.rfind(b"\r", max(old_length - 1, 0), end) + 1
        if overwritten:
            del held[:overwritten]
            self._is_redrawn = True
            self._is_continuation = False

    def _is_time_to_show(self, now: Instant) -> bool:
        return self._shown_at is None or now - self._shown_at >= REDRAW_PAUSE
