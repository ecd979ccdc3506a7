"""Ranks as threads that pass a run token, in virtual time.

Theory of operation
===================

Each rank is an OS thread, since libraries keep state per thread that no greenlet could carry along
(torch's grad mode, pybind11's loader life support). Exactly one thread holds the *run token* and
runs; every other thread of the world waits for a lock of its own. A rank runs until it waits for
something simulated: a collective, a message, virtual time. Then it chooses the next rank and
hands the token over directly, which is one switch of threads, 5 us where all of them are pinned to
one core. Nothing here is locked: the thread with the token may change everything.

The thread that made the world is its *conductor*. It hands the token to the ranks with `run`, and
gets it back when

- a rank has ended,
- no rank can go on: none is ready and nothing is on the agenda,
- the next thing on the agenda lies beyond the horizon that `run` was given,
- `interrupt` asked for it, from a signal handler for instance,
- a rank has held the token for longer than the patience, in real time, and has not got on
  meanwhile (`gets_on`): `run` returns that rank, which has been given up.

Threads of a rank
-----------------

The token belongs to a thread of a rank, a *strand*. A rank has its main strand, and one for each
thread that it has started. Such a thread runs in real time, without the token, as the kernel lets
it: it may block in a socket for ever and stop no rank. It takes a *turn* (`turn`) for each call
that concerns the world, a collective for instance: it asks, waits until the token comes to it, and
gives the token away when the call is over. Its rank's state is moved in meanwhile.

A strand that has the token and waits in real time for a sibling (`nap`: a lock, a condition, the
end of a thread) must not keep the token from that sibling. Without a sibling in the queue or at a
gate it is *parked*: its rank keeps the token, so that the order of ranks does not depend on real
time, and the first sibling that asks takes the token directly. Otherwise it goes *away*: others
run, and it asks for the token when its wait is over.

When no rank is ready, a thread without the token may still ask. The conductor waits for it in real
time before `run` returns, unless each such thread waits for another one of them, which is a
deadlock, or none has made progress for the patience, or `NOTICE_S`.

`_door` guards what threads without the token touch: which strand is parked, and which takes over.

Order
-----

Ranks that can go on are in a queue, in the order in which they became ready. A rank that waits for
the agenda becomes ready at its instant, in the order of being put there. So a run is a function of
the program, unless the program itself looks at the world outside. Another `choose` explores others.

How a rank ends
---------------

A rank that is killed is unwound: the next time that it would run, `RankEnded` is raised where it
waits, and again whenever it tries to wait. Its `finally` blocks run, which the process of a real
rank would not do; what it prints then is dropped. Parking the thread for ever would be truer, and
would leak a thread with all that it refers to for each one.
"""

import os
import sys
import threading
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import thread as pools
from contextlib import contextmanager, suppress
from heapq import heappop, heappush
from signal import SIGINT, default_int_handler
from threading import get_ident
from types import FrameType
from typing import Any, Protocol, Self

from rankwise.base.errors import LocalProtocolError
from rankwise.base.units import SECOND, Instant
from rankwise.bell import Bell
from rankwise.sim.rehearsal.places import is_in_import

set_affinity = os.sched_setaffinity
"""That of the kernel: what ranks call is another one (`substitutes`)."""
SIGKILL = 9
NOTICE_S = 30.0
"""How long one rank may keep all others waiting, in real time, before the user is told."""
STOP_NOTICE_S = 2.0
"""The same after a request to stop."""
_LOOKS_PER_PATIENCE = 4
"""How often it is asked whether a rank gets on, before it is given up."""
_POLL_PAUSE = 1_000
"""How long a rank that polls pauses at first, so that what it waits for can come: 1 us."""
_POLL_PAUSE_MAX = SECOND
_POLLS_PER_WAIT = 128
"""A rank that has polled for long pauses for this part of it: so much late it sees what comes."""
_POLL_GAP_MAX = SECOND // 1_000
"""A rank that lets more time than this pass between two looks does more than look."""
_POLLED_MAX = 1_000
"""For how many things a rank can look in turn, so that it is known since when."""


class RankEnded(SystemExit):
    """Unwinds the thread of a rank that is over; `code` is its exit code or minus a signal."""

    code: int


