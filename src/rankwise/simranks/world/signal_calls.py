"""What the functions that send signals, wait for them or end a process do for a simulated rank.

Each is given the rank, the function of the process, and what that was called with.
"""

import errno
import math
import operator
import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

from rankwise.base.units import SECOND, Instant
from rankwise.simranks.world.gates import VirtualTimer
from rankwise.simranks.world.ranks import Rank

_ALARM = "alarm"
_UNSIGNED = 1 << 32
"""What `alarm` takes is below this: C makes 4,294,967,295 of -1."""
_WITHOUT_HANDLER = (signal.SIGKILL, signal.SIGSTOP)


class _Alarm(VirtualTimer):
    """A rank's timer of real time (`signal.alarm`), in virtual time; 0 ns is off."""

    __slots__ = ("_interval", "_rank")

    def __init__(self, rank: Rank, after_ns: int, interval_ns: int) -> None:
        super().__init__(Instant(rank.scheduler.now + after_ns))
        self._rank = rank
        self._interval = interval_ns
        self.is_cancelled = not after_ns
        if after_ns:
            rank.scheduler.put(self)

    @property
    def state(self) -> tuple[float, float]:
        """Seconds that are left, and between two signals."""
        left = 0 if self.is_cancelled else self.instant - self._rank.scheduler.now
        return max(left, 0) / SECOND, self._interval / SECOND

    def open(self) -> None:
        """Signal the rank, and again after the interval."""
        super().open()
        self.is_cancelled = True
        self._rank.signal(int(signal.SIGALRM))
        if self._interval and not self._rank.is_over:
            self._rank.own_state[_ALARM] = _Alarm(self._rank, self._interval, self._interval)


def _exit(rank: Rank, _original: Any, status: int) -> None:
    rank.end(status & 0xFF)


def _abort(rank: Rank, _original: Any) -> None:
    rank.end(-signal.SIGABRT)


def _kill(rank: Rank, original: Callable[[int, int], None], pid: int, number: int) -> None:
    if pid != os.getpid() or not number:
        original(pid, number)
    else:
        _raise_signal(rank, original, number)


def _raise_signal(rank: Rank, _original: Any, number: int) -> None:
    rank.signal(int(number))
    rank.take_signals()


def _pthread_kill(
    rank: Rank, original: Callable[[int, int], None], thread: int, number: int
) -> None:
    if thread != rank.thread.ident or not number:
        original(thread, number)
    else:
        _raise_signal(rank, original, number)


def _set_mask(rank: Rank, _original: Any, how: int, mask: Iterable[int]) -> set[int]:
    given = frozenset(map(int, mask)).difference(_WITHOUT_HANDLER)
    if not given <= signal.valid_signals():
        raise ValueError("signal number out of range")
    before = rank.blocked
    changed = {
        signal.SIG_BLOCK: before | given, signal.SIG_UNBLOCK: before - given,
        signal.SIG_SETMASK: given,
    }  # fmt: skip
    if how not in changed:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    rank.blocked = changed[signal.Sigmasks(how)]
    rank.take_signals()
    return set(map(_as_signal, before))


def _pending(rank: Rank, _original: Any) -> set[int]:
    return set(map(_as_signal, rank.pending))


def _wait(rank: Rank, original: Callable[..., Any], numbers: Iterable[int], *timeout: float) -> Any:
    if timeout and timeout[0] < 0:
        raise ValueError("timeout must be non-negative")
    now = rank.scheduler.now
    until = Instant(now + round(timeout[0] * SECOND)) if timeout else None
    number = rank.scheduler.wait_for_pending(frozenset(map(int, numbers)), until)
    if number is None:
        return None
    if original.__name__ == "sigwait":
        return _as_signal(number)
    return signal.struct_siginfo((number, 0, 0, os.getpid(), os.getuid(), 0, 0))


def _set_wakeup_fd(
    rank: Rank,
    _original: Any,
    fd: int,
    *,
    warn_on_full_buffer: bool = True,  # noqa: ARG001  # a rank is not warned
) -> int:
    if fd != -1:
        os.fstat(fd)  # which raises what a wrong one raises
    before, rank.wakeup_fd = rank.wakeup_fd, fd
    return before


def _set_interrupts(_rank: Rank, _original: Any, _number: int, _flag: Any) -> None:
    """Calls of the system are not interrupted: no signal reaches the thread of a rank."""


def _as_signal(number: int) -> int:
    try:
        return signal.Signals(number)
    except ValueError:  # one of those for real time, between the first and the last
        return number


def _set_handler(rank: Rank, _original: Any, number: int, handler: Any) -> Any:
    number = int(number)
    if not 0 < number < signal.NSIG:
        raise ValueError("signal number out of range")
    if number in _WITHOUT_HANDLER or number not in signal.valid_signals():
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    before = _handler(rank, None, number)
    rank.handlers[number] = handler
    return before


def _handler(rank: Rank, _original: Any, number: int) -> Any:
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    return rank.handlers.get(number, default)


def _pause(rank: Rank, _original: Any) -> None:
    rank.scheduler.wait_for_signal()


def _alarm(rank: Rank, _original: Any, seconds: int) -> int:
    left, _ = _set_alarm(rank, operator.index(seconds) % _UNSIGNED)
    return math.ceil(left)


def _set_timer(
    rank: Rank, original: Callable[..., Any], which: int, seconds: float, interval: float = 0.0
) -> Any:
    if which != signal.ITIMER_REAL:
        return original(which, seconds, interval)
    if seconds < 0 or interval < 0:
        raise signal.ItimerError(errno.EINVAL, os.strerror(errno.EINVAL))
    return _set_alarm(rank, seconds, interval)


def _timer(rank: Rank, original: Callable[[int], Any], which: int) -> Any:
    return original(which) if which != signal.ITIMER_REAL else _state_of_alarm(rank)


def _set_alarm(rank: Rank, seconds: float, interval: float = 0.0) -> tuple[float, float]:
    """Set a rank's timer; returns what it was."""
    state, before = _state_of_alarm(rank), rank.own_state.get(_ALARM)
    if before is not None:
        before.is_cancelled = True
    rank.own_state[_ALARM] = _Alarm(rank, round(seconds * SECOND), round(interval * SECOND))
    return state


def _state_of_alarm(rank: Rank) -> tuple[float, float]:
    alarm: _Alarm | None = rank.own_state.get(_ALARM)
    return (0.0, 0.0) if alarm is None else alarm.state


FUNCTIONS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (os, "_exit", _exit),
    (os, "abort", _abort),
    (os, "kill", _kill),
    (signal, "signal", _set_handler),
    (signal, "getsignal", _handler),
    (signal, "raise_signal", _raise_signal),
    (signal, "pthread_kill", _pthread_kill),
    (signal, "pthread_sigmask", _set_mask),
    (signal, "sigpending", _pending),
    *((signal, name, _wait) for name in ("sigwait", "sigwaitinfo", "sigtimedwait")),
    (signal, "set_wakeup_fd", _set_wakeup_fd),
    (signal, "siginterrupt", _set_interrupts),
    (signal, "alarm", _alarm),
    (signal, "pause", _pause),
    (signal, "setitimer", _set_timer),
    (signal, "getitimer", _timer),
)
"""What is replaced, and by what."""
