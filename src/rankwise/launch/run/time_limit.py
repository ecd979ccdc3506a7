"""Ends a run that has taken too long, once it is known where its ranks stand.

The limit is known beforehand, so the ranks that keep others waiting are looked up twice: `WINDOW`
before the time is over, and then. Only a rank that does so both times, in the same call, is told:
at any moment one of them is a little behind. Stacks are taken before ranks are told to stop. As
elsewhere, the run waits for the stacks of a stopped rank. All of this takes at most `PATIENCE`;
after that, the run stops without the missing answers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from rankwise.base.units import MILLISECOND, Duration, after
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.reactor import Reactor
from rankwise.launch.looking.hang_explanation import HangExplanation, NodesAnswer, best_of
from rankwise.ports.clock import Clock

if TYPE_CHECKING:
    from rankwise.launch.looking.watches import Watches

WINDOW = Duration(500 * MILLISECOND)
PATIENCE = Duration(800 * MILLISECOND)
"""More than the stacks of ranks that cannot answer are waited for."""


class RunTimeLimit:
    """The time limit of one run.

    Args:
        timeout: how long the run may take, from now on.
        host: shows where the ranks stand.
        reactor: wakes when it is time to look.
        clock: tells when that is.
        watches: ask the ranks and the other nodes, and read who waits for whom.
        is_needed: whether the run still goes on, and no stop was requested.
        stop: is told that the time is over: who keeps the others waiting, if that is known, what
            each rank waits for, and its stacks, by local rank.
    """

    def __init__(
        self,
        timeout: Duration,
        *,
        host: RealProcessHost,
        reactor: Reactor,
        clock: Clock,
        watches: "Watches",
        is_needed: Callable[[], bool],
        stop: Callable[[str, Mapping[int, str], Mapping[int, str]], None],
    ) -> None:
        self._host = host
        self._reactor = reactor
        self._clock = clock
        self._watches = watches
        self._is_needed = is_needed
        self._stop = stop
        self._before = HangExplanation()
        now = clock.now()
        self._reactor.call_at(after(now, Duration(max(timeout // 2, timeout - WINDOW))), self._look)
        self._reactor.call_at(after(now, timeout), self._end)

    def _look(self) -> None:
        if self._is_needed():
            self._find_verdict(self._note_before)

    def _note_before(self, found: HangExplanation) -> None:
        self._before = found

    def _end(self) -> None:
        if self._is_needed():
            look = _LastCheck(self._clock, self._reactor, self._tell)
            self._host.collect_stacks(look.on_stacks)
            self._find_verdict(look.on_verdict)

    def _tell(self, found: HangExplanation, stacks: Mapping[int, str]) -> None:
        if self._is_needed():
            verdict = found.text if found.agrees_with(self._before) else ""
            self._stop(verdict, self._watches.explain_hang()[1], stacks)

    def _find_verdict(self, on_verdict: Callable[[HangExplanation], None]) -> None:
        """Find out who keeps the others waiting, on all nodes."""

        def choose(own: HangExplanation, told: NodesAnswer | None) -> None:
            on_verdict(best_of(own, told))

        self._watches.ask_recorders(
            lambda: self._watches.ask_other_nodes(partial(choose, self._watches.explain_hang()[0]))
        )


class _LastCheck:
    """Waits for the verdict and for the stacks, and not for longer than `PATIENCE`."""

    def __init__(
        self,
        clock: Clock,
        reactor: Reactor,
        on_done: Callable[[HangExplanation, Mapping[int, str]], None],
    ) -> None:
        self._on_done = on_done
        self._verdict: HangExplanation | None = None
        self._stacks: Mapping[int, str] | None = None
        self._timer = reactor.call_at(after(clock.now(), PATIENCE), self._finish)

    def on_stacks(self, stacks: Mapping[int, str]) -> None:
        self._stacks = stacks
        self._finish_if_complete()

    def on_verdict(self, verdict: HangExplanation) -> None:
        self._verdict = verdict
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        if self._stacks is not None and self._verdict is not None:
            self._timer.fire()

    def _finish(self) -> None:
        self._on_done(self._verdict or HangExplanation(), self._stacks or {})