class Gate:
    """Something that ranks wait for, and that happens once.

    Attributes:
        is_of_peers: whether other ranks open it, in another way than by a call of a group.
    """

    is_of_peers = False

    __slots__ = ("_waiters", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._waiters: list[Strand] = []

    def open(self) -> None:
        """Let it happen: the waiting ranks become ready, in the order in which they came."""
        self.is_open = True
        waiters, self._waiters = self._waiters, []
        if waiters:
            waiters[0].rank.scheduler.make_ready(*waiters)

    def told(self) -> str:
        """Say what is waited for, after `waits for`."""
        return "something"

    def named(self) -> str:
        """Name it."""
        return self.told()

    def admit(self, strand: "Strand") -> None:
        """Take note of a strand that waits."""
        self._waiters.append(strand)


class Timer(Gate):
    """An instant of virtual time.

    Attributes:
        is_deadline: whether it only limits a wait for something else.
    """

    __slots__ = ("instant", "is_cancelled", "is_deadline")

    def __init__(self, instant: Instant) -> None:
        super().__init__()
        self.instant = instant
        self.is_cancelled = False
        self.is_deadline = False

    def told(self) -> str:
        """Say when."""
        return f"virtual time {self.instant / 1e9:g} s"


class _Signal(Gate):
    """A signal: it opens no gate, but makes the rank ready that gets it."""

    __slots__ = ()

    def told(self) -> str:
        """Say what."""
        return "a signal"


class Belongings(Protocol):
    """What of the process each rank has for itself; moved in and out at each hand-over."""

    def move_in(self, rank: "Rank") -> None:
        """Let this rank find what it left."""
        ...

    def move_out(self, rank: "Rank") -> None:
        """Keep for this rank what it leaves."""
        ...


class Nap(Protocol):
    """A wait in real time for another thread of the same rank."""

    def told(self) -> str:
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
        baton: locked; released to let the thread go on with the token.
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
        "baton", "displaced", "gate", "ident", "is_asking", "is_away", "is_dismissed", "is_parked",
        "is_ready", "is_starting", "nap", "rank", "thread", "turns",
    )  # fmt: skip

    def __init__(self, rank: "Rank", thread: threading.Thread | None, ident: int = 0) -> None:
        self.rank = rank
        self.thread = thread
        self.ident = ident
        self.baton = allocate_lock()
        self.baton.acquire()
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
            return self.nap.told()
        return "" if self.gate is None or self.gate.is_open else self.gate.told()

    def stack(self) -> FrameType | None:
        """Its innermost frame."""
        return sys._current_frames().get(self.ident)  # noqa: SLF001  # no public way

    @property
    def takes_baton(self) -> bool:
        """Whether it takes the baton: a gate that it has ceased to wait for may make it ready."""
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
        is_aside: whether it belongs to no world, and waits to be called again in another one.
        polled: what it has looked for in vain, and since when it does; `polled_until` is when it
            has last gone on after a look.
        handlers: its signal handlers, by number.
        signals_handled: how many of its signals they have been called for.
        has_signals: whether `take_signals` may have anything to do.
        blocked: the signals that it blocks.
        wakeup_fd: where the number of each signal with a handler is written; -1 for nowhere.
        belongings: what `Belongings` keep for it, by keeper.
        process: the state it begins with, for `belongings`.
    """

    def __init__(
        self, scheduler: "Scheduler", number: int, process: Any, program: Callable[[], int]
    ) -> None:
        self.scheduler = scheduler
        self.number = number
        self.exit_code: int | None = None
        self.handlers: dict[int, Any] = {}
        self.signals_handled = 0
        self.has_signals = False
        self.blocked: frozenset[int] = frozenset()
        self.wakeup_fd = -1
        self.belongings: dict[object, Any] = {}
        self.process = process
        self._program = program
        self._fate: int | None = None
        self._signals: list[int] = []
        self.has_begun = False
        self.is_given_up = False
        self.is_aside = False
        self.polled: dict[Hashable, Instant] = {}
        self.polled_until = Instant(0)
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
        self.main.baton.acquire()
        scheduler.pin()
        code = 1
        try:
            scheduler.arrive(self)
            code = self._program()
        except RankEnded as end:
            code = end.code
        except KeyboardInterrupt:  # before the first line of the program, or after its last one
            code = -SIGINT
        except BaseException as problem:  # noqa: BLE001  # ours: the conductor raises it
            scheduler.broken_by = problem
        finally:
            scheduler.leave_for_good(self, code)


def _end_of(strand: Strand | None) -> SystemExit:
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


def _may_ask(strand: Strand) -> bool:
    """Whether a thread may come to ask for the token without any other one's doing."""
    if strand.rank.is_over or strand.is_in_line:
        return False
    return strand.nap is None or not strand.nap.is_known_to_last


