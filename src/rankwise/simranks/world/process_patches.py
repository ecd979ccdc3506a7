"""What the process's functions do while ranks run: for a rank, what they would do in its process.

Only the thread that has the run token is served; other threads get the function itself, those that
a program starts too, while they have no turn. A child that is forked is a process of its own and
finds everything as it was.

`time.sleep` is virtual. The clocks show real time plus the virtual time that has passed, so that a
program which polls until some time of day comes to an end; or, if that is asked for, virtual time
alone. Functions that tell the present moment without being given one (`time.ctime`, `datetime.now`)
asks them. `random` and `numpy.random` look for the state of the rank, which starts from the world's
seed and the rank's number.
"""

import _thread
import atexit
import builtins
import ctypes
import errno
import gc
import io
import logging
import os
import random
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, tzinfo
from threading import get_ident
from types import FrameType, MappingProxyType
from typing import Any

from rankwise.base.units import SECOND
from rankwise.simranks.world import environments, rank_time, signal_calls, turn_takers
from rankwise.simranks.world.per_rank_state import ProcessState
from rankwise.simranks.world.places import OUR_PACKAGE
from rankwise.simranks.world.rank_time import PICOSECONDS, RankTime
from rankwise.simranks.world.ranks import Rank, RankEnded
from rankwise.simranks.world.scheduler import Scheduler, set_affinity
from rankwise.simranks.world.threads import Threads

Replaced = tuple[Any, str, Any]
_CALENDAR = (time.time, time.time_ns)
_RANDOM, _NUMPY_RANDOM, _EXITS = "random", "numpy.random", "atexit"
_AFFINITY, _RECURSION = "affinity", "recursion limit"
_START_THREAD = "_start_joinable_thread" if sys.version_info >= (3, 13) else "_start_new_thread"
_FILE_FUNCTIONS = (
    "link", "listdir", "mkdir", "remove", "rename", "replace", "rmdir", "stat", "symlink", "unlink",
)  # fmt: skip
_NUMPY_FUNCTIONS = {"seed": "seed", "sample": "random_sample", "ranf": "random_sample"}


_VARIABLES, _OUTPUTS = 5, (9, 11)
"""Places among the arguments of `_posixsubprocess.fork_exec`: env, c2pwrite and errwrite."""


def _no_pipes(_rank: int) -> None:
    """Children write where the process does."""


