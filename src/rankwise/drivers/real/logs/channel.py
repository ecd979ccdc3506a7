"""One worker's stream on its way to the console: whole lines, a prefix, the duplicates.

On a terminal, a line that has no end is shown as far as it has come once the output pauses: a
prompt of `breakpoint()`, or `Loading model ... `. If its stream is the next to write, it goes on
behind that. If others have written meanwhile, the whole line is shown again when it is finished.
"""

from collections.abc import Sequence

from rankwise.base.units import Instant
from rankwise.drivers.real.logs.console import Outlet
from rankwise.drivers.real.logs.file import LogFile
from rankwise.drivers.real.logs.lines import LINE_LIMIT, LineSplitter, prefixed
from rankwise.drivers.real.logs.stamps import stamped
from rankwise.drivers.real.logs.terminal import RESET, harmless


class DuplicateFilter:
    """Copies the console's lines that contain one of several words to a file of their own.

    One filter serves the streams of all ranks. Words are looked for in the line as it is shown,
    prefix included, without colours. The file belongs to the caller, who closes it.
    """

    def __init__(self, needles: Sequence[str], log_file: LogFile) -> None:
        self._needles = tuple(needle.encode("utf-8", "surrogateescape") for needle in needles)
        self._log_file = log_file

    def copy_matches(self, text: bytes, now: Instant) -> None:
        """Copy the matching lines of `text`, which are whole."""
        # Most blocks contain no match at all, and that is quick to know.
        if not any(needle in text for needle in self._needles):
            return
        matches = [
            line
            for line in text[:-1].split(b"\n")
            if any(needle in line for needle in self._needles)
        ]
        if matches:
            self._log_file.take(b"\n".join(matches) + b"\n", now)


class ConsoleChannel:
    """A sink that shows a stream on the console, line by line.

    Attributes:
        prefix: what stands in front of each line; may have marks for the time.
        colour: escape sequence that colours the prefix; empty for none.
    """

    def __init__(
        self,
        outlet: Outlet,
        *,
        prefix: str = "",
        colour: bytes = b"",
        duplicates: DuplicateFilter | None = None,
        line_limit: int = LINE_LIMIT,
    ) -> None:
        self._outlet = outlet
        self._splitter = LineSplitter(line_limit=line_limit)
        self._plain_prefix = prefix.encode("utf-8", "surrogateescape")
        self._shown_prefix = (
            colour + self._plain_prefix + RESET if colour and prefix else self._plain_prefix
        )
        self._duplicates = duplicates
        self._opened = b""
        """What has been shown of the unfinished line."""

    @property
    def is_congested(self) -> bool:
        """Whether the console is too slow for what it is told."""
        return self._outlet.is_congested

    def take(self, chunk: bytes, now: Instant) -> None:
        """Show the lines that the chunk completes."""
        if lines := self._splitter.feed(chunk, now):
            self._show(lines, now)
        if self._outlet.is_terminal and not self._outlet.is_gone and chunk[-1:] not in b"\r\n":
            self._outlet.hold(self)

    def show_unfinished(self) -> None:
        """Show what has come of a line that has no end, if that is news."""
        text = self._splitter.unfinished
        if text and text != self._opened:
            self._write(text, open_line=self)
            self._opened = text

    def end(self, now: Instant) -> None:
        """Show the last line, even if it has no newline."""
        if lines := self._splitter.flush():
            self._show(lines, now)

    def _show(self, lines: bytes, now: Instant) -> None:
        if self._duplicates is not None:
            self._duplicates.copy_matches(prefixed(lines, stamped(self._plain_prefix)), now)
        self._outlet.unfinished.pop(self, None)
        if not self._outlet.is_gone:
            self._write(lines)
        self._opened = b""

    def _write(self, text: bytes, open_line: "ConsoleChannel | None" = None) -> None:
        opened = self._opened
        goes_on = self._outlet.open_line is self and text.startswith(opened)
        if goes_on:
            text = text[len(opened) :]
        if self._outlet.is_terminal:
            text = harmless(text)
        prefix = stamped(self._shown_prefix)
        block = prefix + text if open_line else prefixed(text, prefix)
        if goes_on:
            self._outlet.go_on(block[len(prefix) :], open_line=open_line)
        else:
            self._outlet.write(block, open_line=open_line)