def _has_happened(what: object) -> bool:
    return isinstance(what, Gate) and what.is_open


_DEFAULT, _IGNORE = 0, 1
_HARMLESS = frozenset({17, 18, 23, 28})
"""Signals whose default is to do nothing: SIGCHLD, SIGCONT, SIGURG, SIGWINCH."""


class Scheduler:
    """Runs the ranks of one world, one at a time, while it is entered.

    Args:
        choose: says which of the ready ranks runs next, as an index; None takes the first.
        belongings: what is moved in and out at each hand-over.
        cpu: the core that rank threads are pinned to; None leaves them alone.

    Attributes:
        now: virtual time, in nanoseconds; it may be set forward by the conductor.
        ranks: those of the present attempt, by number.
        holder: the strand that has the token; None means the conductor.
        current: its rank.
        helpers: the strands of the threads that ranks have started and that live, by ident.
        is_paused: whether the rank that runs may hold the token for as long as it wants.
        wake_ups: how often time has passed since no rank was ready.
        at_rest: called when no rank is ready, before time passes; returns whether it has made one
            ready.
        gets_on: asked now and then whether the rank that has the token has made progress since it
            was asked before, by computing for instance; its patience begins anew then, if no rank
            has asked for a stop. None: holding the token is no progress.
        on_held: told of a rank that has kept others waiting for `NOTICE_S`, once in a run, and of
            one that keeps a request to stop waiting.
        on_given_up: told of a rank that has been given up, as nothing else can be done for it.
    """

    def __init__(
        self,
        *,
        choose: Callable[[int], int] | None = None,
        belongings: Belongings,
        cpu: int | None = None,
    ) -> None:
        self.now = Instant(0)
        self.ranks: dict[int, Rank] = {}
        self.current: Rank | None = None
        self.holder: Strand | None = None
        self.helpers: dict[int, Strand] = {}
        self.broken_by: BaseException | None = None
        self.is_paused = False
        self.wake_ups = 0
        self.at_rest: Callable[[], bool] | None = None
        self.gets_on: Callable[[Rank], bool] | None = None
        self.on_held: Callable[[Rank], None] | None = None
        self.on_given_up: Callable[[Rank], None] | None = None
        self._choose = choose
        self._belongings = belongings
        self._cpu = cpu
        self._ready: deque[Strand] = deque()
        self._asks: deque[Strand] = deque()
        self._door = threading.RLock()
        self._is_resting = False
        self._births = 0
        self._is_rest_certain = False
        self._agenda: list[tuple[Instant, int, Timer]] = []
        self._numbers = 0
        self._horizon: Instant | None = None
        self._is_interrupted = self._is_stopping = self._is_called = False
        self._ended_by = SIGKILL
        self._patience_s: float | None = None
        self._hand_overs = 0
        self._told_while_interrupted: set[bool] = set()
        self._bell: Bell

    def __enter__(self) -> Self:
        self._bell = Bell()
        return self

    def __exit__(self, *_: object) -> None:
        self._bell.close()

    def spawn(self, number: int, process: Any, program: Callable[[], int]) -> Rank:
        """Make a rank: `program` returns its exit code. It is ready, and runs when it is chosen."""
        rank = self.ranks[number] = Rank(self, number, process, program)
        rank.thread.start()
        # What it starts is no daemon then, as in a process; Python waits for none of them itself.
        rank.thread._daemonic = False  # type: ignore[attr-defined]  # noqa: SLF001  # no public way
        self.make_ready(rank.main)
        return rank

    def run(self, horizon: Instant | None = None, patience_s: float | None = None) -> Rank | None:
        """Let the ranks run until one of the things that the module's text lists has happened."""
        self._horizon = horizon
        self._patience_s = patience_s
        chosen = self._pick()
        while chosen is None and self._awaits_threads:
            if self._is_interrupted or self._is_called:
                break
            self._wait_for_ask()
            chosen = self._pick()
        stuck = None
        if chosen is not None:
            self._pass_to(chosen)
            stuck = self._wait_for_baton()
        self._is_interrupted = self._is_called = False
        self._ended_by = SIGKILL
        if self.broken_by is not None:
            raise self.broken_by
        return stuck

    def interrupt(self, patience_s: float | None = None, *, signal: int = SIGKILL) -> None:
        """Have `run` return at the next hand-over, or at once when it is called next.

        A rank that holds the token for longer than `patience_s` from now is given up, as if this
        signal had ended it. Callable from a signal handler.
        """
        self._is_interrupted = self._is_stopping = True
        self._ended_by = signal
        if patience_s is not None:
            self._patience_s = patience_s
        self._bell.ring()  # it may rest, or wait for a strand that is parked

    def call(self) -> None:
        """Have `run` return as `interrupt` does, for something that ends no rank."""
        self._is_called = True
        self._bell.ring()

    def return_by(self, instant: Instant) -> None:
        """Have `run` return before time passes this instant, if it would pass it."""
        if self._horizon is None or instant < self._horizon:
            self._horizon = instant

    def wait(self, gate: Gate, until: Instant | None = None) -> bool:
        """Let others run until `gate` is open, or `until`; returns whether it is open.

        Called by the rank that runs.

        Raises:
            RankEnded: the rank has been ended meanwhile.
        """
        strand = self.holder
        if strand is None or strand.ident != get_ident():
            strand = self._own()
        rank = strand.rank
        if rank.has_signals or strand is not rank.main:
            self._take_signals(strand)
        timer = None
        if until is not None and not gate.is_open:
            timer = self.at(until)
            timer.is_deadline = True
            timer.admit(strand)
        try:
            while not gate.is_open:
                if timer is not None and timer.is_open:
                    return False
                gate.admit(strand)
                strand.gate = gate
                self._hand_over(strand)
                strand.gate = None
                if rank.has_signals or strand is not rank.main:
                    self._take_signals(strand)
        finally:
            if timer is not None:
                timer.is_cancelled = True
        return True

    def sleep(self, nanoseconds: int) -> None:
        """Let virtual time pass for the rank that runs."""
        self.wait(self.at(Instant(self.now + max(nanoseconds, 0))))

    def wait_for_signal(self) -> None:
        """Let others run until a handler of the rank that runs has been called."""
        strand = self._own()
        rank = strand.rank
        gate, seen = _Signal(), rank.signals_handled
        self._take_signals(strand)
        while rank.signals_handled == seen:
            strand.gate = gate
            self._hand_over(strand)
            strand.gate = None
            self._take_signals(strand)

    def wait_for_pending(self, numbers: frozenset[int], until: Instant | None = None) -> int | None:
        """Take one of these signals of the rank that runs, when it comes; None if none has."""
        strand = self._own()
        rank = strand.rank
        gate, timer = _Signal(), None
        if until is not None:
            timer = self.at(until)
            timer.is_deadline = True
            timer.admit(strand)
        while (number := rank.take_pending(numbers.__contains__)) is None:
            self._take_signals(strand)
            if timer is not None and timer.is_open:
                return None
            strand.gate = gate
            self._hand_over(strand)
            strand.gate = None
        if timer is not None:
            timer.is_cancelled = True
        return number

    def yield_to_others(self) -> None:
        """Let all ranks that are ready run before the present one goes on."""
        strand = self._own()
        self.make_ready(strand)
        self._hand_over(strand)
        self._take_signals(strand)

    def poll(self, what: Hashable) -> None:
        """The rank that runs has looked for `what` in vain: let others run, and time pass.

        The longer it looks for that, perhaps for other things in turn, the more: another rank may
        sleep for an hour first.
        """
        strand = self.holder
        if strand is None or strand.ident != get_ident():
            return
        rank = strand.rank
        if self.now - rank.polled_until > _POLL_GAP_MAX:
            rank.polled = {}
        since = rank.polled.get(what)
        if since is None:
            sought = [each for each in rank.polled.items() if not _has_happened(each[0])]
            rank.polled = dict(sought[-_POLLED_MAX:])
            since = rank.polled[what] = self.now
        pause = (self.now - since) // _POLLS_PER_WAIT
        self.sleep(min(max(pause, _POLL_PAUSE), _POLL_PAUSE_MAX))
        rank.polled_until = self.now

    def at(self, instant: Instant) -> Timer:
        """A gate that opens at `instant`."""
        timer = Timer(instant)
        self.put(timer)
        return timer

    def put(self, timer: Timer) -> None:
        """Put a timer on the agenda."""
        self._numbers += 1
        heappush(self._agenda, (timer.instant, self._numbers, timer))

    def make_ready(self, *strands: Strand) -> None:
        """Let strands run when it is their turn, in this order."""
        for strand in strands:
            if not strand.is_ready and not strand.is_away and strand.rank.exit_code is None:
                strand.is_ready = True
                self._ready.append(strand)

    def arrive(self, rank: Rank) -> None:
        """A rank's thread has the token for the first time."""
        rank.has_begun = True
        self._belongings.move_in(rank)
        rank.take_signals()

    def leave_for_good(self, rank: Rank, code: int) -> None:
        """A rank is over: the conductor is told."""
        if self.holder is not rank.main:
            return  # it was given up as stuck: no rank waits for it
        self._belongings.move_out(rank)
        rank.exit_code = code
        self._dismiss(rank)
        self._give_back()

    def give_up(self, rank: Rank, code: int) -> None:
        """Count a rank as ended that blocks where it cannot be unwound; call it with the token."""
        rank.is_given_up = True
        rank.exit_code = code
        self._dismiss(rank)
        if self.on_given_up is not None:
            self.on_given_up(rank)

    def _dismiss(self, rank: Rank) -> None:
        """Let the threads of a rank that is over end, where they wait for the world.

        Python joins threads of pools when this process ends. What they wait for may never happen.
        """
        with self._door:
            for strand in rank.strands:
                is_waiting = strand.is_in_line and strand is not self.holder
                strand.is_dismissed = True
                if is_waiting and strand.baton.locked():
                    strand.baton.release()
                if strand.thread is not None:
                    pools._threads_queues.pop(strand.thread, None)  # type: ignore[attr-defined]  # noqa: SLF001  # no public way

    def pin(self) -> None:
        """Pin the calling thread to the core of the ranks.

        A batch thread does not preempt the one that wakes it, which has the interpreter's lock
        still: a hand-over costs half as much.
        """
        if self._cpu is not None:
            set_affinity(0, {self._cpu})
            with suppress(OSError):  # it may be forbidden, and is no more than quicker
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

    @property
    def next_instant(self) -> Instant | None:
        """When the next strand can go on: now, or at the next entry of the agenda; None: never."""
        if self._asks:
            self._admit()
        if any(not strand.rank.is_over for strand in self._ready):
            return self.now
        if self.at_rest and self.at_rest():
            return self.now
        while self._agenda and self._agenda[0][2].is_cancelled:
            heappop(self._agenda)
        if self._awaits_threads:
            return self.now
        return self._agenda[0][0] if self._agenda else None

    def _pick(self) -> Strand | None:
        """Take the next one from the queue, letting time pass; None gives the conductor a turn."""
        if self._is_interrupted or self._is_called:
            return None
        if self._asks:
            self._admit()
        ready = self._ready
        while not ready:
            if self.at_rest is not None and self.at_rest():
                continue
            if not self._agenda:
                return None
            instant = self._agenda[0][0]
            if self.helpers and self._awaits_threads:
                return None
            if self._horizon is not None and instant > self._horizon:
                return None
            timer = heappop(self._agenda)[2]
            if not timer.is_cancelled:
                self.wake_ups += 1
                self.now = max(self.now, instant)
                timer.open()
        if self._choose is None:
            chosen = ready.popleft()
        else:
            index = self._choose(len(ready))
            chosen = ready[index]
            del ready[index]
        chosen.is_ready = False
        is_main = chosen is chosen.rank.main and not chosen.is_away
        if is_main and chosen.rank.exit_code is None:  # as `takes_baton`, which is slower
            return chosen
        return chosen if chosen.takes_baton else self._pick()

    def _hand_over(self, strand: Strand) -> None:
        """Let the next one run, and return when it is this one's turn again."""
        if strand is not self.holder:
            raise RankEnded(-SIGKILL)  # given up as stuck, while others have gone on
        chosen = self._pick()
        if chosen is strand:
            return
        strand.displaced = None  # from now on others run, so it has to ask
        # As `_leave_to` and `_wait_for_turn`, without their calls: this is most of a collective.
        rank, belongings = strand.rank, self._belongings
        self._hand_overs += 1
        belongings.move_out(rank)
        if chosen is None:
            self._give_back()
        else:
            self._is_rest_certain = False
            self.current, self.holder = chosen.rank, chosen
            chosen.baton.release()
        strand.baton.acquire()
        if strand.is_dismissed:
            raise _end_of(strand)
        belongings.move_in(rank)

    def _leave_to(self, chosen: Strand | None, rank: Rank) -> None:
        """The strand that has the token passes it on; None gives it to the conductor."""
        self._hand_overs += 1
        self._belongings.move_out(rank)
        if chosen is None:
            self._give_back()
        else:
            self._pass_to(chosen)

    def _pass_to(self, strand: Strand) -> None:
        self._is_rest_certain = False
        self.current, self.holder = strand.rank, strand
        strand.baton.release()

    def _wait_for_turn(self, strand: Strand) -> None:
        strand.baton.acquire()
        if strand.is_dismissed:
            raise _end_of(strand)
        self._belongings.move_in(strand.rank)

    def _give_back(self) -> None:
        self.current = self.holder = None
        self._bell.ring()

    def _own(self) -> Strand:
        """The strand that has the token, which is the caller's.

        Raises:
            RankEnded: the caller's rank is over.
            LocalProtocolError: the caller is a thread of a rank, and has taken no turn.
        """
        strand = self.holder
        if strand is not None and strand.ident == get_ident():
            return strand
        own = self.helpers.get(get_ident())
        if own is None or own.rank.is_over:
            raise _end_of(own)  # given up as stuck, while others have gone on
        raise not_for_threads(own, "a call that waits for other ranks")

    def _take_signals(self, strand: Strand) -> None:
        rank = strand.rank
        if strand is rank.main:
            if rank.has_signals:
                rank.take_signals()
        elif rank.is_to_end or strand.is_dismissed:  # as Python, where the main thread handles them
            raise _end_of(strand)

    # What follows is for threads that ranks have started: see "Threads of a rank" above.

    @contextmanager
    def starting_thread(self) -> Iterator[None]:
        """A rank starts a thread, which begins with `begin_thread`; until then it may ask, too."""
        with self._door:
            self._births += 1
        try:
            yield
        except BaseException:  # there are too many of them, for instance
            self._end_birth()
            raise

    def _end_birth(self) -> None:
        with self._door:
            self._births -= 1
            self._ring_if_resting()

    def begin_thread(self, rank: Rank, thread: threading.Thread | None) -> Strand:
        """The calling thread, which a rank has started, begins."""
        strand = Strand(rank, thread, get_ident())
        with self._door:
            self.helpers[strand.ident] = strand
            rank.helpers.append(strand)
            self._births -= 1
        return strand

    def own_strand(self) -> Strand | None:
        """The strand of the calling thread; None if it is no rank's."""
        holder, ident = self.holder, get_ident()
        return holder if holder is not None and holder.ident == ident else self.helpers.get(ident)

    def end_thread(self, strand: Strand, release_joiners: Callable[[], None]) -> None:
        """The calling thread, which a rank has started, ends."""
        with self._door:
            self.helpers.pop(strand.ident, None)
            strand.rank.helpers.remove(strand)
            release_joiners()  # with the door shut: a rank that joins it does not wait for ever
            self._leave_for_parked(strand.rank)
            self._ring_if_resting()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Have the token until the block ends, in a thread that a rank has started.

        Elsewhere, and inside of another turn, it does nothing.

        Raises:
            RankEnded: the rank is over.
        """
        strand = self.helpers.get(get_ident())
        if strand is None:
            yield
            return
        if not strand.turns:
            self._begin_turn(strand)
        strand.turns += 1
        try:
            yield
        finally:
            strand.turns -= 1
            if not strand.turns and strand is self.holder:
                self._end_turn(strand)

    def _begin_turn(self, strand: Strand) -> None:
        rank = strand.rank
        with self._door:
            if strand.is_dismissed or rank.is_over:
                raise _end_of(strand)
            if self._takes_from_parked(strand):
                return
            self._ask(strand)
        try:
            self._wait_for_turn(strand)
        finally:
            strand.is_asking = False

    def _takes_from_parked(self, strand: Strand) -> bool:
        """Whether a strand takes the token from a sibling that is parked; with the door held."""
        parked = self.holder
        if parked is None or parked.rank is not strand.rank or not parked.is_parked:
            return False
        parked.is_parked, parked.is_away = False, True
        strand.displaced, self.holder = parked, strand
        return True

    def _end_turn(self, strand: Strand) -> None:
        displaced, strand.displaced = strand.displaced, None
        with self._door:
            if (
                displaced is not None
                and displaced.is_away
                and displaced.nap is not None
                and not self._must_others_run(displaced)
            ):
                displaced.is_away, displaced.is_parked = False, True
                self.holder = displaced
                return
        self._leave_to(self._pick(), strand.rank)

    def nap(self, nap: Nap, wait: Callable[[], Any]) -> Any:
        """Wait in real time for a sibling, in whichever thread of a rank this is.

        A thread that has the token lets siblings have it. `wait` blocks, and must return soon after
        `nap.interrupt`.

        Raises:
            RankEnded: the rank has ended meanwhile.
        """
        own = self.holder
        if own is None or own.ident != get_ident():
            return self._nap_without_baton(nap, wait)
        if own.is_starting:
            return wait()
        with self._door:
            own.nap = nap
            own.is_away = self._is_interrupted or self._must_others_run(own)
            own.is_parked = not own.is_away
        if own.is_away:
            own.displaced = None
            self._leave_to(self._pick(), own.rank)
        try:
            return wait()
        finally:
            with self._door:
                own.nap = None
                has_baton, own.is_parked = own.is_parked, False
                if not has_baton:
                    own.is_away = False
                    has_baton = self._takes_from_parked(own)
                if not has_baton:
                    self._ask(own)
            if not has_baton:
                try:
                    self._wait_for_turn(own)
                finally:
                    own.is_asking = False
            self._take_signals(own)

    def _nap_without_baton(self, nap: Nap, wait: Callable[[], Any]) -> Any:
        strand = self.helpers.get(get_ident())
        if strand is None:
            return wait()
        with self._door:
            strand.nap = nap
            self._leave_for_parked(strand.rank)
            self._ring_if_resting()  # perhaps no thread is left that may ask
        try:
            return wait()
        finally:
            with self._door:
                strand.nap = None

    def _must_others_run(self, strand: Strand) -> bool:
        """Whether a strand that naps waits for other ranks, by way of its siblings perhaps."""
        rank = strand.rank
        siblings = [each for each in rank.strands if each is not strand]
        if any(each.is_in_line for each in siblings):
            return True
        # If no sibling can help, another rank holds what it waits for, a lock of a library perhaps.
        return not any(map(_may_ask, (strand, *siblings)))

    def _leave_for_parked(self, rank: Rank) -> None:
        """A thread without the token naps or ends: its rank's parked strand may need others now."""
        parked = self.holder
        if parked is None or parked.rank is not rank or not parked.is_parked:
            return
        if self._must_others_run(parked):
            parked.is_parked, parked.is_away = False, True
            self._leave_to(self._pick(), rank)

    def _ask(self, strand: Strand) -> None:
        """Ask for the token, with the door held."""
        if strand.is_dismissed:
            raise _end_of(strand)
        strand.is_asking = True
        self._is_rest_certain = False
        self._asks.append(strand)
        self._ring_if_resting()

    def _ring_if_resting(self) -> None:
        if self._is_resting:
            self._bell.ring()

    def _admit(self) -> None:
        """Put the strands that ask into the queue."""
        while self._asks:
            self.make_ready(self._asks.popleft())

    @property
    def _awaits_threads(self) -> bool:
        """Whether a thread without the token may ask for it, before virtual time passes.

        If ranks sleep, time passes: they may look in a loop for what a thread does. But a time-out
        of virtual time must not strike because a thread takes real time.
        """
        if self._asks:
            return True
        if self._agenda and not (self._agenda[0][2].is_deadline or self._agenda[0][2].is_cancelled):
            return False
        return self._can_be_asked

    @property
    def _can_be_asked(self) -> bool:
        """Whether a thread without the token may ask for it, as it does not wait for others."""
        if self._is_rest_certain:
            return False
        # A thread begins and ends to wait, asks, begins and ends with the door held. So this is a
        # picture of one moment: a thread that has just let another one go on still runs in it.
        with self._door:
            threads = [*self.helpers.values()]
            threads += [rank.main for rank in self.ranks.values() if rank.main.is_away]
            return bool(self._births or self._asks or any(map(_may_ask, threads)))

    def _wait_for_ask(self) -> None:
        """Let threads without the token come to ask for it, in real time."""
        self._is_resting = True
        try:
            still_s = 0.0
            while (
                not (self._asks or self._is_interrupted or self._is_called) and self._can_be_asked
            ):
                if self._bell.wait(self._rest_glance_after):
                    continue
                gets_on = self._do_threads_get_on()
                still_s = 0.0 if gets_on else still_s + self._rest_glance_after()
                if still_s >= (NOTICE_S if self._patience_s is None else self._patience_s):
                    self._is_rest_certain = True
        finally:
            self._is_resting = False

    def _do_threads_get_on(self) -> bool:
        if self.gets_on is None or self._is_stopping:
            return False
        return any(self.gets_on(strand.rank) for strand in [*self.helpers.values()][:1])

    def _rest_glance_after(self) -> float:
        return (NOTICE_S if self._patience_s is None else self._patience_s) / _LOOKS_PER_PATIENCE

    def _wait_for_baton(self) -> Rank | None:
        seen, patience_s, held_s, still_s = self._hand_overs, self._patience_s, 0.0, 0.0
        while True:
            if self._bell.wait(self._glance_after):
                if self.holder is None or self._has_taken_from_parked():
                    return None
                continue  # it was rung for an interrupt
            glance_s, rank = self._glance_after(), self.current
            gets_on = rank is not None and self._gets_on(rank)
            is_held = self._hand_overs == seen and not self.is_paused
            is_same = is_held and self._patience_s == patience_s
            seen, patience_s = self._hand_overs, self._patience_s
            held_s = glance_s + (held_s if is_same else 0.0)
            still_s = 0.0 if gets_on else glance_s + (still_s if is_same else 0.0)
            if not is_held or rank is None:
                held_s = still_s = 0.0
            elif patience_s is not None and still_s >= patience_s:
                self.current = self.holder = None
                self._belongings.move_out(rank)  # what it has must not stay for the next one
                self.give_up(rank, -self._ended_by)
                return rank
            elif held_s >= self._notice_s:
                self._tell_of(rank)

    def _has_taken_from_parked(self) -> bool:
        """Whether the conductor has taken the token from a strand that naps, to end or signal it.

        Nothing runs with the token while it naps, so its rank's state can be moved out from here.
        """
        with self._door:
            strand = self.holder
            if not self._is_interrupted or strand is None or not strand.is_parked:
                return False
            strand.is_parked, strand.is_away = False, True
            self.current = self.holder = None
        self._belongings.move_out(strand.rank)
        return True

    def _gets_on(self, rank: Rank) -> bool:
        if self.gets_on is None or self._patience_s is None or self._is_stopping:
            return False
        return self.gets_on(rank)

    @property
    def _notice_s(self) -> float:
        return STOP_NOTICE_S if self._is_interrupted else NOTICE_S

    def _glance_after(self) -> float:
        patience_s = self._patience_s
        if patience_s is None:
            return self._notice_s
        looks = 1 if self.gets_on is None else _LOOKS_PER_PATIENCE
        return min(patience_s / looks, self._notice_s)

    def _tell_of(self, rank: Rank) -> None:
        """Report once that a rank keeps others waiting, or the stop that was asked for."""
        if not self._is_interrupted and is_in_import(rank.stack()):
            return  # of a large package on a busy machine: the next look tells what still holds
        others = (other for other in self.ranks.values() if other is not rank)
        is_missed = self._is_interrupted or any(other.exit_code is None for other in others)
        if is_missed and self.on_held and self._is_interrupted not in self._told_while_interrupted:
            self._told_while_interrupted.add(self._is_interrupted)
            self.on_held(rank)
