"""Journals of a real run: JSON lines in a file.

One line per stimulus, `{"at": ns, "wall": "2026-11-22T23:20:23.750123Z", "machine": "agent",
"number": 7, "stimulus": {"type": …, …}}`, and one per effect, with `"cause": 7` and `"effect"`
instead. A record, from which nothing follows, is a line with `"record"`. A full disk must not end a
job, so a journal that cannot be written any more says so once and falls silent.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from time import time_ns
from typing import Any

import msgspec

from rankwise.base.units import Instant
from rankwise.drivers.real.logs.stamps import utc


class FileJournal:
    """Appends JSON lines to a file, unbuffered, so that a crash loses nothing.

    Args:
        path: the file, or how to call the one that `fd` is.
        on_error: is told, once, that it cannot be written any more.
        wall_ns: the calendar, in nanoseconds since 1970, for people who read it.
        fd: a file that is open for appending; it stays the caller's.
    """

    def __init__(
        self,
        path: str,
        on_error: Callable[[str, OSError], None],
        wall_ns: Callable[[], int] = time_ns,
        fd: int | None = None,
    ) -> None:
        self.path = path
        self._wall_ns = wall_ns
        self._on_error: Callable[[str, OSError], None] | None = on_error
        self._encoder = msgspec.json.Encoder()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644) if fd is None else os.dup(fd)

    def stimulus(self, machine: str, number: int, stimulus: Any, now: Instant) -> None:
        """Append what a machine was told."""
        self._append(now, {"machine": machine, "number": number, "stimulus": stimulus})

    def effect(self, machine: str, cause: int, effect: Any, now: Instant) -> None:
        """Append what it ordered."""
        self._append(now, {"machine": machine, "cause": cause, "effect": effect})

    def record(self, machine: str, record: Any, now: Instant) -> int:
        """Append what was recorded besides facts and orders; return how many bytes that took."""
        return self._append(now, {"machine": machine, "record": record})

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _append(self, now: Instant, entry: dict[str, Any]) -> int:
        """Append a line, and return how long it is; 0 when nothing can be written any more."""
        if self._on_error is None:
            return 0
        line = {"at": now, "wall": utc(self._wall_ns()), **entry}
        rest = self._encoder.encode(line) + b"\n"
        written = 0
        try:
            while rest:  # a disk that is nearly full takes a part, and refuses the next
                count = os.write(self._fd, rest)
                written, rest = written + count, rest[count:]
        except OSError as error:
            self._take_back(written)
            on_error, self._on_error = self._on_error, None
            on_error(self.path, error)
            return 0
        return written

    def _take_back(self, size: int) -> None:
        """Let the file end with a whole line, so that what is there can be read."""
        with suppress(OSError):  # not a regular file
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - size)
