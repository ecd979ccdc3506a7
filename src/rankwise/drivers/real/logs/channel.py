"""One worker's stream on its way to the console: whole lines, a prefix, the duplicates."""

from collections.abc import Sequence

from rankwise.base.units import Instant
from rankwise.drivers.real.logs.console import Outlet
from rankwise.drivers.real.logs.file import LogFile
from rankwise.drivers.real.logs.lines import LINE_LIMIT, Lines, LineSplitter
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

    @property
    def is_congested(self) -> bool:
        """Whether the console is too slow for what it is told."""
        return self._outlet.is_congested

    def take(self, chunk: bytes, now: Instant) -> None:
        """Show the lines that the chunk completes."""
        lines = self._splitter.feed(chunk, now)
        if lines is not None:
            self._show(lines, now)

    def end(self, now: Instant) -> None:
        """Show the last line, even if it has no newline."""
        lines = self._splitter.flush()
        if lines is not None:
            self._show(lines, now)

    def _show(self, lines: Lines, now: Instant) -> None:
        if self._duplicates is not None:
            prefix = stamped(self._plain_prefix)
            self._duplicates.copy_matches(lines.prefixed(prefix), now)
        if self._outlet.is_gone:
            return
        if self._outlet.is_terminal:
            lines = lines._replace(text=harmless(lines.text))
        self._outlet.write(lines.prefixed(stamped(self._shown_prefix)))
