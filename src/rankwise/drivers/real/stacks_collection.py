"""Collects the stacks of all threads from workers that print them into their report pipes.

faulthandler has no last word: stacks are complete when nothing more has come for a while.
"""

from collections.abc import Callable, Mapping

import msgspec

from rankwise.base.units import MILLISECOND, Duration, after
from rankwise.drivers.real.reactor import Reactor, ReactorTimer
from rankwise.drivers.real.worker_link import WorkerLink
from rankwise.ports.clock import Clock

STACKS_QUIET = Duration(60 * MILLISECOND)
"""Stacks are complete when nothing more has come for this long."""
STACKS_PATIENCE = Duration(600 * MILLISECOND)
"""How long a worker may take to begin printing its stacks: it may be stopped or swapped out. Less
than `GangSpec.stacks_timeout`, so that the others' stacks are shown before any rank dies."""

OnDone = Callable[[dict[int, str]], None]


class _Request(msgspec.Struct):
    """A request for the stacks of these workers."""

    waiting: set[int]
    on_done: list[OnDone]
    timer: ReactorTimer | None = None


class StacksCollection:
    """Asks the workers of the latest attempt, all at once.

    Args:
        reactor: waits.
        clock: its clock.
        links: the workers by local rank, as they are at any time.
        ask: makes a worker print its stacks.
    """

    def __init__(
        self,
        reactor: Reactor,
        clock: Clock,
        links: Mapping[int, WorkerLink],
        ask: Callable[[WorkerLink], None],
    ) -> None:
        self._reactor = reactor
        self._clock = clock
        self._links = links
        self._ask = ask
        self._request: _Request | None = None

    def collect(self, on_done: OnDone) -> None:
        """Ask all workers that can answer; call back with text by local rank."""
        if self._request is not None:
            # They are being collected already: all callers get the same.
            self._request.on_done.append(on_done)
            return
        ready = [link for link in self._links.values() if link.is_ready and not link.is_over]
        request = self._request = _Request({link.local_rank for link in ready}, [on_done])
        for link in ready:
            link.reports.take_stacks()  # what an earlier request left is not part of the answer
            self._ask(link)
        # By a timer even with no worker to ask: a caller must not be called back from inside its
        # call.
        self._expect(request, STACKS_PATIENCE if ready else Duration(0))

    def on_report(self, local_rank: int) -> None:
        """Something has come through a worker's report pipe."""
        request = self._request
        if request is None or not self._links[local_rank].reports.has_stacks:
            return
        request.waiting.discard(local_rank)
        if not request.waiting:
            self._expect(request, STACKS_QUIET)

    def on_over(self, local_rank: int) -> None:
        """A worker that has ended prints no more; if it was the last, all that came is all."""
        request = self._request
        if request is None:
            return
        request.waiting.discard(local_rank)
        if all(other.is_over for other in self._links.values()):
            self._finish(request)
        elif not request.waiting:
            self._expect(request, STACKS_QUIET)

    def _expect(self, request: _Request, patience: Duration) -> None:
        if request.timer is not None:
            request.timer.cancel()
        deadline = after(self._clock.now(), patience)
        request.timer = self._reactor.call_at(deadline, lambda: self._finish(request))

    def _finish(self, request: _Request) -> None:
        if request.timer is not None:
            request.timer.cancel()
        if self._request is request:
            self._request = None
        # Of all: a worker that has died of a fatal error has printed its stacks unasked.
        stacks = {rank: link.reports.take_stacks() for rank, link in self._links.items()}
        found = {rank: text for rank, text in stacks.items() if text}
        for on_done in request.on_done:
            on_done(found)
