"""Ranks as threads that pass a run token, in virtual time.

Theory of operation
===================

Each rank is an OS thread, since libraries keep state per thread that no greenlet could carry along
(torch's grad mode, pybind11's loader life support). Exactly one thread holds the *run token* and
runs; every other thread of the world waits for a lock of its own. A rank runs until it waits for
something simulated: a collective, a message, virtual time. Then it chooses the next rank and
hands the token over directly, which is one switch of threads, 5 us where all of them are pinned to
one core. Nothing here is locked: the thread with the token may change everything.

The thread that made the world is its *scheduler thread*. It hands the token to the ranks with
`run`, and gets it back when

- a rank has ended,
- no rank can go on: none is ready and nothing is on the agenda,
- the next thing on the agenda lies beyond the horizon that `run` was given,
- `interrupt` asked for it, from a signal handler for instance,
- a rank has held the token for longer than the patience, in real time, without progress
  meanwhile (`makes_progress`): `run` returns that rank, which has been given up.

Order
-----

Ranks that can go on are in a queue, in the order in which they became ready. A rank that waits for
the agenda becomes ready at its instant, in the order of being put there. So a run is a function of
the program, unless the program itself looks at the world outside. Another `choose` explores others.
"""

import os
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from heapq import heappop, heappush
from threading import get_ident
from typing import Any, Protocol, Self

from rankwise.base.units import Instant
from rankwise.simranks.world.gates import Gate, SignalGate, VirtualTimer
from rankwise.simranks.world.patience import TokenPatience
from rankwise.simranks.world.ranks import SIGKILL, Rank, RankEnded, Strand, end_of, not_for_threads
from rankwise.simranks.world.turns import Turns
from rankwise.wakeup import Wakeup

set_affinity = os.sched_setaffinity
"""That of the kernel: what ranks call is another one (`process_patches`)."""


class PerRankState(Protocol):
    """What of the process each rank has for itself; moved in and out at each hand-over."""

    def move_in(self, rank: Rank) -> None:
        """Let this rank find what it left."""
        ...

    def move_out(self, rank: Rank) -> None:
        """Keep for this rank what it leaves."""
        ...


