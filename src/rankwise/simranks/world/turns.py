"""The threads that ranks have started, and the turns in which they have the run token.

Theory of operation
===================

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

When no rank is ready, a thread without the token may still ask. The scheduler thread waits for it
in real time before `Scheduler.run` returns, unless each such thread waits for another one of them,
which is a deadlock, or none has made progress for the patience, or `NOTICE_S`.

`_door` guards what threads without the token touch: which strand is parked, and which takes over.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import thread as pools
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

from rankwise.simranks.world.ranks import Strand, end_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankwise.simranks.world.ranks import Nap, Rank
    from rankwise.simranks.world.scheduler import Scheduler


class Turns:
    """Lets threads that ranks have started take the token of a scheduler.

    Attributes:
        helpers: the strands of the threads that ranks have started and that live, by ident.
        asks: the strands that ask for the token, the first one first.
        is_rest_certain: whether no thread without the token will ask before a rank runs.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.helpers: dict[int, Strand] = {}
        self.asks: deque[Strand] = deque()
        self.is_rest_certain = False
        self._scheduler = scheduler
        self._door = threading.RLock()
        self._is_resting = False
        self._starting = 0

    @contextmanager
    def starting_thread(self) -> Iterator[None]:
        """A rank starts a thread, which begins with `begin_thread`; until then it may ask, too."""
        with self._door:
            # Before it runs it is in no list: without this count the world would look like a
            # deadlock.
            self._starting += 1
        try:
            yield
        except BaseException:  # there are too many of them, for instance
            self._end_start()
            raise

    def _end_start(self) -> None:
        with self._door:
            self._starting -= 1
            self._ring_if_resting()

    def begin_thread(self, rank: Rank, thread: threading.Thread | None) -> Strand:
        """The calling thread, which a rank has started, begins."""
        strand = Strand(rank, thread, get_ident())
        with self._door:
            self.helpers[strand.ident] = strand
            rank.helpers.append(strand)
            self._starting -= 1
        return strand

    def own_strand(self) -> Strand | None:
        """The strand of the calling thread; None if it is no rank's."""
        holder, ident = self._scheduler.holder, get_ident()
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
        # Turns nest: a library's lock may be taken inside of a call that has one already.
        strand.turns += 1
        try:
            yield
        finally:
            strand.turns -= 1
            if not strand.turns and strand is self._scheduler.holder:
                self._end_turn(strand)

    def _begin_turn(self, strand: Strand) -> None:
        rank = strand.rank
        with self._door:
            if strand.is_dismissed or rank.is_over:
                raise end_of(strand)
            if self._takes_from_parked(strand):
                return
            self._ask(strand)
        try:
            self._scheduler.wait_for_turn(strand)
        finally:
            strand.is_asking = False

    def _takes_from_parked(self, strand: Strand) -> bool:
        """Whether a strand takes the token from a sibling that is parked; with the door held."""
        parked = self._scheduler.holder
        if parked is None or parked.rank is not strand.rank or not parked.is_parked:
            return False
        parked.is_parked, parked.is_away = False, True
        # No hand-over: both are of one rank, whose state stays where it is.
        strand.displaced, self._scheduler.holder = parked, strand
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
                # Back to the sibling that waits in real time: nothing of another rank has run
                # meanwhile.
                self._scheduler.holder = displaced
                return
        self._scheduler.leave_to_next(strand.rank)

    def nap(self, nap: Nap, wait: Callable[[], Any]) -> Any:
        """Wait in real time for a sibling, in whichever thread of a rank this is.

        A thread that has the token lets siblings have it. `wait` blocks, and must return soon after
        `nap.interrupt`.

        Raises:
            RankEnded: the rank has ended meanwhile.
        """
        own = self._scheduler.holder
        if own is None or own.ident != get_ident():
            return self._nap_without_token(nap, wait)
        # Its thread waits for a thread that it starts, which cannot ask before it has begun.
        if own.is_starting:
            return wait()
        with self._door:
            own.nap = nap
            own.is_away = self._scheduler.is_interrupted or self._must_others_run(own)
            # It keeps the token for its siblings if no other rank must run, which spares two hand-
            # overs.
            own.is_parked = not own.is_away
        if own.is_away:
            own.displaced = None
            self._scheduler.leave_to_next(own.rank)
        try:
            return wait()
        finally:
            with self._door:
                own.nap = None
                has_token, own.is_parked = own.is_parked, False
                if not has_token:
                    own.is_away = False
                    has_token = self._takes_from_parked(own)
                if not has_token:
                    self._ask(own)
            if not has_token:
                try:
                    self._scheduler.wait_for_turn(own)
                finally:
                    own.is_asking = False
            self._scheduler.take_signals(own)

    def _nap_without_token(self, nap: Nap, wait: Callable[[], Any]) -> Any:
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
        # A sibling that waits for the token, or in simulated time, can only go on if others run.
        if any(each.is_in_line for each in siblings):
            return True
        # If no sibling can help, another rank holds what it waits for, a lock of a library perhaps.
        return not any(map(_may_ask, (strand, *siblings)))

    def _leave_for_parked(self, rank: Rank) -> None:
        """A thread without the token naps or ends: its rank's parked strand may need others now."""
        parked = self._scheduler.holder
        if parked is None or parked.rank is not rank or not parked.is_parked:
            return
        if self._must_others_run(parked):
            parked.is_parked, parked.is_away = False, True
            self._scheduler.leave_to_next(rank)

    def _ask(self, strand: Strand) -> None:
        """Ask for the token, with the door held."""
        if strand.is_dismissed:
            raise end_of(strand)
        strand.is_asking = True
        self.is_rest_certain = False
        # First come, first served: a thread that asks again and again must not starve another one.
        self.asks.append(strand)
        self._ring_if_resting()

    def _ring_if_resting(self) -> None:
        if self._is_resting:
            self._scheduler.ring()

    def admit(self) -> None:
        """Put the strands that ask into the queue."""
        while self.asks:
            self._scheduler.make_ready(self.asks.popleft())

    @property
    def can_be_asked(self) -> bool:
        """Whether a thread without the token may ask for it, as it does not wait for others."""
        if self.is_rest_certain:
            return False
        # A thread begins and ends to wait, asks, begins and ends with the door held. So this is a
        # picture of one moment: a thread that has just let another one go on still runs in it.
        with self._door:
            threads = [*self.helpers.values()]
            # A main thread that is away has given up the token, and asks like any other.
            threads += [rank.main for rank in self._scheduler.ranks.values() if rank.main.is_away]
            return bool(self._starting or self.asks or any(map(_may_ask, threads)))

    def wait_for_ask(self) -> None:
        """Let threads without the token come to ask for it, in real time."""
        scheduler, patience = self._scheduler, self._scheduler.patience
        self._is_resting = True
        try:
            still_s = 0.0
            while not (self.asks or scheduler.is_to_return) and self.can_be_asked:
                if scheduler.wait_for_ring(lambda: patience.rest_glance_s):
                    continue
                first = [strand.rank for strand in [*self.helpers.values()][:1]]
                makes_progress = any(map(patience.has_progress, first))
                still_s = 0.0 if makes_progress else still_s + patience.rest_glance_s
                if still_s >= patience.of_resting_s:
                    self.is_rest_certain = True
        finally:
            self._is_resting = False

    def has_taken_from_parked(self) -> bool:
        """Whether the scheduler thread has taken the token of a strand that naps, to end it or so.

        Nothing runs with the token while it naps, so its rank's state can be moved out from here.
        """
        with self._door:
            strand = self._scheduler.holder
            if not self._scheduler.is_interrupted or strand is None or not strand.is_parked:
                return False
            strand.is_parked, strand.is_away = False, True
            self._scheduler.take_back(strand)
        return True

    def dismiss(self, rank: Rank) -> None:
        """Let the threads of a rank that is over end, where they wait for the world.

        Python joins threads of pools when this process ends. The event that they wait for may never
        happen.
        """
        with self._door:
            for strand in rank.strands:
                is_waiting = strand.is_in_line and strand is not self._scheduler.holder
                strand.is_dismissed = True
                if is_waiting and strand.run_token.locked():
                    strand.run_token.release()
                if strand.thread is not None:
                    pools._threads_queues.pop(strand.thread, None)  # type: ignore[attr-defined]  # noqa: SLF001  # no public way


def _may_ask(strand: Strand) -> bool:
    """Whether a thread may come to ask for the token without any other one's doing."""
    if strand.rank.is_over or strand.is_in_line:
        return False
    return strand.nap is None or not strand.nap.is_known_to_last
