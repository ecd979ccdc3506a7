"""What the process's functions do while ranks run: for a rank, what they would do in its process.

Only the thread of the rank that runs is served; other threads, those that a program starts among
them, get the function itself. A child that is forked is a process of its own and finds everything
as it was.

`time.sleep` is virtual. The clocks show real time plus the virtual time that has passed, so that a
program which polls until some time of day comes to an end; or, if that is asked for, virtual time
alone. What tells the present moment without being given one (`time.ctime`, `datetime.now`) asks
them. `random` and `numpy.random` look for
the state of the rank, which starts from the world's seed and the rank's number.
"""

import atexit
import builtins
import ctypes
import errno
import gc
import io
import logging
import math
import operator
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, tzinfo
from types import FrameType, MappingProxyType
from typing import Any, NoReturn

from rankwise.base.units import SECOND, Instant
from rankwise.sim.rehearsal.belongings import ProcessBelongings
from rankwise.sim.rehearsal.places import OUR_PACKAGE
from rankwise.sim.rehearsal.scheduler import Rank, Scheduler, Timer, set_affinity

Replaced = tuple[Any, str, Any]
PICOSECONDS = 1_000
"""Per nanosecond."""
_calendar_s, _calendar_ns = time.time, time.time_ns
_CLOCKS = {
    time.CLOCK_REALTIME: "time", time.CLOCK_MONOTONIC: "monotonic",
    time.CLOCK_MONOTONIC_RAW: "monotonic", time.CLOCK_BOOTTIME: "monotonic",
}  # fmt: skip
"""What else tells the time of these clocks."""
_UNSIGNED = 1 << 32
"""What `alarm` takes is below this: C makes 4,294,967,295 of -1."""
_WITHOUT_HANDLER = (signal.SIGKILL, signal.SIGSTOP)
_WAITS_FOR_SIGNALS = ("sigwait", "sigwaitinfo", "sigtimedwait")
_RANDOM, _NUMPY_RANDOM, _EXITS = "random", "numpy.random", "atexit"
_AFFINITY, _ALARM, _RECURSION = "affinity", "alarm", "recursion limit"
_FILE_FUNCTIONS = (
    "link", "listdir", "mkdir", "remove", "rename", "replace", "rmdir", "stat", "symlink", "unlink",
)  # fmt: skip
_NUMPY_FUNCTIONS = {"seed": "seed", "sample": "random_sample", "ranf": "random_sample"}


class RankTime:
    """The time of the rank that runs.

    Args:
        scheduler: has the time of the world.
        prediction: has each rank's own time on a modelled machine, if there is one.
        is_virtual: whether clocks show virtual time alone, from 0; the calendar from its begin.
    """

    def __init__(self, scheduler: Scheduler, prediction: Any, *, is_virtual: bool) -> None:
        self.is_virtual = is_virtual
        self._scheduler = scheduler
        self._prediction = prediction

    def of(self, rank: Rank) -> int:
        """The rank's time, in picoseconds."""
        if self._prediction is None:
            return self._scheduler.now * PICOSECONDS
        time: int = self._prediction.clock_of(rank).time
        return time

    def sleep(self, rank: Rank, nanoseconds: int) -> None:
        """Let time pass for the rank that runs."""
        if self._prediction is None:
            self._scheduler.sleep(nanoseconds)
        else:
            self._prediction.clock_of(rank).sleep(self._scheduler, nanoseconds)


class _Alarm(Timer):
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
            self._rank.belongings[_ALARM] = _Alarm(self._rank, self._interval, self._interval)