class Scheduler:
    """Runs the ranks of one world, one at a time, while it is entered.

    Args:
        choose: says which of the ready ranks runs next, as an index; None takes the first.
        own_state: what is moved in and out at each hand-over.
        cpu: the core that rank threads are pinned to; None leaves them alone.

    Attributes:
        now: virtual time, in nanoseconds; it may be set forward by the scheduler thread.
        ranks: those of the present attempt, by number.
        holder: the strand that has the token; None means the scheduler thread.
        current: its rank.
        turns: of the threads that ranks have started; `helpers` are their strands.
        patience: with a rank that holds the token.
        is_interrupted: whether `interrupt` has asked for the present `run` to return.
        is_paused: whether the rank that runs may hold the token for as long as it wants.
        wake_ups: how often time has passed since no rank was ready.
        on_idle: called when no rank is ready, before time passes; returns whether it has made one
            ready.
        on_given_up: told of a rank that has been given up, as nothing else can be done for it.
    """

    def __init__(
        self,
        *,
        choose: Callable[[int], int] | None = None,
        own_state: PerRankState,
        cpu: int | None = None,
    ) -> None:
        self.now = Instant(0)
        self.ranks: dict[int, Rank] = {}
        self.current: Rank | None = None
        self.holder: Strand | None = None
        self.turns = Turns(self)
        # Of `turns`, which changes it in place: a hand-over costs microseconds, and looks here.
        self.helpers = self.turns.helpers
        self.broken_by: BaseException | None = None
        self.is_paused = False
        self.wake_ups = 0
        self.on_idle: Callable[[], bool] | None = None
        self.on_given_up: Callable[[Rank], None] | None = None
        self._choose = choose
        self._own_state = own_state
        self._cpu = cpu
        self._ready: deque[Strand] = deque()
        self._asks = self.turns.asks
        self._agenda: list[tuple[Instant, int, VirtualTimer]] = []
        self._numbers = 0
        """Orders entries of one instant, the earlier made first."""
        self._horizon: Instant | None = None
        """When the scheduler thread is due: ranks let no time pass beyond."""
        self.is_interrupted = self._is_called = False
        self._ended_by = SIGKILL
        self.patience = TokenPatience()
        self._hand_overs = 0
        self._wakeup: Wakeup

    def __enter__(self) -> Self:
        self._wakeup = Wakeup()
        return self

    def __exit__(self, *_: object) -> None:
        self._wakeup.close()

    def spawn(self, number: int, process: Any, program: Callable[[], int]) -> Rank:
        """Make a rank: `program` returns its exit code. It is ready, and runs when it is chosen."""
        rank = self.ranks[number] = Rank(self, number, process, program)
        rank.thread.start()
        # A thread that it starts is no daemon then, as in a process; Python waits for none of them
        # itself.
        rank.thread._daemonic = False  # type: ignore[attr-defined]  # noqa: SLF001  # no public way
        self.make_ready(rank.main)
        return rank

    def run(self, horizon: Instant | None = None, patience_s: float | None = None) -> Rank | None:
        """Let the ranks run until one of the things that the module's text lists has happened."""
        self._horizon = horizon
        self.patience.limit_s = patience_s
        chosen = self._pick()
        # A thread without the token runs in real time: it may still make a rank ready.
        while chosen is None and self._awaits_threads:
            if self.is_interrupted or self._is_called:
                break
            self.turns.wait_for_ask()
            chosen = self._pick()
        stuck = None
        if chosen is not None:
            self._pass_to(chosen)
            stuck = self._wait_for_token()
        self.is_interrupted = self._is_called = False
        self._ended_by = SIGKILL
        if self.broken_by is not None:
            raise self.broken_by
        return stuck

    def interrupt(self, patience_s: float | None = None, *, signal: int = SIGKILL) -> None:
        """Have `run` return at the next hand-over, or at once when it is called next.

        A rank that holds the token for longer than `patience_s` from now is given up, as if this
        signal had ended it. Callable from a signal handler.
        """
        self.is_interrupted = self.patience.is_stopping = True
        self._ended_by = signal
        if patience_s is not None:
            self.patience.limit_s = patience_s
        self._wakeup.ring()  # it may rest, or wait for a strand that is parked

    def call(self) -> None:
        """Have `run` return as `interrupt` does, for something that ends no rank."""
        self._is_called = True
        self._wakeup.ring()

    def return_by(self, instant: Instant) -> None:
        """Have `run` return before time passes this instant, if it would pass it."""
        # Only ever earlier: several watchers may ask, and each must get its turn.
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
            self.take_signals(strand)
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
                    self.take_signals(strand)
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
        # Counted before the first look: a signal between look and wait would be slept through.
        gate, seen = SignalGate(), rank.signals_handled
        self.take_signals(strand)
        while rank.signals_handled == seen:
            strand.gate = gate
            self._hand_over(strand)
            strand.gate = None
            self.take_signals(strand)

    def wait_for_pending(self, numbers: frozenset[int], until: Instant | None = None) -> int | None:
        """Take one of these signals of the rank that runs, when it comes; None if none has."""
        strand = self._own()
        rank = strand.rank
        gate, timer = SignalGate(), None
        if until is not None:
            timer = self.at(until)
            timer.is_deadline = True
            timer.admit(strand)
        while (number := rank.take_pending(numbers.__contains__)) is None:
            self.take_signals(strand)
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
        self.take_signals(strand)

    def poll(self, what: Hashable) -> None:
        """The rank that runs has looked for `what` in vain: let others run, and time pass.

        The longer it looks for that, perhaps for other things in turn, the more: another rank may
        sleep for an hour first.
        """
        strand = self.holder
        if strand is None or strand.ident != get_ident():
            return
        polling = strand.rank.polling
        self.sleep(polling.pause_after(what, self.now))
        polling.go_on(self.now)

    def at(self, instant: Instant) -> VirtualTimer:
        """A gate that opens at `instant`."""
        timer = VirtualTimer(instant)
        self.put(timer)
        return timer

    def put(self, timer: VirtualTimer) -> None:
        """Put a timer on the agenda."""
        # Timers of one instant open in the order in which they were made: equal runs stay equal.
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
        self._own_state.move_in(rank)
        rank.take_signals()

    def leave_for_good(self, rank: Rank, code: int) -> None:
        """A rank is over: the scheduler thread is told."""
        if self.holder is not rank.main:
            return  # it was given up as stuck: no rank waits for it
        self._own_state.move_out(rank)
        rank.exit_code = code
        self.turns.dismiss(rank)
        self._give_back()

    def give_up(self, rank: Rank, code: int) -> None:
        """Count a rank as ended that blocks where it cannot be unwound; call it with the token."""
        # Its thread cannot be ended, and may come back later: from now on each call of it raises.
        rank.is_given_up = True
        rank.exit_code = code
        self.turns.dismiss(rank)
        if self.on_given_up is not None:
            self.on_given_up(rank)

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
            self.turns.admit()
        # Strands of ranks that are over stay in the queue until `_pick` drops them.
        if any(not strand.rank.is_over for strand in self._ready):
            return self.now
        if self.on_idle and self.on_idle():
            return self.now
        # A cancelled timer must not let time pass. Taking it out of the heap when it is cancelled
        # would cost a search.
        while self._agenda and self._agenda[0][2].is_cancelled:
            heappop(self._agenda)
        if self._awaits_threads:
            return self.now
        return self._agenda[0][0] if self._agenda else None

    def _pick(self) -> Strand | None:
        """Take the next one from the queue, and let time pass; None: the scheduler thread."""
        if self.is_interrupted or self._is_called:
            return None
        if self._asks:
            self.turns.admit()
        ready = self._ready
        while not ready:
            if self.on_idle is not None and self.on_idle():
                continue
            if not self._agenda:
                return None
            instant = self._agenda[0][0]
            # Time must not pass while a thread works: it would be late by what it takes in real
            # time.
            if self.helpers and self._awaits_threads:
                return None
            if self._horizon is not None and instant > self._horizon:
                return None
            timer = heappop(self._agenda)[2]
            if not timer.is_cancelled:
                self.wake_ups += 1
                # Never backwards: the scheduler thread may have set the time forward meanwhile.
                self.now = max(self.now, instant)
                timer.open()
        if self._choose is None:
            chosen = ready.popleft()
        else:
            # The explorer of orders decides here; else first come, first served.
            index = self._choose(len(ready))
            chosen = ready[index]
            del ready[index]
        chosen.is_ready = False
        is_main = chosen is chosen.rank.main and not chosen.is_away
        if is_main and chosen.rank.exit_code is None:  # as `takes_token`, which is slower
            return chosen
        return chosen if chosen.takes_token else self._pick()

    def _hand_over(self, strand: Strand) -> None:
        """Let the next one run, and return when it is this one's turn again."""
        if strand is not self.holder:
            raise RankEnded(-SIGKILL)  # given up as stuck, while others have gone on
        chosen = self._pick()
        if chosen is strand:
            return
        strand.displaced = None  # from now on others run, so it has to ask
        # As `leave_to_next` and `wait_for_turn`, without their calls: this is most of a collective.
        rank, own_state = strand.rank, self._own_state
        self._hand_overs += 1
        own_state.move_out(rank)
        if chosen is None:
            self._give_back()
        else:
            self.turns.is_rest_certain = False
            self.current, self.holder = chosen.rank, chosen
            chosen.run_token.release()
        strand.run_token.acquire()
        if strand.is_dismissed:
            raise end_of(strand)
        own_state.move_in(rank)

    def leave_to_next(self, rank: Rank) -> None:
        """The strand that has the token passes it on, or back to the scheduler thread."""
        chosen = self._pick()
        self._hand_overs += 1
        self._own_state.move_out(rank)
        if chosen is None:
            self._give_back()
        else:
            self._pass_to(chosen)

    def _pass_to(self, strand: Strand) -> None:
        self.turns.is_rest_certain = False
        self.current, self.holder = strand.rank, strand
        strand.run_token.release()

    def wait_for_turn(self, strand: Strand) -> None:
        """Wait until the token comes to this strand, which is the caller's."""
        strand.run_token.acquire()
        if strand.is_dismissed:
            raise end_of(strand)
        self._own_state.move_in(strand.rank)

    def take_back(self, strand: Strand) -> None:
        """The scheduler thread has taken the token from a strand that naps."""
        self.current = self.holder = None
        self._own_state.move_out(strand.rank)

    def ring(self) -> None:
        """Wake the scheduler thread."""
        self._wakeup.ring()

    def wait_for_ring(self, glance_after: Callable[[], float]) -> bool:
        """The scheduler thread waits to be woken; False if it has not been for so long."""
        return self._wakeup.wait(glance_after)

    @property
    def is_to_return(self) -> bool:
        """Whether the present `run` has been asked to return."""
        return self.is_interrupted or self._is_called

    def _give_back(self) -> None:
        self.current = self.holder = None
        self._wakeup.ring()

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
            raise end_of(own)  # given up as stuck, while others have gone on
        raise not_for_threads(own, "a call that waits for other ranks")

    def take_signals(self, strand: Strand) -> None:
        """Call the handlers of a rank's signals, in its main thread; end a thread of a dead one."""
        rank = strand.rank
        if strand is rank.main:
            if rank.has_signals:
                rank.take_signals()
        elif rank.is_to_end or strand.is_dismissed:  # as Python, where the main thread handles them
            raise end_of(strand)

    @property
    def _awaits_threads(self) -> bool:
        """Whether a thread without the token may ask for it, before virtual time passes.

        If ranks sleep, time passes: they may look in a loop for what a thread does. But a time-out
        of virtual time must not strike because a thread takes real time.
        """
        if self._asks:
            return True
        # A rank sleeps: it may do so in a loop that looks for what a thread does, so time passes.
        if self._agenda and not (self._agenda[0][2].is_deadline or self._agenda[0][2].is_cancelled):
            return False
        return self.turns.can_be_asked

    def _wait_for_token(self) -> Rank | None:
        patience = self.patience
        patience.begin(self._hand_overs)
        while True:
            if self._wakeup.wait(self._glance_after):
                if self.holder is None or self.turns.has_taken_from_parked():
                    return None
                continue  # it was rung for an interrupt
            glance_s, rank = self._glance_after(), self.current
            if rank is None or self.is_paused:
                patience.begin(self._hand_overs)
            elif not patience.look(rank, glance_s, self._hand_overs):
                continue
            # It blocks in C, or computes for ever: Python cannot end a thread, so the run goes on
            # without it.
            elif patience.is_over:
                self.current = self.holder = None
                self._own_state.move_out(rank)  # what it has must not stay for the next one
                self.give_up(rank, -self._ended_by)
                return rank
            elif patience.is_notice_due(is_interrupted=self.is_interrupted):
                others = (other for other in self.ranks.values() if other is not rank)
                do_others_wait = any(other.exit_code is None for other in others)
                patience.tell_of(
                    rank, do_others_wait=do_others_wait, is_interrupted=self.is_interrupted
                )

    def _glance_after(self) -> float:
        return self.patience.glance_after(is_interrupted=self.is_interrupted)
