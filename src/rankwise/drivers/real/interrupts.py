"""Signal handlers of the program wait while our own bookkeeping is in the middle of something.

Python runs a signal's handler between two byte codes of the main thread, wherever that is. A
handler that raises (Ctrl-C, a time-out by alarm) tears whatever it comes into: words that were read
from a pipe and are then lost, a task that was queued and never sent. Code that feeds a machine
therefore shuts the *gate*:

    call of ours                 shut    a handler that is due waits
      the user's function        open    handlers run at once, wherever they hit
        a call of ours in there  shut    until it returns
      a wait                     shut    a handler ends the wait, and runs when all that was read
                                         has been taken in
    back in the program          open    handlers that are due run first

*Replaced.* From the first user of the gate to the last (a tree of chip workers is one while it is
initialised, a gang while it runs), each handler that is a Python callable is replaced by a keeper,
which calls it when the gate is open, and else notes that it is due. To replace and put back at each
call would take a tenth of the time of a small task. To the program, `signal.getsignal` gives the
keeper, so that `asyncio.run` leaves Ctrl-C to it, as Python 3.10 did. A keeper that is put back
after its time is the handler that it stands for.

*Waits.* A wait sleeps in one system call; a keeper calls the gate's *waker*, which makes the call
return. The waker is set before the wait looks whether something is due, so no handler comes between
the two unseen.

*Threads.* Python runs handlers in the main thread only. So the main thread has one gate, which
calls inside of calls share, and every other thread one that is always open.

*What a handler raised* in the user's code must not be taken for what that code raised:
`came_from_handler` tells. *Where an exception goes nowhere*, since Python calls us when an object
ends, no handler runs: `without_handlers` sends the signal again.

*What is an instant.* CPython looks for signals after calls into C, at the beginning of functions
and at the end of loops. An assignment is none of these, nor is the first one in a `finally`: they
open and shut the gate.

Refused: blocking signals in the kernel (a thread of a library takes the signal, and the main thread
runs the handler all the same; two system calls each time); raising at waits only (the user's own
loop could not be interrupted any more); a helper thread for the bookkeeping (10 us per task);
mending what was torn by asking the children (each start and each end is told once).
"""

import _signal  # type: ignore[import-not-found]  # `signal` makes an enum each time: 2 us
import _thread
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from types import CodeType, FrameType
from typing import Any

_CATCHABLE = tuple(
    number
    for number in sorted(_signal.valid_signals())
    if number < _signal.SIGRTMIN
    and number
    not in {
        # Not to be caught, or the fault of what runs right now.
        *(_signal.SIGKILL, _signal.SIGSTOP, _signal.SIGSEGV, _signal.SIGBUS, _signal.SIGILL),
        *(_signal.SIGFPE, _signal.SIGTRAP, _signal.SIGABRT, _signal.SIGSYS),
    }
)
_ASKING = (
    *(_signal.SIGINT, _signal.SIGALRM, _signal.SIGTERM),
    *(_signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2),
)
"""Those that ask a program for something, or limit its time. To look at each costs 25 ns."""
_handler_of: Callable[[int], Any] = _signal.getsignal
_install: Callable[[int, Any], Any] = _signal.signal
_MARK = "_raised_by_signal_handler"
_SEND_AGAIN_S = 0.01


class _Keeper:
    """Replaces a handler of the program, and defers it while the gate is shut."""

    __slots__ = ("gate", "handler")

    def __init__(self, gate: "HandlerGate", handler: Any) -> None:
        self.gate = gate
        self.handler = handler

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        gate = self.gate
        if not gate.is_shut and not _is_without_handlers(frame):
            gate.due.pop(signum, None)
            _call(self.handler, signum, frame)
            return
        due = gate.later if gate.is_patient else gate.due
        due[signum] = self.handler
        if not gate.is_shut:
            _thread.start_new_thread(_send_until_handled, (gate,))
        elif gate.waker is not None and not gate.is_patient:
            # Python begins the system call of a wait again after a handler that did not raise.
            try:
                gate.waker()
            except OSError:
                # Nothing can wake the wait up: what is torn now is better than what hangs.
                due.clear()
                _call(self.handler, signum, frame)


