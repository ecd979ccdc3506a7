"""Wake-ups: one thread waits, another wakes it, and signals are handled meanwhile.

A thread that waits for a lock is not woken by a signal that came just before the wait began: the
handler runs when the wait is over, after minutes perhaps. So it is a pipe, into which Python
writes the numbers of signals as well, through the process's wake-up descriptor.
"""

import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

_RUNG = b"\0"
_LONGEST_MS = 1 << 30
"""The system call takes no longer wait than twice this, 25 days."""


class Wakeup:
    """Wakes the thread that makes it; in the main thread, signals end its wait, too.

    Signals are passed on to the previous owner of the process's wake-up descriptor. Those of one
    thread are closed in the reverse order of their making.
    """

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._reading, select.POLLIN)
        self._receives_signals = threading.current_thread() is threading.main_thread()
        self._previous_fd = -1
        if self._receives_signals:
            self._previous_fd = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ring(self) -> None:
        """Let the thread that waits go on."""
        with suppress(BlockingIOError):  # it is full: the thread is awake
            os.write(self._writing, _RUNG)

    def wait(self, patience: Callable[[], float]) -> bool:
        """Wait to be woken; False if that takes longer, counted from the last signal.

        `patience`, in seconds, is asked again after each signal, whose handler may alter it.
        """
        while self._poll.poll(min(patience() * 1000, _LONGEST_MS)):
            received = os.read(self._reading, 4096)
            if self._previous_fd >= 0 and (signals := received.replace(_RUNG, b"")):
                with suppress(OSError):  # theirs is full or closed: then they know enough
                    os.write(self._previous_fd, signals)
            if _RUNG in received:
                return True
        return False

    def close(self) -> None:
        """Restore the previous wake-up descriptor; `ring` must not be called any more."""
        if self._receives_signals:
            signal.set_wakeup_fd(self._previous_fd)
        os.close(self._reading)
        os.close(self._writing)
