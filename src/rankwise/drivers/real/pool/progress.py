"""A line on the terminal that tells how far a pool has come."""

import os
import sys
import time
from contextlib import suppress
from typing import TextIO

from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant, after
from rankwise.drivers.real.pool.engine import PoolEngine

_INTERVAL = Duration(200 * MILLISECOND)
_COLUMNS = 80


def show_progress(engine: PoolEngine, stream: TextIO | None = None) -> None:
    """Show a pool's progress on a terminal until it ends; elsewhere do nothing."""
    stream = sys.stderr if stream is None else stream
    if stream is not None and stream.isatty():
        engine.on_change = _ProgressLine(engine, stream).update


class _ProgressLine:
    def __init__(self, engine: PoolEngine, stream: TextIO) -> None:
        self._engine = engine
        self._stream = stream
        self._began = self._next = Instant(time.monotonic_ns())
        self._shown = ""
        self._is_due = False

    def update(self) -> None:
        """Show what has changed, now or soon."""
        if self._engine.has_ended:
            if text := self._text():
                self._write(text, "\n")
            return
        if self._is_due:
            return
        if time.monotonic_ns() >= self._next:
            self._show()
        else:
            self._is_due = True
            self._engine.call_at(self._next, self._show)

    def _show(self) -> None:
        self._is_due = False
        self._next = after(Instant(time.monotonic_ns()), _INTERVAL)
        text = self._text()
        if text != self._shown and text:
            self._shown = text
            self._write(text, "")

    def _text(self) -> str:
        waiting, running, workers = self._engine.counts
        done, failed = self._engine.done_count, self._engine.failed_count
        if not (waiting or running or done):
            return ""
        seconds = (time.monotonic_ns() - self._began) // SECOND
        now = f", {running} running, {waiting} waiting, {workers} workers"
        if self._engine.has_ended:
            now = ""
        text = f"{done} done, {failed} failed{now}, {seconds // 60}:{seconds % 60:02}"
        return text[: self._columns() - 1]

    def _columns(self) -> int:
        """The terminal's: of a line that is broken, only the last part could be erased."""
        with suppress(OSError, ValueError):  # it is gone, or a stream without a descriptor
            return os.get_terminal_size(self._stream.fileno()).columns or _COLUMNS
        return _COLUMNS

    def _write(self, text: str, end: str) -> None:
        try:
            self._stream.write(f"\r\x1b[2K{text}{end}")
            self._stream.flush()
        except (OSError, ValueError):
            self._engine.on_change = None  # the terminal is gone