def _call(handler: Any, signum: int, frame: FrameType | None) -> None:
    try:
        handler(signum, frame)
    except BaseException as error:
        error.__dict__[_MARK] = True  # a class may forbid to set attributes
        raise


def came_from_handler(error: BaseException) -> bool:
    """Whether a signal handler of the program has raised it, while it was replaced."""
    return _MARK in error.__dict__


class HandlerGate:
    """What stands between the handlers of one thread and our bookkeeping.

    Attributes:
        is_shut: whether handlers wait now. Assign it around calls of the user's functions, and
            around calls of ours inside of those.
        due: handlers that wait, by their signals; several of one kind are one, as for Python.
        waker: makes the present wait return; None outside of waits.
        is_patient: whether waits go on while handlers are due; see `patience`.
        later: handlers that came meanwhile.
    """

    __slots__ = ("_found", "_holders", "_watched", "due", "is_patient", "is_shut", "later", "waker")

    def __init__(self) -> None:
        self.is_shut = False
        self.due: dict[int, Any] = {}
        self.later: dict[int, Any] = {}
        self.is_patient = False
        self.waker: Callable[[], None] | None = None
        self._holders: set[object] = set()
        """Its holders. Each by itself, and not their number: a handler that raises during an
        `acquire` or `release` would leave a number wrong for ever."""
        self._watched = _ASKING
        """Those that had a handler once, too."""
        self._found: list[Any] = []
        """The handlers that they have, as far as we know."""

    def shut(self) -> None:
        """Keep handlers waiting, those too that the program has installed since the last time.

        In a `finally`, make `is_shut` what it was before; and then, if that is open, `run_due`.
        """
        self.is_shut = True
        # Handlers change: a notebook installs its own for each cell, a time-out by alarm around a
        # call.
        if self._holders and self is _main and [*map(_handler_of, self._watched)] != self._found:
            try:
                self._replace_handlers()
            except BaseException:  # a handler that was not kept yet
                self.is_shut = False
                raise

    @contextmanager
    def closed(self) -> Iterator["HandlerGate"]:
        """The same for a block."""
        was_shut = self.is_shut
        self.shut()
        try:
            yield self
        finally:
            self.is_shut = was_shut
            if not was_shut:
                self.run_due()

    @contextmanager
    def used(self) -> Iterator["HandlerGate"]:
        """Shut it for a block, standing in for the program's handlers meanwhile."""
        holder = object()
        was_shut = self.is_shut
        self.is_shut = True
        try:
            self.acquire(holder)
            yield self
        finally:
            self._holders.discard(holder)
            # Open before any handler is back that is not kept, and that may raise in here.
            self.is_shut = was_shut
            try:
                self.release(holder)
            finally:
                if not was_shut:
                    self.run_due()

    @contextmanager
    def handlers_replaced(self) -> Iterator[None]:
        """Replace the program's handlers in a block in which they still run at once.

        So that `came_from_handler` can tell what they raise.
        """
        holder = object()
        try:
            self.acquire(holder)
            yield
        finally:
            self.release(holder)

    @property
    def is_used(self) -> bool:
        """Whether it has holders."""
        return bool(self._holders)

    def acquire(self, holder: object) -> None:
        """Replace the program's handlers; in other threads than main, do nothing."""
        self._holders.add(holder)
        if self is _main:
            self._watched = tuple(
                signum
                for signum in _CATCHABLE
                if signum in self._watched or callable(_handler_of(signum))
            )
            self._replace_handlers()

    def release(self, holder: object) -> None:
        """When the gate has no other holder, put the program's handlers back."""
        self._holders.discard(holder)
        if self is _main and not self._holders:
            self._put_back()

    def _replace_handlers(self) -> None:
        for signum in self._watched:
            handler = _handler_of(signum)
            if callable(handler) and not isinstance(handler, _Keeper):
                _install(signum, _Keeper(self, handler))
        self._found = [*map(_handler_of, self._watched)]

    def _put_back(self) -> None:
        for signum in _CATCHABLE:
            handler = _handler_of(signum)
            if isinstance(handler, _Keeper):
                _install(signum, handler.handler)

    def run_due(self) -> None:
        """Run the handlers that wait, in the order of their signals' arrival; they may raise.

        They are given no frame, as may happen to any handler.
        """
        while self.due:
            signum = next(iter(self.due))
            _call(self.due.pop(signum), signum, None)

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Let waits go on whatever handlers are due; those must be waits with a deadline."""
        self.later.update(self.due)
        self.due.clear()
        self.is_patient = True
        try:
            yield
        finally:
            self.is_patient = False
            self.due.update(self.later)
            self.later.clear()

    def forget(self) -> None:
        """Begin anew, in a process that was forked while the gate was shut."""
        self._put_back()
        self.__init__()  # type: ignore[misc]  # all of it


class _Instant:
    """Shuts the main thread's gate for microseconds, in a block; elsewhere does nothing.

    `HandlerGate.used` looks at each signal, which takes longer than to submit a task. This one
    replaces the handlers that raise most often: of Ctrl-C, of time-outs by alarm and of
    SIGTERM.
    """

    __slots__ = ("_replaced", "_was_shut")

    def __enter__(self) -> None:
        self._replaced: list[tuple[int, Any]] | None = None
        if threading.get_ident() != _main_thread:
            return
        replaced = []
        if not _main._holders:  # noqa: SLF001  # it is of this module
            for signum in _RAISING:
                handler = _handler_of(signum)
                if callable(handler) and not isinstance(handler, _Keeper):
                    replaced.append((signum, handler))
                    _install(signum, _Keeper(_main, handler))
        self._was_shut = _main.is_shut
        self._replaced = replaced
        # Last of all: a handler that raises before leaves a keeper, which calls what it stands for.
        _main.is_shut = True

    def __exit__(self, *_: object) -> None:
        if self._replaced is None:
            return
        _main.is_shut = self._was_shut
        try:
            for signum, handler in self._replaced:
                _install(signum, handler)
        finally:
            if not self._was_shut:
                _main.run_due()


_RAISING = (_signal.SIGINT, _signal.SIGALRM, _signal.SIGTERM)


def for_an_instant() -> _Instant:
    """Keep handlers waiting in a block that takes microseconds; it must not wait for long."""
    return _Instant()


_main = HandlerGate()
_main_thread = threading.main_thread().ident


def _note_main_thread() -> None:
    """In a fork, the thread that has forked is the main one."""
    global _main_thread  # noqa: PLW0603  # asking `threading` takes ten times as long
    _main_thread = threading.get_ident()


os.register_at_fork(after_in_child=_note_main_thread)


def gate_here() -> HandlerGate:
    """The gate of this thread: in others than the main one, a new one, which is always open."""
    return _main if threading.get_ident() == _main_thread else HandlerGate()


def without_handlers(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate what Python calls when an object ends: what is raised in there is lost.

    The gate is shut meanwhile, and a signal that has come is sent again when it has returned.
    """

    @wraps(function)
    def call(*arguments: Any) -> None:
        gate = gate_here()
        was_shut = gate.is_shut
        gate.is_shut = True
        try:
            function(*arguments)
        finally:
            gate.is_shut = was_shut
            if gate.due and not was_shut:
                _thread.start_new_thread(_send_until_handled, (gate,))

    _without_handlers.add(call.__code__)  # type: ignore[attr-defined]  # a plain function
    return call


_without_handlers: set[CodeType] = set()


def _is_without_handlers(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code not in _without_handlers:
        frame = frame.f_back
    return frame is not None


def _send_until_handled(gate: HandlerGate) -> None:
    """Send the signals that are due again, from a thread, until the main one handles them.

    One that comes between its last look and its sleep does not wake it up, so once is not enough.
    """
    never = _thread.allocate_lock()
    never.acquire()
    while gate.due:
        for signum in [*gate.due]:
            if signum in gate.due:  # no other thread runs between this and the next
                _signal.pthread_kill(_main_thread, signum)
        if not gate.is_used:  # the handlers are not ours any more, and tell us nothing
            gate.due.clear()
        never.acquire(timeout=_SEND_AGAIN_S)


def write_to_reader(fd: int, data: bytes) -> None:
    """Write into the pipe whose reading end this is, to wake its reader up.

    The pipe must have no other writer than this here when it comes to its end, so none is kept.
    """
    with suppress(BlockingIOError):  # it is full: the thread is awake
        writer = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(writer, data)
        finally:
            os.close(writer)
