"""Signals as descriptors: handlers that do nothing but wake the reactor, restored afterwards.

Python runs a handler between two byte codes of the main thread, wherever that is; raising from
there tears through clean-up code. Here a signal is one byte in a pipe, read by the reactor like
anything else. A signal that was ignored when we came (`nohup`, a background job) stays ignored.
"""

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any, Self


def end_well(_signum: int, _frame: FrameType | None) -> None:
    """End this process as a success: all that it was to do is done."""
    os._exit(0)


class SignalPipe:
    """While entered, the given signals arrive in `take` and do nothing else.

    Only the main thread may handle signals; in another thread this does nothing, and
    `is_active` says so.

    Attributes:
        late: when it was left, the signals that were not taken.
        on_arrival: called in the main thread with each signal, while the pipe is not waited for.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        self.late: list[int] = []
        self.on_arrival: Callable[[int], None] | None = None
        self._signals = tuple(signals)
        self._caught: set[int] = set()
        self._previous: dict[int, Any] = {}
        self._previous_wakeup_fd = -1
        self._pipe: list[int] = []
        """The reading and the writing end, while signals arrive."""

    @property
    def is_active(self) -> bool:
        """Whether signals arrive here."""
        return bool(self._pipe)

    def fileno(self) -> int:
        """The descriptor to watch for reading."""
        return self._pipe[0]

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        try:
            self._take_over()
        except BaseException:  # an interrupt that came before it was ours
            self._restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        finally:
            # A handler that is back may have raised, with others still to be restored.
            self._restore()

    def _take_over(self) -> None:
        self._pipe[:] = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for signum in self._signals:
            handler = signal.getsignal(signum)
            # None: installed by C code that we could not restore.
            if handler is not signal.SIG_IGN and handler is not None:
                self._caught.add(signum)
                self._previous[signum] = handler
                signal.signal(signum, self._on_signal)

    def _restore(self) -> None:
        """Put everything back, each part at most once, so that it can be called again."""
        if not self.is_active:
            return
        for signum, handler in list(self._previous.items()):
            signal.signal(signum, handler)
            del self._previous[signum]
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        self.late += self.take()
        while self._pipe:
            os.close(self._pipe.pop())

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Exist, so that Python writes the signal's number to the wake-up descriptor."""
        if self.on_arrival is not None:
            self.on_arrival(signum)

    def leave(
        self, handler: Callable[[int, FrameType | None], None], signals: Collection[int]
    ) -> None:
        """Leave this handler for these of the signals instead of those that they had before."""
        self._previous |= dict.fromkeys(self._previous.keys() & signals, handler)

    def take(self) -> list[int]:
        """The caught signals in the order of their arrival.

        Signals that belong to others, such as the event loop of a notebook which had the wake-up
        descriptor before us, are passed on to them.
        """
        try:
            numbers = os.read(self._pipe[0], 4096)
        except BlockingIOError:
            return []
        foreign = bytes(signum for signum in numbers if signum not in self._caught)
        if foreign and self._previous_wakeup_fd >= 0:
            with suppress(OSError):  # theirs is full or closed: then they know enough
                os.write(self._previous_wakeup_fd, foreign)
        return [signum for signum in numbers if signum in self._caught]


def is_default(signum: int) -> bool:
    """Whether a signal does what it does by default: it is not handled and not ignored."""
    return signal.getsignal(signum) is signal.SIG_DFL


def stop_self() -> None:
    """Let SIGTSTP stop this process as it does by default; return when it goes on.

    Where no shell could let it go on (its process group is orphaned), the kernel does not stop it.
    """
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)
