"""A rank as the scheduler sees it: its threads, its signals and how it ends.

A rank that is killed is unwound: the next time that it would run, `RankEnded` is raised where it
waits, and again whenever it tries to wait. Its `finally` blocks run, which the process of a real
rank would not do; what it prints then is dropped. Parking the thread for ever would be truer, and
would leak a thread with all that it refers to for each one.
"""

from __future__ import annotations

import os
import sys
import threading
from _thread import allocate_lock
from contextlib import suppress
from signal import SIGINT, default_int_handler
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

from rankwise.base.errors import LocalProtocolError
from rankwise.simranks.world.polling import Polling

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from rankwise.simranks.world.gates import Gate
    from rankwise.simranks.world.scheduler import Scheduler

SIGKILL = 9
_DEFAULT, _IGNORE = 0, 1
_HARMLESS = frozenset({17, 18, 23, 28})
"""Signals whose default is to do nothing: SIGCHLD, SIGCONT, SIGURG, SIGWINCH."""


class RankEnded(SystemExit):
    """Unwinds the thread of a rank that is over; `code` is its exit code or minus a signal."""

    code: int


class Nap(Protocol):
    """A wait in real time for another thread of the same rank."""

    def describe(self) -> str:
        """Say what is waited for."""
        ...

    @property
    def is_known_to_last(self) -> bool:
        """Whether it lasts until another thread ends it; False if that is unknown."""
        ...

    def interrupt(self) -> bool:
        """End it now, for a signal; whether that is possible."""
        ...


class Strand:
    """A thread of a rank, as the scheduler sees it.

    Attributes:
        rank: whose it is.
        thread: it; None if the program has started it without `threading`.
        ident: of the thread; 0 before it lives.
        run_token: locked; released to let the thread go on.
        gate: what it has last begun to wait for, which may have happened; None while it runs.
        is_ready: whether it is in the queue of those that can go on.
        is_asking: whether it waits for the token, and for nothing else.
        is_parked: whether it has the token and naps, so that a sibling may take the token over.
        is_away: whether it naps without the token.
        is_dismissed: whether its rank is over, so that it never gets the token again.
        nap: what it waits for in real time.
        is_starting: whether it starts another thread, which is a wait that is short.
        turns: how many of its present calls need the token.
    """

    __slots__ = (
        "displaced",
        "gate",
        "ident",
        "is_asking",
        "is_away",
        "is_dismissed",
        "is_parked",
        "is_ready",
        "is_starting",
        "nap",
        "rank",
        "run_token",
        "thread",
        "turns",
    )  # fmt: skip

    def __init__(self, rank: Rank, thread: threading.Thread | None, ident: int = 0) -> None:
        self.rank = rank
        self.thread = thread
        self.ident = ident
        self.run_token = allocate_lock()
        self.run_token.acquire()
        self.gate: Gate | None = None
        self.is_ready = self.is_asking = self.is_parked = self.is_away = self.is_dismissed = False
        self.nap: Nap | None = None
        self.is_starting = False
        self.turns = 0
        self.displaced: Strand | None = None

    @property
    def name(self) -> str:
        """What the program calls the thread; empty for the main one."""
        if self is self.rank.main:
            return ""
        return self.thread.name if self.thread is not None else f"thread {self.ident}"

    @property
    def waits_in_words(self) -> str:
        """What it waits for; empty if it goes on."""
        if self.nap is not None:
            return self.nap.describe()
        return "" if self.gate is None or self.gate.is_open else self.gate.describe()

    def stack(self) -> FrameType | None:
        """Its innermost frame."""
        return sys._current_frames().get(self.ident)  # noqa: SLF001  # no public way

    @property
    def takes_token(self) -> bool:
        """Whether it takes the run token: a gate that it no longer waits for may make it ready."""
        if self.is_away or self.rank.exit_code is not None:
            return False
        return self is self.rank.main or self.turns > 0 or self.is_asking

    @property
    def is_in_line(self) -> bool:
        """Whether the world will let it go on: it waits for a gate, or for the token."""
        return self.is_asking or self.is_ready or (self.gate is not None and not self.is_away)