class ProcessPatches:
    """Replaces functions of the process, and gives them back.

    Args:
        scheduler: knows the rank that runs.
        own_state: are told of a new working directory.
        seed: what random states begin from.
        cpus: where threads and processes that ranks start may run.
        time: that of the ranks.

    Attributes:
        is_own: whether a rank has another file at a standard descriptor than the process.
        pipes_for_children: where children of a rank write what is for descriptors 1 and 2; None
            for these descriptors themselves.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        own_state: ProcessState,
        seed: int,
        cpus: set[int],
        time: RankTime,
    ) -> None:
        self._time = time
        self._policy = os.sched_getscheduler(0)
        self._scheduler = scheduler
        self._own_state = own_state
        self._seed = seed
        self._cpus = cpus
        self._replaced: list[Replaced] = []
        self._threads = Threads(scheduler.turns)
        self.is_own: Callable[[Rank, int], bool] = lambda _rank, _number: False
        self.pipes_for_children: Callable[[int], tuple[int, int] | None] = _no_pipes
        self._variables: set[bytes] = set()
        """Of the process's environment, as C sees it: those that ranks have changed there."""

    def running(self) -> Rank | None:
        """The rank whose thread calls this and has the token; None elsewhere."""
        strand = self._scheduler.holder
        return strand.rank if strand is not None and strand.ident == get_ident() else None

    def owner(self) -> Rank | None:
        """The rank that has started the calling thread, itself or by another one of its threads."""
        strand = self._scheduler.helpers.get(get_ident())
        return None if strand is None else strand.rank

    def install(self, *more: tuple[Any, str, Callable[..., Any]]) -> None:
        """Replace everything, and `more`: of an object, by name, what serves a rank instead."""
        self._environment = dict(os.environb)
        self._first_recursion_limit = self._highest_recursion_limit = sys.getrecursionlimit()
        of_ranks: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            *rank_time.FUNCTIONS,
            (time, "sleep", self._time.sleep_for),
            *signal_calls.FUNCTIONS,
            *more,
            (os, "chdir", self._chdir),
            (os, "sched_getaffinity", self._affinity),
            (os, "sched_setaffinity", self._set_affinity),
            (atexit, "register", self._register),
            (sys, "breakpointhook", _breakpoint),
            (sys, "setrecursionlimit", self._set_recursion_limit),
            (sys, "getrecursionlimit", self._recursion_limit),
        )
        clocks = ("time", "monotonic", "perf_counter")
        table: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
            *((owner, name, self._for_ranks(serve)) for owner, name, serve in of_ranks),
            # Virtual time is added to real time, unless ranks are told virtual time alone.
            *((time, f"{name}{unit}", self._later) for name in clocks for unit in ("", "_ns")),
            (datetime, "now", self._now),
            (datetime, "utcnow", self._utcnow),
            (os, "putenv", self._noting_variable),
            (os, "unsetenv", self._noting_variable),
            (threading, "main_thread", self._main_thread),
            (threading, _START_THREAD, self._start_thread),
            (_thread, "start_new_thread", self._start_thread),
            (subprocess, "_fork_exec", self._fork_exec),
            *self._threads.patches,
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
        yielding = self._for_ranks(self._yielding)
        for name in _FILE_FUNCTIONS:
            self._replace(os, name, yielding(getattr(os, name)))
        for owner in (builtins, io):
            self._replace(owner, "open", yielding(io.open))

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

    def join_threads(self, rank: Rank) -> None:
        """Wait for the threads of a rank whose program is over, unless they are daemons."""
        self._threads.join_at_end(rank)

    def run_exit_functions(self, rank: Rank) -> None:
        """Call what the rank's program has registered with `atexit`, the last one first.

        One that raises is told as Python tells of it, and changes no exit code.
        """
        functions = rank.own_state.pop(_EXITS, [])
        while functions:
            function, args, kwargs = functions.pop()
            try:
                function(*args, **kwargs)
            except RankEnded:
                raise
            except BaseException as error:  # noqa: BLE001  # Python goes on after any
                step = error.__traceback__
                told = traceback.format_exception(error.with_traceback(step and step.tb_next))
                print(  # noqa: T201  # into the output of the rank
                    f"Exception ignored in atexit callback: {function!r}\n{''.join(told)}",
                    end="",
                    file=sys.stderr,
                )

    def unpin(self) -> None:
        """Let the calling thread run where the rank wants to again; see `Scheduler.pin`."""
        rank = self._scheduler.current
        set_affinity(0, self._cpus if rank is None else self._wanted_by(rank))
        if os.sched_getscheduler(0) == os.SCHED_BATCH != self._policy:
            os.sched_setscheduler(0, self._policy, os.sched_param(0))

    def _replace(self, owner: Any, name: str, substitute: Any) -> None:
        self._replaced.append((owner, name, _found(owner, name)))
        _put(owner, name, substitute)

    def _for_ranks(self, serve: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
        """What makes a substitute of a function: a rank's call goes to `serve(rank, function, …)`.

        The caller of the substitute is two frames above `serve`.
        """

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                rank = self.running()
                if rank is None:
                    return original(*args, **kwargs)
                return serve(rank, original, *args, **kwargs)

            return call

        return make

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
                state = rank.own_state.get(key)
                if state is None:  # most ranks draw no number, and a state takes kilobytes
                    state = rank.own_state[key] = make(f"{self._seed}/{key}/{rank.number}")
                return getattr(state, name)(*args, **kwargs)

            call.__name__, call.__doc__ = name, method.__doc__
            return call

        for name, value in list(vars(module).items()):
            if getattr(value, "__self__", None) is shared:
                self._replace(module, name, following(value.__name__, value))
            elif name in functions:
                self._replace(module, name, following(functions[name], value))

    def _later(self, original: Callable[[], Any]) -> Callable[[], Any]:
        """A clock in seconds, or of integers in nanoseconds."""
        is_ns = original.__name__.endswith("_ns")
        if not self._time.is_virtual:
            if is_ns:
                return lambda: original() + self._scheduler.now
            return lambda: original() + self._scheduler.now / SECOND
        begin = original() if original in _CALENDAR else 0

        def virtual() -> Any:
            rank = self.running()
            if rank is None:
                return original()
            now = self._time.of(rank)
            return begin + (now // PICOSECONDS if is_ns else now / 1e12)

        return virtual

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

    def _chdir(self, _rank: Rank, original: Callable[[Any], None], path: Any) -> None:
        original(path)
        self._own_state.directory_changed()

    def _affinity(self, rank: Rank, original: Callable[[int], set[int]], pid: int) -> set[int]:
        return set(self._wanted_by(rank)) if pid in {0, os.getpid()} else original(pid)

    def _wanted_by(self, rank: Rank) -> set[int]:
        cpus: set[int] = rank.own_state.get(_AFFINITY, self._cpus)
        return cpus

    def _set_affinity(
        self, rank: Rank, original: Callable[[int, Any], None], pid: int, mask: Any
    ) -> None:
        """Note where a rank wants to run: all of them take turns on one core."""
        if pid not in {0, os.getpid()}:
            original(pid, mask)
            return
        wanted = self._cpus.intersection(mask)
        if not wanted:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        rank.own_state[_AFFINITY] = wanted

    def _recursion_limit(self, rank: Rank, _original: Any) -> int:
        limit: int = rank.own_state.get(_RECURSION, self._first_recursion_limit)
        return limit

    def _set_recursion_limit(self, rank: Rank, original: Callable[[int], None], limit: int) -> None:
        """Note a rank's limit: the process has the highest of all, as others may be deeper."""
        if limit < 1:
            original(limit)  # which refuses it
        original(max(limit, self._highest_recursion_limit))
        self._highest_recursion_limit = max(limit, self._highest_recursion_limit)
        rank.own_state[_RECURSION] = limit

    def follow_pdb(self) -> None:
        """Have `pdb.set_trace` do the same as `breakpoint`."""
        pdb = sys.modules["pdb"]
        self._replace(pdb, "set_trace", self._for_ranks(_set_trace)(pdb.set_trace))

    def _main_thread(
        self, original: Callable[[], threading.Thread]
    ) -> Callable[[], threading.Thread]:
        def main_thread() -> threading.Thread:
            rank = self._scheduler.current
            return original() if rank is None else rank.thread

        return main_thread

    def _register(
        self, rank: Rank, original: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        caller = sys._getframe(2).f_globals.get("__name__")  # noqa: SLF001  # whose process it is
        if caller not in self._own_state.module_names(rank):
            return original(function, *args, **kwargs)
        rank.own_state.setdefault(_EXITS, []).append((function, args, kwargs))
        return function

    def _unpinned(
        self, _rank: Rank, original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call `original` with the affinity of before: what it starts inherits that."""
        self.unpin()
        try:
            return original(*args, **kwargs)
        finally:
            self._scheduler.pin()

    def _start_thread(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Start threads unpinned, and know whose they are."""
        start = self._for_ranks(self._unpinned)(original)

        def start_thread(function: Any, *more: Any, **how: Any) -> Any:
            rank = self.running() or self.owner()
            if rank is None:
                return original(function, *more, **how)

            thread = getattr(function, "__self__", None)
            thread = thread if isinstance(thread, threading.Thread) else None
            # A rank that calls the agents may begin another one, which is no thread of its own.
            if any(thread is each.thread for each in self._scheduler.ranks.values()):
                return original(function, *more, **how)
            if thread is not None and not thread.daemon:
                how = _not_waited_for(thread, how)

            def live(*words: Any, **options: Any) -> None:
                strand = self._scheduler.turns.begin_thread(rank, thread)
                try:
                    function(*words, **options)
                finally:
                    self._threads.end(strand)

            turn_takers.begin(self._scheduler.turns)
            environments.begin(self._scheduler, self._own_state)
            with self._scheduler.turns.starting_thread():
                return start(live, *more, **how)

        return start_thread

    def _fork_exec(self, original: Callable[..., int]) -> Callable[..., int]:
        """Start processes unpinned, with the environment and the output of the rank."""
        start = self._for_ranks(self._unpinned)(original)

        def fork_exec(*args: Any) -> int:
            words = list(args)
            is_of_rank = self.running() is not None or self.owner() is not None
            if is_of_rank and words[_VARIABLES] is None:
                words[_VARIABLES] = [name + b"=" + text for name, text in os.environb.items()]
            rank = self.owner() or self._scheduler.current
            pipes = None if rank is None else self.pipes_for_children(rank.number)
            if pipes is not None and rank is not None:
                for place, pipe, number in zip(_OUTPUTS, pipes, (1, 2), strict=True):
                    # Minus one leaves it the rank's own descriptor; `stderr=STDOUT` alone says 1.
                    if words[place] in (-1, 1) and not self.is_own(rank, number):
                        words[place] = pipes[0] if words[place] == 1 else pipe
            return int(start(*words))

        return fork_exec

    def _noting_variable(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(name: bytes, *text: bytes) -> None:
            self._variables.add(os.fsencode(name))
            original(name, *text)

        return call

    def _yielding(
        self, _rank: Rank, original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if _is_in_program(sys._getframe(2)):  # noqa: SLF001  # whose call it is
            self._scheduler.yield_to_others()
        return original(*args, **kwargs)


def _not_waited_for(thread: threading.Thread, how: dict[str, Any]) -> dict[str, Any]:
    """Have Python not wait for a thread at its end: its rank does, and may be killed before."""
    if "daemon" in how:  # since Python 3.13
        return {**how, "daemon": True}
    register: Callable[[], None] = thread._set_tstate_lock  # type: ignore[attr-defined]  # noqa: SLF001  # it registers the others

    def register_as_daemon() -> None:
        del thread._set_tstate_lock  # type: ignore[attr-defined]  # noqa: SLF001  # the same
        thread._daemonic = True  # type: ignore[attr-defined]  # noqa: SLF001  # the same
        register()
        thread._daemonic = False  # type: ignore[attr-defined]  # noqa: SLF001  # the same

    thread._set_tstate_lock = register_as_daemon  # type: ignore[attr-defined]  # noqa: SLF001  # the same
    return how


def _breakpoint(rank: Rank, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if os.environ.get("PYTHONBREAKPOINT"):
        return original(*args, **kwargs)
    from rankwise.simranks.world.debugger import stop_in  # noqa: PLC0415  # rare, and slow

    return stop_in(rank, sys._getframe(2))  # noqa: SLF001  # as pdb does


def _set_trace(rank: Rank, _original: Callable[..., Any], /, **_options: Any) -> Any:
    from rankwise.simranks.world.debugger import stop_in  # noqa: PLC0415  # rare, and slow

    return stop_in(rank, sys._getframe(2))  # noqa: SLF001  # as pdb does


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

    The last two hold a lock meanwhile, and the next rank with the token may want it.
    """
    if frame is not None and frame.f_code.co_filename.startswith(OUR_PACKAGE):
        return False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib") or file == logging.__file__:
            return False
        frame = frame.f_back
    return True


def _digest(seed: str) -> int:
    """A number that numpy takes as a seed."""
    return random.Random(seed).getrandbits(32)  # noqa: S311  # simulation, no secret
