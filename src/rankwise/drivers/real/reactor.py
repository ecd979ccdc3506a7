"""One thread that waits for everything at once: descriptors, deadlines, calls from other threads.

The reactor sleeps in epoll until a descriptor is ready or the nearest deadline has come. Nothing
is polled; an idle run uses no CPU. Callbacks run in the thread that calls `run`, one after
another, so nothing that they touch needs a lock. `post` is the only call that other threads may
make.
"""

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from select import EPOLLIN, EPOLLOUT, epoll
from threading import RLock
from typing import Self

from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant, after
from rankwise.ports.clock import Clock

Callback = Callable[[], object]

SLEEP_MAX = Duration(24 * 3600 * SECOND)
"""One call of epoll: the kernel counts milliseconds in 31 bits, which is 24 days."""


class ReactorTimer:
    """A call that will be made at an instant unless it is cancelled."""

    __slots__ = ("_callback", "instant")

    def __init__(self, instant: Instant, callback: Callback) -> None:
        self.instant = instant
        self._callback: Callback | None = callback

    def cancel(self) -> None:
        """Make sure that the call is not made any more."""
        self._callback = None

    def fire(self) -> None:
        """Make the call, once, unless cancelled."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class Reactor:
    """Waits for descriptors, timers and posted calls, and calls back."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._epoll = epoll()
        self._readers: dict[int, Callback] = {}
        self._writers: dict[int, Callback] = {}
        self._timers: list[tuple[Instant, int, ReactorTimer]] = []
        self._sequence = count()
        self._posted: deque[Callback] = deque()
        # Guards the wake-up pipe's life: its number may be another file's once it is closed.
        self._lock = RLock()  # a signal handler may post, too
        self._is_closed = False
        # Non-blocking, since a thousand posts need only one byte in the pipe.
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.watch_readable(self._wake_read, self._run_posted)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch_readable(self, fd: int, callback: Callback) -> None:
        """Call back whenever `fd` can be read, or has reached its end, until `unwatch_readable`."""
        self._readers[fd] = callback
        self._update(fd, is_new=fd not in self._writers)

    def unwatch_readable(self, fd: int) -> None:
        """Stop watching; harmless when `fd` is not watched. Call it before closing `fd`."""
        if self._readers.pop(fd, None) is not None:
            self._update(fd, is_new=False)

    def watch_writable(self, fd: int, callback: Callback) -> None:
        """Call back whenever `fd` can be written, or its reader has gone."""
        if fd not in self._writers:
            self._writers[fd] = callback
            self._update(fd, is_new=fd not in self._readers)
        else:
            self._writers[fd] = callback

    def unwatch_writable(self, fd: int) -> None:
        """Stop watching; harmless when `fd` is not watched."""
        if self._writers.pop(fd, None) is not None:
            self._update(fd, is_new=False)

    def call_at(self, instant: Instant, callback: Callback) -> ReactorTimer:
        """Call back once at `instant`, or as soon after it as the thread is free."""
        timer = ReactorTimer(instant, callback)
        heappush(self._timers, (instant, next(self._sequence), timer))
        return timer

    def postpone(self, duration: Duration) -> None:
        """Let no timer count a time in which this process was stopped."""
        for _, _, timer in self._timers:
            timer.instant = after(timer.instant, duration)
        # The same for all, so they stay in order.
        self._timers = [(timer.instant, place, timer) for _, place, timer in self._timers]

    def post(self, callback: Callback) -> None:
        """Call back in the reactor's thread; the one call that any thread may make."""
        with self._lock:
            if self._is_closed:
                return  # the loop has ended
            self._posted.append(callback)
            with suppress(BlockingIOError):  # the pipe is full of wake-ups already
                os.write(self._wake_write, b"\0")

    def run_once(self, deadline: Instant | None = None) -> None:
        """Wait until something happens or `deadline` has come, and make the calls that are due.

        After `SLEEP_MAX` it returns though nothing has happened; the waiting caller calls it again.
        """
        for fd, events in self._epoll.poll(self._seconds_to_wait(deadline)):
            # A callback may unwatch, close or replace any descriptor, hence the look-ups.
            if events & ~EPOLLOUT and (reader := self._readers.get(fd)) is not None:
                reader()
            if events & ~EPOLLIN and (writer := self._writers.get(fd)) is not None:
                writer()
        self._fire_due_timers()

    def close(self) -> None:
        """Release the reactor's own descriptors. Watched ones belong to their owners."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._epoll.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _update(self, fd: int, *, is_new: bool) -> None:
        events = (EPOLLIN if fd in self._readers else 0) | (EPOLLOUT if fd in self._writers else 0)
        if not events:
            # A closed descriptor has left the epoll set by itself.
            with suppress(OSError):
                self._epoll.unregister(fd)
        elif is_new:
            self._epoll.register(fd, events)
        else:
            self._epoll.modify(fd, events)

    def _seconds_to_wait(self, deadline: Instant | None) -> float:
        """Seconds for epoll: minus one for ever; rounded up, so that a timer is never early."""
        if self._timers and (deadline is None or self._timers[0][0] < deadline):
            deadline = self._timers[0][0]
        if deadline is None:
            return -1
        remaining = min(deadline - self._clock.now(), SLEEP_MAX)
        return -(-remaining // MILLISECOND) / 1000 if remaining > 0 else 0

    def _fire_due_timers(self) -> None:
        if not self._timers:
            return
        now = self._clock.now()
        while self._timers and self._timers[0][0] <= now:
            heappop(self._timers)[2].fire()

    def _run_posted(self) -> None:
        os.read(self._wake_read, 4096)
        for _ in range(len(self._posted)):
            self._posted.popleft()()
