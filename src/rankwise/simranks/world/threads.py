"""Waits of a rank's threads for each other: locks, conditions, queues, the ends of threads.

A thread that has the run token and blocks in C keeps it from the sibling that it waits for. So what
a rank's threads make of `threading` while ranks run waits by `Turns.nap`. Everything in Python
that waits is made of a lock or of a condition: `Event`, `queue.Queue`, futures, semaphores,
barriers. `queue.SimpleQueue` has a form in Python as well, and an event loop waits in a selector.

Other threads of this process get the real things.
"""

import queue
import selectors
import sys
import threading
import time
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable
from concurrent.futures import thread as pools
from functools import partial
from types import TracebackType
from typing import Any

from rankwise.simranks.world.ranks import Rank, Strand
from rankwise.simranks.world.turns import Turns

_POLLS = ("EpollSelector", "PollSelector", "SelectSelector")
_CONDITION_WAIT = threading.Condition.wait.__code__
_FOR_EVER = -1.0
_now_s = time.monotonic  # a rank finds another one


class Threads:
    """Makes what the threads of ranks wait with.

    Args:
        turns: have the strands.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._joiners: dict[Strand, list[_Waiter]] = {}

    @property
    def patches(self) -> tuple[tuple[Any, str, Callable[[Any], Any]], ...]:
        """What is replaced, and what makes the substitute of the original."""
        return (
            (threading, "Lock", self._made_by_ranks(_Lock)),
            (threading, "RLock", self._made_by_ranks(_RLock)),
            (threading, "_allocate_lock", self._waiters_of_conditions),
            (threading.Thread, "join", self._join),
            (threading.Thread, "start", self._start),
            (queue, "SimpleQueue", lambda _: queue._PySimpleQueue),  # type: ignore[attr-defined]  # noqa: SLF001  # it waits for a semaphore
            *(
                (getattr(selectors, name), "select", self._select)
                for name in _POLLS
                if hasattr(selectors, name)
            ),
        )

    def end(self, strand: Strand) -> None:
        """The calling thread ends: those that join it go on."""

        def release_joiners() -> None:
            for waiter in self._joiners.pop(strand, ()):
                waiter.release()

        self._turns.end_thread(strand, release_joiners)

    def join_at_end(self, rank: Rank) -> None:
        """Wait for the threads of a rank whose program is over, as Python does before it ends."""
        for strand in list(rank.helpers):
            thread = strand.thread
            if thread is not None and not thread.daemon:
                if thread in pools._threads_queues:  # noqa: SLF001  # as Python does at its end
                    self._finish_pool(rank, thread)
                else:
                    thread.join()

    def _finish_pool(self, rank: Rank, thread: threading.Thread) -> None:
        """Have the threads of a pool do what has been submitted; then they wait for more."""
        queues = pools._threads_queues  # noqa: SLF001  # the same
        items = queues[thread]
        members = [
            each
            for each in rank.helpers
            if each.thread is not None and queues.get(each.thread) is items
        ]
        last = _LastItem(self._turns)
        for _ in members:
            items.put(last)
        for each in members:
            last.await_thread(each, self._joiners)
        last.over.set()

    def _made_by_ranks(self, kind: Any) -> Callable[[Any], Any]:
        turns = self._turns

        def make(original: Callable[[], Any]) -> Callable[[], Any]:
            def made() -> Any:
                return kind(turns) if turns.own_strand() is not None else original()

            made.__name__ = original.__name__
            return made

        return make

    def _waiters_of_conditions(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def allocate_lock() -> Any:
            asks = sys._getframe(1).f_code  # noqa: SLF001  # threads are ended by such locks, too
            is_of_rank = asks is _CONDITION_WAIT and self._turns.own_strand() is not None
            return _Waiter(self._turns) if is_of_rank else original()

        return allocate_lock

    def _join(self, original: Callable[..., None]) -> Callable[..., None]:
        def join(thread: threading.Thread, timeout: float | None = None) -> None:
            own = self._turns.own_strand()
            if own is None or thread is own.thread or not thread.is_alive():
                original(thread, timeout)
                return
            strand = self._turns.helpers.get(thread.ident or 0)
            if strand is None or strand.thread is not thread:
                original(thread, timeout)
                return
            if self.wait_for_end(strand, _FOR_EVER if timeout is None else max(timeout, 0.0)):
                original(thread)

        return join

    def _start(self, original: Callable[..., None]) -> Callable[..., None]:
        def start(thread: threading.Thread) -> None:
            own = self._turns.own_strand()
            if own is None:
                original(thread)
                return
            own.is_starting = True  # a pool holds a lock of the process meanwhile
            try:
                original(thread)
            finally:
                own.is_starting = False

        return start

    def wait_for_end(self, strand: Strand, timeout_s: float) -> bool:
        """Wait for a thread of a rank; whether it has ended."""
        waiter = _Waiter(self._turns, f"the end of thread {strand.name!r}")
        waiter.acquire()
        self._joiners.setdefault(strand, []).append(waiter)
        is_over = self._turns.helpers.get(strand.ident) is not strand
        return is_over or waiter.acquire(timeout=timeout_s)

    def _select(self, original: Callable[..., Any]) -> Callable[..., Any]:
        turns = self._turns

        def select(selector: Any, timeout: float | None = None) -> Any:
            if (timeout is not None and timeout <= 0) or turns.own_strand() is None:
                return original(selector, timeout)
            return turns.nap(_SELECTING, lambda: original(selector, timeout))

        return select


class _Selecting:
    """A wait for descriptors, which may come from anywhere."""

    is_known_to_last = False

    def describe(self) -> str:
        return "a descriptor, in an event loop perhaps"

    def interrupt(self) -> bool:
        return False


_SELECTING = _Selecting()


class _Waiter:
    """What a thread of a rank waits for until another one releases it; a lock, for conditions.

    The thread that is woken takes the lock some time before it can say so to the scheduler. Until
    it has, `_is_woken` tells that it does not wait any more: the lock looks as if it did.
    """

    __slots__ = (
        "_has_deadline", "_is_released", "_is_woken", "_lock", "_mutex", "_turns", "_what",
    )  # fmt: skip

    def __init__(self, turns: Turns, what: str = "") -> None:
        self._turns = turns
        self._what = what
        self._lock = allocate_lock()
        self._mutex = allocate_lock()
        self._is_released = self._is_woken = self._has_deadline = False

    def acquire(self, blocking: bool = True, timeout: float = _FOR_EVER) -> bool:
        """Take it, or wait until it is released; whether it is taken."""
        if self._lock.acquire(blocking=False):
            self._is_released = self._is_woken = False
            return True
        if not blocking:
            return False
        self._has_deadline = timeout >= 0
        until = _now_s() + timeout
        while True:
            left = max(until - _now_s(), 0.0) if self._has_deadline else _FOR_EVER
            is_taken = self._turns.nap(self, partial(self._lock.acquire, timeout=left))
            with self._mutex:
                is_released = self._is_released
                self._is_released = self._is_woken = False
            if is_released or not is_taken:
                return bool(is_released)  # or it was interrupted: then it is waited for again

    def release(self) -> None:
        """Let the thread that waits go on."""
        with self._mutex:
            self._is_released = self._is_woken = True
            if self._lock.locked():
                self._lock.release()

    def locked(self) -> bool:
        """Whether it is taken."""
        return self._lock.locked()

    @property
    def is_known_to_last(self) -> bool:
        """Whether it lasts until another thread releases it."""
        return not (self._has_deadline or self._is_woken)

    def interrupt(self) -> bool:
        """Have the thread that waits look for signals."""
        with self._mutex:
            if not self._is_released and self._lock.locked():
                self._is_woken = True
                self._lock.release()
        return True

    def describe(self) -> str:
        """Say what is waited for."""
        return self._what or "another thread of its own (a condition, an event, a queue)"


class _Lock:
    """A `threading.Lock` whose wait lets siblings have the token."""

    __slots__ = ("__weakref__", "_lock", "_turns", "_waiters")
    _make: Callable[[], Any] = staticmethod(allocate_lock)
    _awaited = "a lock that another thread holds"

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._lock = type(self)._make()
        self._waiters: deque[_Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = _FOR_EVER) -> bool:
        """As that of a lock."""
        lock = self._lock
        if not blocking or (timeout < 0 and timeout != _FOR_EVER):
            return bool(lock.acquire(blocking, timeout))  # which refuses what is invalid
        if lock.acquire(blocking=False):
            return True
        until = _now_s() + timeout
        waiter = _Waiter(self._turns, self._awaited)
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            while not lock.acquire(blocking=False):
                left = _FOR_EVER if timeout < 0 else max(until - _now_s(), 0.0)
                if not waiter.acquire(timeout=left):
                    return False
            return True
        finally:
            self._waiters.remove(waiter)

    def release(self) -> None:
        """As that of a lock."""
        self._lock.release()
        self._wake()

    def locked(self) -> bool:
        """Whether it is taken."""
        return bool(self._lock.locked())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def _wake(self) -> None:
        if self._waiters:
            for waiter in list(self._waiters):
                waiter.release()

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()  # noqa: SLF001  # as that of a lock
        self._waiters.clear()

    def __repr__(self) -> str:
        return repr(self._lock)


class _RLock(_Lock):
    """A `threading.RLock` whose wait lets siblings have the token; conditions use all of it."""

    __slots__ = ()
    _make = staticmethod(threading.RLock)

    def release(self) -> None:
        """As that of a lock."""
        self._lock.release()
        if self._waiters and not self._lock._is_owned():  # noqa: SLF001  # what conditions call
            self._wake()

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())  # noqa: SLF001  # what conditions call

    def _recursion_count(self) -> int:
        return int(self._lock._recursion_count())  # noqa: SLF001  # what conditions call

    def _release_save(self) -> tuple[int, int]:
        state: tuple[int, int] = self._lock._release_save()  # noqa: SLF001  # what conditions call
        self._wake()
        return state

    def _acquire_restore(self, state: tuple[int, int]) -> None:
        for _ in range(state[0]):
            self.acquire()


class _LastItem:
    """Something for each thread of a pool to do, when it has done everything before."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._came: set[int] = set()
        self._waiters: list[_Waiter] = []
        self.over = threading.Event()

    def run(self) -> None:
        """In a thread of the pool: it has nothing left to do."""
        self._came.add(threading.get_ident())
        for waiter in list(self._waiters):
            waiter.release()
        self.over.wait()  # or one thread would take the items of all

    def await_thread(self, strand: Strand, joiners: dict[Strand, list[_Waiter]]) -> None:
        """Wait until a thread of the pool has nothing left to do, or has ended."""
        waiter = _Waiter(self._turns, f"the task submitted to thread {strand.name!r}")
        waiter.acquire()
        self._waiters.append(waiter)
        joiners.setdefault(strand, []).append(waiter)
        while strand.ident not in self._came and self._turns.helpers.get(strand.ident) is strand:
            waiter.acquire()