class Substitutes:
    """Replaces functions of the process, and gives them back.

    Args:
        scheduler: knows the rank that runs.
        belongings: are told of a new working directory.
        seed: what random states begin from.
        cpus: where threads and processes that ranks start may run.
        time: that of the ranks.

    Attributes:
        helpers: the threads that ranks have started, by ident.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        belongings: ProcessBelongings,
        seed: int,
        cpus: set[int],
        time: RankTime,
    ) -> None:
        self._time = time
        self._policy = os.sched_getscheduler(0)
        self._scheduler = scheduler
        self._belongings = belongings
        self._seed = seed
        self._cpus = cpus
        self._replaced: list[Replaced] = []
        self._threads = threading.local()
        self.helpers: set[int] = set()
        self._variables: set[bytes] = set()
        """Of the process's environment, as C sees it: those that ranks have changed there."""

    def running(self) -> Rank | None:
        """The rank whose own thread calls this; None elsewhere."""
        rank = self._scheduler.current
        return rank if rank is not None and rank.thread.ident == threading.get_ident() else None

    def owner(self) -> Rank | None:
        """The rank that has started the calling thread, itself or by another one of its threads."""
        return getattr(self._threads, "rank", None)

    def install(self) -> None:
        """Replace everything."""
        self._environment = dict(os.environb)
        self._first_recursion_limit = self._highest_recursion_limit = sys.getrecursionlimit()
        table: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
            (time, "sleep", self._sleep),
            *((time, name, self._later_s) for name in ("time", "monotonic", "perf_counter")),
            *(
                (time, f"{name}_ns", self._later_ns)
                for name in ("time", "monotonic", "perf_counter")
            ),
            *((time, name, self._of_clock) for name in ("clock_gettime", "clock_gettime_ns")),
            *((time, name, self._of_now) for name in ("ctime", "gmtime", "localtime")),
            *((time, name, self._of_local_time) for name in ("asctime", "strftime")),
            (datetime, "now", self._now),
            (datetime, "utcnow", self._utcnow),
            (os, "_exit", self._exit),
            (os, "abort", self._abort),
            (os, "kill", self._kill),
            (os, "chdir", self._chdir),
            (os, "sched_getaffinity", self._affinity),
            (os, "sched_setaffinity", self._set_affinity),
            (os, "putenv", self._noting_variable),
            (os, "unsetenv", self._noting_variable),
            (signal, "signal", self._signal),
            (signal, "getsignal", self._getsignal),
            (signal, "raise_signal", self._raise_signal),
            (signal, "pthread_kill", self._pthread_kill),
            (signal, "pthread_sigmask", self._sigmask),
            (signal, "sigpending", self._sigpending),
            *((signal, name, self._sigwait) for name in _WAITS_FOR_SIGNALS),
            (signal, "set_wakeup_fd", self._set_wakeup_fd),
            (signal, "siginterrupt", self._siginterrupt),
            (signal, "alarm", self._alarm),
            (signal, "pause", self._pause),
            (signal, "setitimer", self._setitimer),
            (signal, "getitimer", self._getitimer),
            (threading, "main_thread", self._main_thread),
            (threading, "_start_new_thread", self._start_thread),
            (subprocess, "_fork_exec", self._fork_exec),
            (atexit, "register", self._register),
            (sys, "breakpointhook", self._breakpoint),
            (sys, "setrecursionlimit", self._set_recursion_limit),
            (sys, "getrecursionlimit", self._recursion_limit),
        )
        for owner, name, make in table:
            self._replace(owner, name, make(_found(owner, name)))
        shared = random._inst  # noqa: SLF001  # it has no other name
        self._follow(random, shared, _RANDOM, random.Random)

    def uninstall(self) -> None:
        """Give everything back."""
        while self._replaced:
            owner, name, original = self._replaced.pop()
            _put(owner, name, original)
        sys.setrecursionlimit(self._first_recursion_limit)
        for variable in sorted(self._variables):
            if (text := self._environment.get(variable)) is None:
                os.unsetenv(variable)
            else:
                os.putenv(variable, text)

    def yield_at_files(self) -> None:
        """Let other ranks run before a rank touches a file: an order that a schedule decides."""
        for name in _FILE_FUNCTIONS:
            self._replace(os, name, self._yielding(getattr(os, name)))
        for owner in (builtins, io):
            self._replace(owner, "open", self._yielding(io.open))

    def follow_numpy(self) -> None:
        """Give each rank its own `numpy.random`, once that has been imported."""
        module = sys.modules["numpy.random"]
        shared = sys.modules["numpy.random.mtrand"]._rand  # noqa: SLF001  # the same

        def state(seed: str) -> Any:
            return module.RandomState(_digest(seed))

        self._follow(module, shared, _NUMPY_RANDOM, state, _NUMPY_FUNCTIONS)

    def seed_of(self, rank: Rank) -> int:
        """A seed for other random states of a rank."""
        return seeds_of(rank.number, self._seed)[2]

    def run_exit_functions(self, rank: Rank) -> None:
        """Call what the rank's program has registered with `atexit`, the last one first."""
        functions = rank.belongings.pop(_EXITS, [])
        while functions:
            function, args, kwargs = functions.pop()
            function(*args, **kwargs)

    def unpin(self) -> None:
        """Let the calling thread run where the rank wants to again; see `Scheduler.pin`."""
        rank = self._scheduler.current
        set_affinity(0, self._cpus if rank is None else self._wanted_by(rank))
        if os.sched_getscheduler(0) == os.SCHED_BATCH != self._policy:
            os.sched_setscheduler(0, self._policy, os.sched_param(0))

    def _replace(self, owner: Any, name: str, substitute: Any) -> None:
        self._replaced.append((owner, name, _found(owner, name)))
        _put(owner, name, substitute)

    def _follow(
        self,
        module: Any,
        shared: Any,
        key: str,
        make: Callable[[str], Any],
        functions: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Replace each function of `module` that is a method of `shared` by one of the rank's.

        `functions` are those that only call such a method, and which.
        """

        def following(name: str, method: Any) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                rank = self.running()
                if rank is None:
                    return method(*args, **kwargs)
                state = rank.belongings.get(key)
                if state is None:
                    state = rank.belongings[key] = make(f"{self._seed}/{key}/{rank.number}")
                return getattr(state, name)(*args, **kwargs)

            call.__name__, call.__doc__ = name, method.__doc__
            return call

        for name, value in list(vars(module).items()):
            if getattr(value, "__self__", None) is shared:
                self._replace(module, name, following(value.__name__, value))
            elif name in functions:
                self._replace(module, name, following(functions[name], value))

    def _sleep(self, original: Callable[[float], None]) -> Callable[[float], None]:
        def sleep(seconds: float) -> None:
            rank = self.running()
            if rank is None:
                original(seconds)
            elif seconds < 0:
                raise ValueError("sleep length must be non-negative")
            else:
                self._time.sleep(rank, round(seconds * SECOND))  # why: virtual time

        return sleep

    def _later_s(self, original: Callable[[], float]) -> Callable[[], float]:
        if not self._time.is_virtual:
            return lambda: original() + self._scheduler.now / SECOND
        begin = original() if original is _calendar_s else 0.0

        def virtual() -> float:
            rank = self.running()
            return original() if rank is None else begin + self._time.of(rank) / 1e12

        return virtual

    def _later_ns(self, original: Callable[[], int]) -> Callable[[], int]:
        if not self._time.is_virtual:
            return lambda: original() + self._scheduler.now
        begin = original() if original is _calendar_ns else 0

        def virtual() -> int:
            rank = self.running()
            return original() if rank is None else begin + self._time.of(rank) // PICOSECONDS

        return virtual

    def _of_clock(self, original: Callable[[int], Any]) -> Callable[[int], Any]:
        suffix = original.__name__.removeprefix("clock_gettime")

        def tell(clock: int) -> Any:
            name = _CLOCKS.get(clock) if self.running() is not None else None
            return original(clock) if name is None else getattr(time, name + suffix)()

        return tell

    def _of_now(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def tell(seconds: float | None = None, /) -> Any:
            is_ours = seconds is None and self.running() is not None
            return original(time.time() if is_ours else seconds)

        return tell

    def _of_local_time(self, original: Callable[..., str]) -> Callable[..., str]:
        count = 2 if original.__name__ == "strftime" else 1

        def tell(*words: Any) -> str:
            if len(words) == count - 1 and self.running() is not None:
                words = (*words, time.localtime())
            return original(*words)

        return tell

    def _now(self, original: Any) -> Any:
        def now(kind: type[datetime], tz: tzinfo | None = None) -> datetime:
            if self.running() is None:
                told: datetime = original.__get__(None, kind)(tz)
                return told
            return kind.fromtimestamp(time.time(), tz)

        return classmethod(now)

    def _utcnow(self, original: Any) -> Any:
        def utcnow(kind: type[datetime]) -> datetime:
            if self.running() is None:
                told: datetime = original.__get__(None, kind)()
                return told
            return kind.fromtimestamp(time.time(), UTC).replace(tzinfo=None)

        return classmethod(utcnow)

    def _exit(self, original: Callable[[int], NoReturn]) -> Callable[[int], None]:
        def exit_rank(status: int) -> None:
            rank = self.running()
            if rank is None:
                original(status)
            else:
                rank.end(status & 0xFF)

        return exit_rank

    def _abort(self, original: Callable[[], NoReturn]) -> Callable[[], None]:
        def abort() -> None:
            rank = self.running()
            if rank is None:
                original()
            else:
                rank.end(-signal.SIGABRT)

        return abort

    def _kill(self, original: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def kill(pid: int, number: int) -> None:
            rank = self.running()
            if rank is None or pid != os.getpid() or not number:
                original(pid, number)
            else:
                rank.signal(int(number))
                rank.take_signals()

        return kill

    def _raise_signal(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def raise_signal(number: int) -> None:
            rank = self.running()
            if rank is None:
                original(number)
            else:
                rank.signal(int(number))
                rank.take_signals()

        return raise_signal

    def _pthread_kill(self, original: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def kill(thread: int, number: int) -> None:
            rank = self.running()
            if rank is None or thread != rank.thread.ident or not number:
                original(thread, number)
            else:
                rank.signal(int(number))
                rank.take_signals()

        return kill

    def _sigmask(self, original: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
        def change(how: int, mask: Any) -> Any:
            rank = self.running()
            if rank is None:
                return original(how, mask)
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
            return _named_signals(before)

        return change

    def _sigpending(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def pending() -> Any:
            rank = self.running()
            return original() if rank is None else _named_signals(rank.pending)

        return pending

    def _sigwait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_info = original.__name__ != "sigwait"

        def wait(numbers: Any, *timeout: float) -> Any:
            rank = self.running()
            if rank is None:
                return original(numbers, *timeout)
            if timeout and timeout[0] < 0:
                raise ValueError("timeout must be non-negative")
            until = Instant(self._scheduler.now + round(timeout[0] * SECOND)) if timeout else None
            number = self._scheduler.wait_for_pending(frozenset(map(int, numbers)), until)
            if number is None:
                return None
            if is_info:
                return signal.struct_siginfo((number, 0, 0, os.getpid(), os.getuid(), 0, 0))
            return _named_signal(number)

        return wait

    def _set_wakeup_fd(self, original: Callable[..., int]) -> Callable[..., int]:
        def set_fd(fd: int, *, warn_on_full_buffer: bool = True) -> int:
            rank = self.running()
            if rank is None:
                return original(fd, warn_on_full_buffer=warn_on_full_buffer)
            if fd != -1:
                os.fstat(fd)  # which raises what a wrong one raises
            before, rank.wakeup_fd = rank.wakeup_fd, fd
            return before

        return set_fd

    def _siginterrupt(self, original: Callable[[int, bool], None]) -> Callable[[int, bool], None]:
        """Calls of the system are not interrupted: no signal reaches the thread of a rank."""

        def set_interrupt(number: int, flag: bool) -> None:
            if self.running() is None:
                original(number, flag)

        return set_interrupt

    def _recursion_limit(self, original: Callable[[], int]) -> Callable[[], int]:
        def get() -> int:
            rank = self.running()
            if rank is None:
                return original()
            limit: int = rank.belongings.get(_RECURSION, self._first_recursion_limit)
            return limit

        return get

    def _set_recursion_limit(self, original: Callable[[int], None]) -> Callable[[int], None]:
        """Note a rank's limit: the process has the highest of all, as others may be deeper."""

        def put(limit: int) -> None:
            rank = self.running()
            if rank is None:
                original(limit)
                return
            original(max(limit, self._highest_recursion_limit))
            self._highest_recursion_limit = max(limit, self._highest_recursion_limit)
            rank.belongings[_RECURSION] = limit

        return put

    def _signal(self, original: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
        def set_handler(number: int, handler: Any) -> Any:
            rank = self.running()
            if rank is None:
                return original(number, handler)
            number = int(number)
            if not 0 < number < signal.NSIG:
                raise ValueError("signal number out of range")
            if number in _WITHOUT_HANDLER or number not in signal.valid_signals():
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            before = rank.handlers.get(number, _default_handler(number))
            rank.handlers[number] = handler
            return before

        return set_handler

    def _getsignal(self, original: Callable[[int], Any]) -> Callable[[int], Any]:
        def get_handler(number: int) -> Any:
            rank = self.running()
            if rank is None:
                return original(number)
            return rank.handlers.get(number, _default_handler(number))

        return get_handler

    def _alarm(self, original: Callable[[int], int]) -> Callable[[int], int]:
        def alarm(seconds: int) -> int:
            rank = self.running()
            if rank is None:
                return original(seconds)
            left, _ = self._set_alarm(rank, operator.index(seconds) % _UNSIGNED)
            return math.ceil(left)

        return alarm

    def _pause(self, original: Callable[[], None]) -> Callable[[], None]:
        def pause() -> None:
            if self.running() is None:
                original()
            else:
                self._scheduler.wait_for_signal()

        return pause

    def _setitimer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def setitimer(which: int, seconds: float, interval: float = 0.0) -> Any:
            rank = self.running()
            if rank is None or which != signal.ITIMER_REAL:
                return original(which, seconds, interval)
            if seconds < 0 or interval < 0:
                raise signal.ItimerError(errno.EINVAL, os.strerror(errno.EINVAL))
            return self._set_alarm(rank, seconds, interval)

        return setitimer

    def _getitimer(self, original: Callable[[int], Any]) -> Callable[[int], Any]:
        def getitimer(which: int) -> Any:
            rank = self.running()
            if rank is None or which != signal.ITIMER_REAL:
                return original(which)
            alarm: _Alarm | None = rank.belongings.get(_ALARM)
            return (0.0, 0.0) if alarm is None else alarm.state

        return getitimer

    @staticmethod
    def _set_alarm(rank: Rank, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        """Set a rank's timer; returns what it was."""
        before: _Alarm | None = rank.belongings.get(_ALARM)
        state = (0.0, 0.0) if before is None else before.state
        if before is not None:
            before.is_cancelled = True
        nanoseconds = round(seconds * SECOND), round(interval * SECOND)
        rank.belongings[_ALARM] = _Alarm(rank, *nanoseconds)
        return state

    def _chdir(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def chdir(path: Any) -> None:
            original(path)
            if self.running() is not None:
                self._belongings.directory_changed()

        return chdir

    def _affinity(self, original: Callable[[int], set[int]]) -> Callable[[int], set[int]]:
        def get(pid: int) -> set[int]:
            rank = self.running()
            if rank is None or pid not in {0, os.getpid()}:
                return original(pid)
            return set(self._wanted_by(rank))

        return get

    def _wanted_by(self, rank: Rank) -> set[int]:
        cpus: set[int] = rank.belongings.get(_AFFINITY, self._cpus)
        return cpus

    def _set_affinity(self, original: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
        """Note where a rank wants to run: all of them take turns on one core."""

        def put(pid: int, mask: Any) -> None:
            rank = self.running()
            if rank is None or pid not in {0, os.getpid()}:
                original(pid, mask)
                return
            wanted = self._cpus.intersection(mask)
            if not wanted:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            rank.belongings[_AFFINITY] = wanted

        return put

    def _breakpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def breakpoint_hook(*args: Any, **kwargs: Any) -> Any:
            rank = self.running()
            if rank is None or os.environ.get("PYTHONBREAKPOINT"):
                return original(*args, **kwargs)
            from rankwise.sim.rehearsal.debugger import stop_in  # noqa: PLC0415  # rare, and slow

            return stop_in(rank, sys._getframe(1))  # noqa: SLF001  # as pdb does

        return breakpoint_hook

    def follow_pdb(self) -> None:
        """Have `pdb.set_trace` do the same as `breakpoint`."""
        pdb = sys.modules["pdb"]
        self._replace(pdb, "set_trace", self._set_trace(pdb.set_trace))

    def _set_trace(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_trace(**options: Any) -> Any:
            rank = self.running()
            if rank is None:
                return original(**options)
            from rankwise.sim.rehearsal.debugger import stop_in  # noqa: PLC0415  # rare, and slow

            return stop_in(rank, sys._getframe(1))  # noqa: SLF001  # as pdb does

        return set_trace

    def _main_thread(
        self, original: Callable[[], threading.Thread]
    ) -> Callable[[], threading.Thread]:
        def main_thread() -> threading.Thread:
            rank = self._scheduler.current
            return original() if rank is None else rank.thread

        return main_thread

    def _register(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def register(function: Any, /, *args: Any, **kwargs: Any) -> Any:
            rank = self.running()
            caller = sys._getframe(1).f_globals.get("__name__")  # noqa: SLF001  # whose process it is
            if rank is None or caller not in self._belongings.module_names(rank):
                return original(function, *args, **kwargs)
            rank.belongings.setdefault(_EXITS, []).append((function, args, kwargs))
            return function

        return register

    def _unpinned(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Call `original` with the affinity of before: what it starts inherits that."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.running() is None:
                return original(*args, **kwargs)
            with self._anywhere():
                return original(*args, **kwargs)

        return call

    def _start_thread(self, original: Callable[..., int]) -> Callable[..., int]:
        """Start threads unpinned, and know whose they are."""
        start = self._unpinned(original)

        def start_thread(function: Any, args: Any, *more: Any) -> int:
            rank = self.running() or self.owner()
            if rank is None:
                return original(function, args, *more)

            def live(*words: Any, **options: Any) -> None:
                self._threads.rank = rank
                self.helpers.add(threading.get_ident())
                try:
                    function(*words, **options)
                finally:
                    self.helpers.discard(threading.get_ident())

            return int(start(live, args, *more))

        return start_thread

    def _fork_exec(self, original: Callable[..., int]) -> Callable[..., int]:
        """Start processes unpinned, with the environment of the rank."""
        start = self._unpinned(original)

        def fork_exec(*args: Any) -> int:
            if self.running() is not None and args[5] is None:
                variables = [name + b"=" + text for name, text in os.environb.items()]
                args = (*args[:5], variables, *args[6:])
            return int(start(*args))

        return fork_exec

    def _noting_variable(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(name: bytes, *text: bytes) -> None:
            self._variables.add(os.fsencode(name))
            original(name, *text)

        return call

    def _yielding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.running() is not None and _is_in_program(sys._getframe(1)):  # noqa: SLF001  # whose call it is
                self._scheduler.yield_to_others()
            return original(*args, **kwargs)

        return call

    @contextmanager
    def _anywhere(self) -> Iterator[None]:
        self.unpin()
        try:
            yield
        finally:
            self._scheduler.pin()


def _found(owner: Any, name: str) -> Any:
    return vars(owner)[name] if owner is datetime else getattr(owner, name)


def _put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, also of `datetime`: C has made it, so Python refuses.

    Another class in its place would not do: objects that C makes would be none of it.
    """
    if owner is not datetime:
        setattr(owner, name, value)
        return
    (namespace,) = gc.get_referents(vars(owner))
    namespace[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


def seeds_of(rank: int, seed: int = 0) -> tuple[str, int, int]:
    """What the unseeded states of `random`, `numpy.random` and torch begin from."""
    return (
        f"{seed}/{_RANDOM}/{rank}",
        _digest(f"{seed}/{_NUMPY_RANDOM}/{rank}"),
        _digest(f"{seed}/{rank}"),
    )


def _is_in_program(frame: FrameType | None) -> bool:
    """Whether a file is touched by the program: not by rankwise, an import, or `logging`.

    The last two hold a lock meanwhile, and the next rank with the baton may want it.
    """
    if frame is not None and frame.f_code.co_filename.startswith(OUR_PACKAGE):
        return False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib") or file == logging.__file__:
            return False
        frame = frame.f_back
    return True


def _named_signal(number: int) -> int:
    try:
        return signal.Signals(number)
    except ValueError:  # one of those for real time, between the first and the last
        return number


def _named_signals(numbers: Iterable[int]) -> set[int]:
    return set(map(_named_signal, numbers))


def _default_handler(number: int) -> Any:
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def _digest(seed: str) -> int:
    """A number that numpy takes as a seed."""
    return random.Random(seed).getrandbits(32)  # noqa: S311  # simulation, no secret
