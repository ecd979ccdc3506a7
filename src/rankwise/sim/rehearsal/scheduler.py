"""Ranks as threads that pass a baton, in virtual time.

Theory of operation
===================

Each rank is an OS thread, since libraries keep state per thread that no greenlet could carry along
(torch's grad mode, pybind11's loader life support). Exactly one thread holds the *baton* and runs;
every other thread of the world waits for a lock of its own. A rank runs until it waits for
something simulated: a collective, a message, virtual time. Then it chooses who runs next and
hands the baton over directly, which is one switch of threads, 5 us where all of them are pinned to
one core. Nothing here is locked: who has the baton may change everything.

The thread that made the world is its *conductor*. It hands the baton to the ranks with `run`, and
gets it back when

- a rank has ended,
- no rank can go on: none is ready and nothing is on the agenda,
- the next thing on the agenda lies beyond the horizon that `run` was given,
- somebody asked for it with `interrupt`, from a signal handler for instance,
- a rank has held the baton for longer than the patience, in real time, and has not got on
  meanwhile (`gets_on`): `run` returns that rank, which has been given up.

Order
-----

Ranks that can go on are in a queue, in the order in which they became ready; who waits for the
agenda becomes ready at its instant, in the order of being put there. So a run is a function of the
program, unless the program itself looks at the world outside. Another `choose` explores others.

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
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from heapq import heappop, heappush
from signal import SIGINT, default_int_handler
from types import FrameType
from typing import Any, Protocol, Self

from rankwise.base.units import SECOND, Instant
from rankwise.bell import Bell

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
        self._waiters: list[Rank] = []

    def open(self) -> None:
        """Let it happen: the waiting ranks become ready, in the order in which they came."""
        self.is_open = True
        waiters, self._waiters = self._waiters, []
        if waiters:
            waiters[0].scheduler.make_ready(*waiters)

    def told(self) -> str:
        """Say what is waited for, after `waits for`."""
        return "something"

    def named(self) -> str:
        """Name it."""
        return self.told()

    def admit(self, rank: "Rank") -> None:
        """Take note of one who waits."""
        self._waiters.append(rank)


class Timer(Gate):
    """An instant of virtual time."""

    __slots__ = ("instant", "is_cancelled")

    def __init__(self, instant: Instant) -> None:
        super().__init__()
        self.instant = instant
        self.is_cancelled = False

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


class Rank:
    """One rank of a simulated world.

    Attributes:
        number: its place in the world, from 0.
        gate: what it has last begun to wait for, which may have happened; None while it runs.
        exit_code: how it ended; None while it lives.
        has_begun: whether it has ever run.
        is_given_up: whether it has let no other rank run for too long; then it counts as killed.
        is_ready: whether it is in the queue of those that can go on.
        is_aside: whether it belongs to no world, and waits to be called again in another one.
        polled: what it has looked for in vain, and since when it does; `polled_until` is when it
            has last gone on after a look.
        handlers: its signal handlers, by number.
        signals_handled: how many of its signals they have been called for.
        blocked: the signals that it blocks.
        wakeup_fd: where the number of each signal with a handler is written; -1 for nowhere.
        belongings: what `Belongings` keep for it, by keeper.
        process: what it begins with, for those who keep its belongings.
    """

    def __init__(
        self, scheduler: "Scheduler", number: int, process: Any, program: Callable[[], int]
    ) -> None:
        self.scheduler = scheduler
        self.number = number
        self.gate: Gate | None = None
        self.exit_code: int | None = None
        self.handlers: dict[int, Any] = {}
        self.signals_handled = 0
        self.blocked: frozenset[int] = frozenset()
        self.wakeup_fd = -1
        self.belongings: dict[object, Any] = {}
        self.process = process
        self.baton = threading.Lock()
        self.baton.acquire()
        self._program = program
        self._fate: int | None = None
        self._signals: list[int] = []
        self.is_ready = False
        self.has_begun = False
        self.is_given_up = False
        self.is_aside = False
        self.polled: dict[Hashable, Instant] = {}
        self.polled_until = Instant(0)
        self.thread = threading.Thread(target=self._live, name=f"rank {number}", daemon=True)

    @property
    def waits_for(self) -> Gate | None:
        """What it waits for; None while it runs, can go on, or is over."""
        gate = self.gate
        return None if gate is None or gate.is_open else gate

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
        self._fate = code
        raise RankEnded(code)

    def signal(self, number: int) -> None:
        """Send it a signal, which it takes when it runs next."""
        if self.is_over:
            return
        if number == SIGKILL:
            self._fate = -SIGKILL
        self._signals.append(number)
        if (
            self.wakeup_fd >= 0
            and number not in self.blocked
            and callable(self.handlers.get(number))
        ):
            with suppress(OSError):  # nobody reads there, or it is full: it is a hint
                os.write(self.wakeup_fd, bytes([number]))
        self.scheduler.make_ready(self)

    def take_signals(self) -> None:
        """Do what signals mean to this rank, which is the one that runs.

        Raises:
            RankEnded: one of them, or somebody, has ended it.
        """
        while self._signals and self._fate is None:
            number = self.take_pending(lambda number: number not in self.blocked)
            if number is None:
                break
            # As Python, which raises KeyboardInterrupt where nobody has said otherwise.
            default = default_int_handler if number == SIGINT else _DEFAULT
            handler = self.handlers.get(number, default)
            if callable(handler):
                self.signals_handled += 1
                handler(number, sys._getframe(1))  # noqa: SLF001  # as Python gives it
            elif self.is_ended_by(number):
                self._fate = -number
        if self._fate is not None:
            raise RankEnded(self._fate)

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
        self.baton.acquire()
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
        current: who has the baton; None means the conductor.
        is_paused: whether the rank that runs may hold the baton for as long as it wants.
        wake_ups: how often time has passed since no rank was ready.
        at_rest: called when no rank is ready, before time passes; returns whether it has made one
            ready.
        gets_on: asked now and then whether the rank that has the baton has made progress since it
            was asked before, by computing for instance; its patience begins anew then, if nobody
            has asked for a stop. None: holding the baton is no progress.
        on_held: told of a rank that has kept others waiting for `NOTICE_S`, once in a run, and of
            one that keeps a request to stop waiting.
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
        self.broken_by: BaseException | None = None
        self.is_paused = False
        self.wake_ups = 0
        self.at_rest: Callable[[], bool] | None = None
        self.gets_on: Callable[[Rank], bool] | None = None
        self.on_held: Callable[[Rank], None] | None = None
        self._choose = choose
        self._belongings = belongings
        self._cpu = cpu
        self._ready: deque[Rank] = deque()
        self._agenda: list[tuple[Instant, int, Timer]] = []
        self._numbers = 0
        self._horizon: Instant | None = None
        self._is_interrupted = self._is_called = False
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
        self.make_ready(rank)
        return rank

    def run(self, horizon: Instant | None = None, patience_s: float | None = None) -> Rank | None:
        """Let the ranks run until one of the things that the module's text lists has happened."""
        self._horizon = horizon
        self._patience_s = patience_s
        chosen = self._pick()
        stuck = None
        if chosen is not None:
            self.current = chosen
            chosen.baton.release()
            stuck = self._wait_for_baton()
        self._is_interrupted = self._is_called = False
        self._ended_by = SIGKILL
        if self.broken_by is not None:
            raise self.broken_by
        return stuck

    def interrupt(self, patience_s: float | None = None, *, signal: int = SIGKILL) -> None:
        """Have `run` return at the next hand-over, or at once when it is called next.

        A rank that holds the baton for longer than `patience_s` from now is given up, as if this
        signal had ended it. Callable from a signal handler.
        """
        self._is_interrupted = True
        self._ended_by = signal
        if patience_s is not None:
            self._patience_s = patience_s

    def call(self) -> None:
        """Have `run` return as `interrupt` does, for something that ends no rank."""
        self._is_called = True

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
        rank = self.current
        assert rank is not None, "the conductor does not wait like a rank"
        rank.take_signals()
        timer = None
        if until is not None and not gate.is_open:
            timer = self.at(until)
            timer.admit(rank)
        try:
            while not gate.is_open:
                if timer is not None and timer.is_open:
                    return False
                gate.admit(rank)
                rank.gate = gate
                self._hand_over(rank)
                rank.gate = None
                rank.take_signals()
        finally:
            if timer is not None:
                timer.is_cancelled = True
        return True

    def sleep(self, nanoseconds: int) -> None:
        """Let virtual time pass for the rank that runs."""
        self.wait(self.at(Instant(self.now + max(nanoseconds, 0))))

    def wait_for_signal(self) -> None:
        """Let others run until a handler of the rank that runs has been called."""
        rank = self.current
        assert rank is not None, "the conductor does not wait like a rank"
        gate, seen = _Signal(), rank.signals_handled
        rank.take_signals()
        while rank.signals_handled == seen:
            rank.gate = gate
            self._hand_over(rank)
            rank.gate = None
            rank.take_signals()

    def wait_for_pending(self, numbers: frozenset[int], until: Instant | None = None) -> int | None:
        """Take one of these signals of the rank that runs, when it comes; None if none has."""
        rank = self.current
        assert rank is not None, "the conductor does not wait like a rank"
        gate, timer = _Signal(), None
        if until is not None:
            timer = self.at(until)
            timer.admit(rank)
        while (number := rank.take_pending(numbers.__contains__)) is None:
            rank.take_signals()
            if timer is not None and timer.is_open:
                return None
            rank.gate = gate
            self._hand_over(rank)
            rank.gate = None
        if timer is not None:
            timer.is_cancelled = True
        return number

    def yield_to_others(self) -> None:
        """Let all ranks that are ready run before the present one goes on."""
        rank = self.current
        assert rank is not None, "the conductor does not wait like a rank"
        self.make_ready(rank)
        self._hand_over(rank)
        rank.take_signals()

    def poll(self, what: Hashable) -> None:
        """The rank that runs has looked for `what` in vain: let others run, and time pass.

        The longer it looks for that, perhaps for other things in turn, the more: another rank may
        sleep for an hour first.
        """
        rank = self.current
        if rank is None or rank.thread.ident != threading.get_ident():
            return
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

    def make_ready(self, *ranks: Rank) -> None:
        """Let ranks run when it is their turn, in this order."""
        for rank in ranks:
            if not rank.is_ready and rank.exit_code is None:
                rank.is_ready = True
                self._ready.append(rank)

    def arrive(self, rank: Rank) -> None:
        """A rank's thread has the baton for the first time."""
        rank.has_begun = True
        self._belongings.move_in(rank)
        rank.take_signals()

    def leave_for_good(self, rank: Rank, code: int) -> None:
        """A rank is over: the conductor is told."""
        if self.current is not rank:
            return  # it was given up as stuck: no rank waits for it
        self._belongings.move_out(rank)
        rank.exit_code = code
        self._give_back()

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
        """When somebody can go on: now, or at the next thing on the agenda; None means never."""
        if any(not rank.is_over for rank in self._ready) or (self.at_rest and self.at_rest()):
            return self.now
        while self._agenda and self._agenda[0][2].is_cancelled:
            heappop(self._agenda)
        return self._agenda[0][0] if self._agenda else None

    def _pick(self) -> Rank | None:
        """Take the next rank from the queue, letting time pass; None gives the conductor a turn."""
        if self._is_interrupted or self._is_called:
            return None
        ready = self._ready
        while not ready:
            if self.at_rest is not None and self.at_rest():
                continue
            if not self._agenda:
                return None
            instant = self._agenda[0][0]
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
        return chosen if chosen.exit_code is None else self._pick()

    def _hand_over(self, rank: Rank) -> None:
        """Let the next one run, and return when it is this rank's turn again."""
        if rank is not self.current:
            raise RankEnded(-SIGKILL)  # given up as stuck, while others have gone on
        chosen = self._pick()
        if chosen is rank:
            return
        self._hand_overs += 1
        self._belongings.move_out(rank)
        if chosen is None:
            self._give_back()
        else:
            self.current = chosen
            chosen.baton.release()
        rank.baton.acquire()
        self._belongings.move_in(rank)

    def _give_back(self) -> None:
        self.current = None
        self._bell.ring()

    def _wait_for_baton(self) -> Rank | None:
        seen, patience_s, held_s, still_s = self._hand_overs, self._patience_s, 0.0, 0.0
        while not self._bell.wait(self._glance_after):
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
                self.current = None
                rank.is_given_up = True
                rank.exit_code = -self._ended_by
                return rank
            elif held_s >= self._notice_s:
                self._tell_of(rank)
        return None

    def _gets_on(self, rank: Rank) -> bool:
        if self.gets_on is None or self._patience_s is None or self._is_interrupted:
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
        """Tell, once, that a rank keeps others waiting, or the one who asked for a stop."""
        others = (other for other in self.ranks.values() if other is not rank)
        is_missed = self._is_interrupted or any(other.exit_code is None for other in others)
        if is_missed and self.on_held and self._is_interrupted not in self._told_while_interrupted:
            self._told_while_interrupted.add(self._is_interrupted)
            self.on_held(rank)
