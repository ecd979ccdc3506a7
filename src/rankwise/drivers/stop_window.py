"""Tells a stop from a failure when a signal is sent to all processes of a run at once.

SLURM, systemd and others send SIGTERM to every process of a job, and a rank may have died of it
before the agent reads its own. So a rank's death by such a signal is held back for a moment, with
all that is heard of the gang after it. If the run is asked to stop meanwhile, the death belongs to
that; if not, it is a failure like any other, told a moment late.

The real driver and the simulated one share it.
"""

from collections.abc import Callable, Collection

import msgspec

from rankwise.base.units import MILLISECOND, Duration, Instant, after
from rankwise.core.gang.vocabulary import Stimulus, StopRequested, WorkerExited
from rankwise.ports.clock import Clock

WINDOW = Duration(300 * MILLISECOND)
"""How much later than a rank the agent may hear of the signal."""


class StopWindow:
    """Stands between a process host and the agent.

    Args:
        clock: of this node.
        call_at: calls back at an instant of that clock.
        signals: by which the run is asked to stop.
        pass_on: takes what is not held back any more.
    """

    def __init__(
        self,
        clock: Clock,
        call_at: Callable[[Instant, Callable[[], None]], object],
        signals: Collection[int],
        pass_on: Callable[[Stimulus], None],
    ) -> None:
        self._clock = clock
        self._call_at = call_at
        self._signals = signals
        self._pass_on = pass_on
        self._held: list[Stimulus] = []
        self._is_stop_asked = False

    def holds(self, stimulus: Stimulus, gang_runs: bool) -> bool:
        """Keep a fact for later, if it must wait; tell whether it does."""
        if isinstance(stimulus, StopRequested):
            self._is_stop_asked = True
            return False
        if not self._held and not (gang_runs and self._may_be_a_stop(stimulus)):
            return False
        if not self._held:
            self._call_at(after(self._clock.now(), WINDOW), self._close)
        self._held.append(stimulus)
        return True

    def look(self, gang_runs: bool) -> None:
        """Pass on what was held back, if the gang was told to stop since."""
        if self._held and not gang_runs:
            self._let_go(belongs_to_stop=True)

    def _close(self) -> None:
        """No request to stop has come. One that has come stops the gang when all have agreed."""
        if not self._is_stop_asked:
            self._let_go(belongs_to_stop=False)

    def _let_go(self, *, belongs_to_stop: bool) -> None:
        held, self._held = self._held, []
        for stimulus in held:
            if belongs_to_stop and isinstance(stimulus, WorkerExited):
                # Later than the stop, which may have been ordered at this very instant.
                at = after(self._clock.now(), Duration(1))
                stimulus = msgspec.structs.replace(stimulus, at=at)  # noqa: PLW2901
            self._pass_on(stimulus)

    def _may_be_a_stop(self, stimulus: Stimulus) -> bool:
        if not isinstance(stimulus, WorkerExited):
            return False
        code = stimulus.exit.code
        return any(code in (-signal, 128 + signal) for signal in self._signals)
