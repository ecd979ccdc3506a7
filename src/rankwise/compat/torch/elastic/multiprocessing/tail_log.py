"""Shows growing log files: whole lines, each with its rank's prefix.

One thread follows all files of a `TailLog`. It sleeps until a file has changed (see
`FileWatch`), then takes what is new in each. A line that is being written stays back until
its newline has come, so that pieces of different lines never meet; when a file has ended without
a newline, its last line gets one.

The workers that rankwise starts are not followed through files: their pipes end in the agent. This
is for programs that use torch's class on their own.
"""

import ctypes
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping
from select import POLLIN, poll
from threading import Event, Thread
from typing import Self, TextIO

from rankwise.base.units import Instant
from rankwise.drivers.real.logs.lines import LineSplitter, prefixed

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

    def _follow(self, watch: "FileWatch") -> None:
        while not self._is_stopping:
            for file in self._files.values():
                if file.is_awaited:
                    watch.watch(file.path)
                file.show_news()
            watch.wait()
        # Lines from before the call of `stop` are in the files by now.
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

    def _show(self, text: bytes) -> None:
        if not text:
            return
        if self._filter not in (None, _every_line):
            chosen = [
                line
                for line in text.splitlines(keepends=True)
                if self._filter(line.decode("utf-8", "replace"))
            ]
            text = b"".join(chosen)
        if text:
            self._dst.write(prefixed(text, self._header).decode("utf-8", "replace"))
            self._dst.flush()


_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100
_EVENTS = _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE


class FileWatch:
    """Wakes one thread when files change, with inotify. Close it to give its descriptors back.

    A file is watched through its directory, so it may appear, be replaced and grow. While not even
    the directory exists, the nearest one above it is watched. A watch for a directory is added
    before it is looked at, so nothing that happens in between is missed.

    inotify tells of this machine's writers only: what another host writes to a network file system
    is seen late. Its instances per user are limited, so it may not be to be had.

    Args:
        interval: seconds between looks where inotify is not to be had.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._stirred = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._inotify: int = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = poll()
        self._poll.register(self._stirred, POLLIN)
        if self._inotify >= 0:
            self._poll.register(self._inotify, POLLIN)
        else:
            self._give_up_inotify("inotify_init1")

    def watch(self, path: str) -> None:
        """Watch `path`; call it again while the file does not exist, after every `wait`."""
        directory = os.path.dirname(os.path.abspath(path))
        nearest = ""
        while self._inotify >= 0 and nearest != (now_nearest := _nearest_existing(directory)):
            # If the next directory below appears before we listen, the loop sees it.
            nearest = now_nearest
            self._add(nearest)

    def wait(self) -> None:
        """Wait until a watched file may have changed, or `stir` was called."""
        self._poll.poll(None if self._inotify >= 0 else self._interval * 1000)
        for descriptor in (self._inotify, self._stirred):
            if descriptor >= 0:
                _empty(descriptor)

    def stir(self) -> None:
        """End the present or the next `wait`; any thread may call it."""
        os.eventfd_write(self._stirred, 1)

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self._stirred)
        if self._inotify >= 0:
            os.close(self._inotify)

    def _add(self, directory: str) -> None:
        if self._libc.inotify_add_watch(self._inotify, os.fsencode(directory), _EVENTS) < 0:
            self._poll.unregister(self._inotify)
            os.close(self._inotify)
            self._inotify = -1
            self._give_up_inotify(f"inotify_add_watch of {directory}")

    def _give_up_inotify(self, call: str) -> None:
        logger.warning(
            "%s failed: %s; log files are looked at every %s s instead",
            call,
            os.strerror(ctypes.get_errno()),
            self._interval,
        )


def _nearest_existing(directory: str) -> str:
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    return directory


def _empty(descriptor: int) -> None:
    """Read what is there; which files have changed is found by looking at them."""
    try:
        while os.read(descriptor, 1 << 16):
            pass
    except BlockingIOError:
        pass
