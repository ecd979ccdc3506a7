"""Doing something again and again in a thread: what torch's rendezvous keeps its nodes alive with.

rankwise's own rendezvous does not need it; handlers of other packages do.
"""

import random
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from rankwise.base.errors import LocalProtocolError

SHORTEST_S = 0.01


def delay(seconds: float | tuple[float, float]) -> None:
    """Wait for so long, or for some time between the two; what is hardly a wait is left out."""
    if isinstance(seconds, tuple):
        seconds = random.uniform(*seconds)  # noqa: S311  # it spreads load
    if seconds >= SHORTEST_S:
        threading.Event().wait(seconds)


class PeriodicTimer:
    """Calls `function(*args, **kwargs)` in a thread, with `interval` between, until cancelled.

    A timer without references cancels itself, but not because the program ends.
    """

    def __init__(
        self, interval: timedelta, function: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        self._interval_s = interval.total_seconds()
        self._call = partial(function, *args, **kwargs)
        self._stopped = threading.Event()
        self._name: str | None = None
        self._thread: threading.Thread | None = None
        self._finalizer: weakref.finalize[..., PeriodicTimer] | None = None

    @property
    def name(self) -> str | None:
        """The name of its thread."""
        return self._name

    def set_name(self, name: str) -> None:
        """Name its thread.

        Raises:
            LocalProtocolError: it has been started; it is a RuntimeError.
        """
        self._refuse_if_started()
        self._name = name

    def start(self) -> None:
        """Begin; the first call is one interval from now.

        Raises:
            LocalProtocolError: it has been started; it is a RuntimeError.
        """
        self._refuse_if_started()
        self._thread = threading.Thread(
            # It knows nothing of the timer, which must be able to go while it runs.
            target=_repeat,
            args=(self._interval_s, self._call, self._stopped),
            name=self._name or "PeriodicTimer",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, _stop, self._stopped, self._thread)
        self._finalizer.atexit = False
        self._thread.start()

    def cancel(self) -> None:
        """Stop; a call that is under way ends before. Harmless the second time."""
        if self._finalizer is not None:
            self._finalizer()

    def _refuse_if_started(self) -> None:
        if self._thread is not None:
            raise LocalProtocolError("The timer has already started.")


def _repeat(interval_s: float, call: Callable[[], None], stopped: threading.Event) -> None:
    while not stopped.wait(interval_s):
        call()


def _stop(stopped: threading.Event, thread: threading.Thread) -> None:
    stopped.set()
    if thread is not threading.current_thread():
        thread.join()
