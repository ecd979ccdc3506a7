"""Shows growing log files: whole lines, each with its rank's prefix.

One thread follows all files of a `TailLog`. It sleeps until a file has changed (see
`file_watch.py`), then takes what is new in each. A line that is being written stays back until
its newline has come, so that pieces of different lines never meet; when a file has ended without
a newline, its last line gets one.

The workers that rankwise starts are not followed through files: their pipes end in the agent. This
is for programs that use torch's class on their own.
"""

import logging
import os
import stat
import time
from collections.abc import Callable, Mapping
from threading import Event, Thread
from typing import Self, TextIO

from rankwise.base.units import Instant
from rankwise.compat.torch.elastic.multiprocessing.file_watch import FileWatch
from rankwise.drivers.real.logs.lines import Lines, LineSplitter

__all__ = ["TailLog", "tail_logfile"]

logger = logging.getLogger(__name__)

LineFilter = Callable[[str], bool]


def _every_line(_: str) -> bool:
    return True


_CHUNK_BYTES = 1 << 20


class TailLog:
    """Follows log files from their beginning until `stop`.

    Args:
        name: stands in the prefix, `[<name><local rank>]:`.
        log_files: paths by local rank; they need not exist yet.
        dst: where lines go.
        log_line_prefixes: prefixes by local rank that take the usual one's place.
        interval_sec: how often files are looked at where the system cannot tell of changes.
        log_line_filter: which lines to show; it is given the line without prefix.
    """

    def __init__(
        self,
        name: str,
        log_files: Mapping[int, str],
        dst: TextIO,
        log_line_prefixes: Mapping[int, str] | None = None,
        interval_sec: float = 0.1,
        log_line_filter: LineFilter = _every_line,
    ) -> None:
        prefixes = log_line_prefixes or {}
        self._name = name
        self._interval_sec = interval_sec
        self._files = {
            local_rank: _FollowedFile(
                path, prefixes.get(local_rank, f"[{name}{local_rank}]:"), dst, log_line_filter
            )
            for local_rank, path in log_files.items()
        }
        self._watch: FileWatch | None = None
        self._thread: Thread | None = None
        self._is_stopping = False
        self._stopped = False

    def start(self) -> Self:
        """Begin to follow; without files, do nothing."""
        if self._files and self._thread is None:
            self._watch = FileWatch(self._interval_sec)
            self._thread = Thread(
                target=self._follow, args=(self._watch,), name=f"tail {self._name}", daemon=True
            )
            self._thread.start()
        return self

    def stop(self) -> None:
        """Show what has been written until now, to the last byte, and end.

        A file that could not be followed is told through the module's `logger`.
        """
        if self._thread is not None and self._watch is not None:
            self._is_stopping = True
            self._watch.stir()
            self._thread.join()
            self._thread = None
            self._watch.close()
            self._report_errors()
        self._stopped = True

    def stopped(self) -> bool:
        """Whether `stop` has returned."""
        return self._stopped

    def _follow(self, watch: FileWatch) -> None:
        while not self._is_stopping:
            for file in self._files.values():
                if file.is_awaited:
                    watch.watch(file.path)
                file.show_news()
            watch.wait()
        # What was written before `stop` was called is in the files by now.
        for file in self._files.values():
            file.show_the_rest()

    def _report_errors(self) -> None:
        for local_rank, file in self._files.items():
            if file.error is not None:
                logger.exception(  # noqa: LOG004  # torch's tests count this very call
                    "the log of %s%s, %s, could not be followed",
                    self._name,
                    local_rank,
                    file.path,
                    exc_info=file.error,
                )


def tail_logfile(
    header: str,
    file: str,
    dst: TextIO,
    finished: Event,
    interval_sec: float,
    log_line_filter: LineFilter | None = None,
) -> None:
    """Follow one file in the calling thread until `finished` is set.

    A `threading.Event` cannot be waited for together with a file, so this looks at the file every
    `interval_sec` seconds; `TailLog` does better.

    Raises:
        OSError: the file cannot be read, or `dst` not be written.
    """
    followed = _FollowedFile(file, header, dst, log_line_filter)
    while not finished.wait(interval_sec):
        followed.show_news()
    followed.show_the_rest()
    if followed.error is not None:
        raise followed.error


class _FollowedFile:
    """One growing file on its way to `dst`.

    Attributes:
        path: the file's path.
        error: what made following it impossible, if anything did.
    """

    def __init__(self, path: str, header: str, dst: TextIO, line_filter: LineFilter | None) -> None:
        self.path = path
        self.error: Exception | None = None
        self._header = header.encode("utf-8", "surrogateescape")
        self._dst = dst
        self._filter = line_filter
        self._splitter = LineSplitter()
        self._descriptor = -1
        self._position = 0

    @property
    def is_awaited(self) -> bool:
        """Whether the file does not exist yet."""
        return self._descriptor < 0 and self.error is None

    def show_news(self) -> None:
        """Show the lines that have been completed since the last look."""
        self._guard(self._read_on)

    def show_the_rest(self) -> None:
        """Show all that is left, the last line with or without newline, and close the file."""
        self._guard(self._read_on)
        self._guard(lambda: self._show(self._splitter.flush()))
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _guard(self, step: Callable[[], None]) -> None:
        """One file's trouble is not the others'; it is told when following ends."""
        if self.error is None:
            try:
                step()
            except Exception as error:  # noqa: BLE001  # `dst` and the filter are the caller's
                self.error = error

    def _read_on(self) -> None:
        if self._descriptor < 0:
            try:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                return
        # Up to what is there now: a writer that is faster than we are must not hold us here.
        status = os.fstat(self._descriptor)
        end = status.st_size if stat.S_ISREG(status.st_mode) else self._position + _CHUNK_BYTES
        if end < self._position:
            self._position = os.lseek(self._descriptor, 0, os.SEEK_SET)  # it was emptied
        while self._position < end:
            try:
                chunk = os.read(self._descriptor, min(_CHUNK_BYTES, end - self._position))
            except BlockingIOError:
                return
            if not chunk:
                return
            self._position += len(chunk)
            self._show(self._splitter.feed(chunk, Instant(time.monotonic_ns())))

    def _show(self, lines: Lines | None) -> None:
        if lines is None:
            return
        text = lines.text
        if self._filter not in (None, _every_line):
            chosen = [
                line
                for line in text.splitlines(keepends=True)
                if self._filter(line.decode("utf-8", "replace"))
            ]
            text = b"".join(chosen)
        if text:
            self._dst.write(Lines(text).prefixed(self._header).decode("utf-8", "replace"))
            self._dst.flush()
