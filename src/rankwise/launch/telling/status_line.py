"""One line at the end of a terminal that says how far something has come, while it lasts.

A thread redraws it, from `AFTER_S` on and as long as nothing else has been written for that time.
The thread only asks for words: nothing waits for it. Code that writes to the terminal meanwhile
calls `wipe` first. Its locks are Python's lowest: simulated ranks have their own of the others.
"""

import _thread
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from time import monotonic
from typing import Any

AFTER_S = 2.0
"""What is over by then shows no sign of life."""
_REDRAWN_EVERY_S = 0.25
_PATIENCE_S = 0.2
_ERASE = b"\r\x1b[K"


class _Present:
    """What is on the terminal now."""

    def __init__(self) -> None:
        self.lock = _thread.allocate_lock()
        self.is_drawn = False
        self.written_at = 0.0


_present = _Present()


def can_redraw() -> bool:
    """Whether stderr is a terminal, and not one that can only add lines."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in {"dumb", "unknown"}


def wipe() -> None:
    """Take the line away, before something else is written."""
    if not _present.is_drawn:  # nearly always, and without a lock
        _present.written_at = monotonic()
        return
    # Not for ever: in a process that was forked from this one, the lock is never released.
    is_ours = _present.lock.acquire(timeout=_PATIENCE_S)
    _present.written_at = monotonic()
    if _present.is_drawn:
        _present.is_drawn = False
        _write(_ERASE)
    if is_ours:
        _present.lock.release()


def _write(data: bytes) -> None:
    with suppress(OSError):  # the terminal has gone
        os.write(2, data)


@contextmanager
def shown(words: Callable[[float], str], *, has_sinks: bool = False) -> Iterator[None]:
    """Show what `words` says of the seconds that have passed, if stderr can be redrawn.

    A print meanwhile takes the line away first; simulated ranks have sinks that do so.
    """
    if not can_redraw():
        yield
        return
    end, is_over = _thread.allocate_lock(), _thread.allocate_lock()
    end.acquire()
    is_over.acquire()
    _present.written_at = 0.0
    _thread.start_new_thread(_redraw, (words, end, is_over))
    try:
        with ExitStack() as stack:
            if not has_sinks:
                stack.enter_context(redirect_stdout(_Wiping(sys.stdout)))
                stack.enter_context(redirect_stderr(_Wiping(sys.stderr)))
            yield
    finally:
        end.release()
        is_over.acquire()
        wipe()


def _redraw(words: Callable[[float], str], end: Any, is_over: Any) -> None:
    begun_at = monotonic()
    try:
        pause = AFTER_S
        while not end.acquire(timeout=pause):
            pause = _REDRAWN_EVERY_S
            now = monotonic()
            text = words(now - begun_at)[: shutil.get_terminal_size().columns - 1]
            with _present.lock:
                if now - _present.written_at >= AFTER_S:
                    _write(_ERASE + text.encode(errors="replace"))
                    _present.is_drawn = True
    finally:
        is_over.release()


class _Wiping:
    """A stream that takes the line away before it writes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> Any:
        wipe()
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        wipe()
        self._stream.writelines(lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