class Rank:
    """One rank of a simulated world.

    Attributes:
        number: its place in the world, from 0.
        main: the strand of its program.
        helpers: those of the threads that it has started, in the order of their begin.
        exit_code: how it ended; None while it lives.
        has_begun: whether it has ever run.
        is_given_up: whether it has let no other rank run for too long; then it counts as killed.
        is_between_worlds: whether it belongs to no world, and waits to be called in another one.
        polling: what it has looked for in vain.
        handlers: its signal handlers, by number.
        signals_handled: how many of its signals they have been called for.
        has_signals: whether `take_signals` may have anything to do.
        blocked: the signals that it blocks.
        wakeup_fd: where the number of each signal with a handler is written; -1 for nowhere.
        own_state: what the per-rank states keep for it, by keeper.
        process: the state it begins with, for `own_state`.
    """

    def __init__(
        self, scheduler: Scheduler, number: int, process: Any, program: Callable[[], int]
    ) -> None:
        self.scheduler = scheduler
        self.number = number
        self.exit_code: int | None = None
        self.handlers: dict[int, Any] = {}
        self.signals_handled = 0
        self.has_signals = False
        self.blocked: frozenset[int] = frozenset()
        self.wakeup_fd = -1
        self.own_state: dict[object, Any] = {}
        self.process = process
        self._program = program
        self._fate: int | None = None
        self._signals: list[int] = []
        self.has_begun = False
        self.is_given_up = False
        self.is_between_worlds = False
        self.polling = Polling()
        self.thread = threading.Thread(target=self._live, name=f"rank {number}", daemon=True)
        self.main = Strand(self, self.thread)
        self.helpers: list[Strand] = []

    @property
    def waits_for(self) -> Gate | None:
        """What its main thread waits for; None while it runs, can go on, or is over."""
        gate = self.main.gate
        return None if gate is None or gate.is_open else gate

    @property
    def strands(self) -> tuple[Strand, ...]:
        """Its threads, the main one first."""
        return (self.main, *self.helpers)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.exit_code is not None

    @property
    def is_to_end(self) -> bool:
        """Whether it is being unwound, so that its errors are not reported."""
        return self._fate is not None

    def end(self, code: int) -> None:
        """End this rank, which is the one that runs; does not return."""
        self._fate, self.has_signals = code, True
        raise RankEnded(code)

    def signal(self, number: int) -> None:
        """Send it a signal, which it takes when it runs next."""
        if self.is_over:
            return
        if number == SIGKILL:
            self._fate = -SIGKILL
        self._signals.append(number)
        self.has_signals = True
        if (
            self.wakeup_fd >= 0
            and number not in self.blocked
            and callable(self.handlers.get(number))
        ):
            with suppress(OSError):  # a hint: no reader, or it is full
                os.write(self.wakeup_fd, bytes([number]))
        nap = self.main.nap
        if nap is None or self.scheduler.holder is self.main:
            self.scheduler.make_ready(self.main)
        elif not nap.interrupt() and (self._fate is not None or self.is_ended_by(number)):
            self.scheduler.give_up(self, -number)  # it cannot be unwound where it blocks

    def take_signals(self) -> None:
        """Do what signals mean to this rank, which is the one that runs.

        Raises:
            RankEnded: one of them, or another caller, has ended it.
        """
        self.has_signals = False
        try:
            self._handle_signals()
        finally:
            if self._signals or self._fate is not None:
                self.has_signals = True
        if self._fate is not None:
            raise RankEnded(self._fate)

    def _handle_signals(self) -> None:
        while self._signals and self._fate is None:
            number = self.take_pending(lambda number: number not in self.blocked)
            if number is None:
                break
            # As Python, which raises KeyboardInterrupt without another handler.
            default = default_int_handler if number == SIGINT else _DEFAULT
            handler = self.handlers.get(number, default)
            if callable(handler):
                self.signals_handled += 1
                handler(number, sys._getframe(2))  # noqa: SLF001  # as Python gives it
            elif self.is_ended_by(number):
                self._fate = -number

    def take_pending(self, is_wanted: Callable[[int], bool]) -> int | None:
        """Take the first such signal that waits for this rank; None if there is none."""
        number = next(filter(is_wanted, self._signals), None)
        if number is not None:
            self._signals.remove(number)
        return number

    @property
    def pending(self) -> frozenset[int]:
        """The blocked signals that wait for it."""
        return self.blocked.intersection(self._signals)

    def is_ended_by(self, number: int) -> bool:
        """Whether a signal ends it, as the program neither handles nor ignores it."""
        handler = self.handlers.get(number, _DEFAULT)
        if number in self.blocked:
            return False
        return not callable(handler) and handler != _IGNORE and number not in _HARMLESS

    def stack(self) -> FrameType | None:
        """The innermost frame of its thread; None before it has begun and when it is over."""
        if not self.has_begun:
            return None
        return sys._current_frames().get(self.thread.ident or 0)  # noqa: SLF001  # no public way

    def _live(self) -> None:
        scheduler = self.scheduler
        self.main.ident = get_ident()
        self.main.run_token.acquire()
        scheduler.pin()
        code = 1
        try:
            scheduler.arrive(self)
            code = self._program()
        except RankEnded as end:
            code = end.code
        except KeyboardInterrupt:  # before the first line of the program, or after its last one
            code = -SIGINT
        except BaseException as problem:  # noqa: BLE001  # ours: the scheduler thread raises it
            scheduler.broken_by = problem
        finally:
            scheduler.leave_for_good(self, code)


def end_of(strand: Strand | None) -> SystemExit:
    """What unwinds a thread of a rank that is over; Python is silent about `SystemExit` alone."""
    is_main = strand is None or strand is strand.rank.main
    return RankEnded(-SIGKILL) if is_main else SystemExit(-SIGKILL)


def not_for_threads(strand: Strand, call: str) -> LocalProtocolError:
    """The error of a call that a rank's threads cannot make; its traceback has the line."""
    return LocalProtocolError(
        f"thread {strand.name!r} of rank {strand.rank.number} has made {call}: simulated ranks do"
        " that in their main threads only",
        hint="make this call in the thread that runs the program of the rank, or run without "
        "--on sim",
    )
