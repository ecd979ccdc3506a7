"""Which agents run, and the job's exit code. No I/O: the driver reports what happens.

The placement group has a *bundle* for each agent. Its state is

    PENDING  from the start, and again after its agent was lost: Ray looks for a node
    RUNNING  an agent runs there
    ENDED    its agent has ended with a code, and with it the run as far as this node knows
    GIVEN_UP its agents were lost too often

The job is over when no agent runs, and either an agent has ended by itself, or no bundle is
pending. In the first case, pending bundles do not count: the other agents have finished.
"""

from enum import Enum

LOSSES_MAX = 3
"""How often a bundle gets another agent: nodes die, but not again and again under one agent."""


class BundleState(Enum):
    """See the module's text."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    GIVEN_UP = "given up"


class ActorPlacement:
    """All bundles of one job.

    Attributes:
        states: of each bundle.
        stop_signal: the first signal that was passed on, if any.
    """

    def __init__(self, count: int) -> None:
        self.states = [BundleState.PENDING] * count
        self.stop_signal: int | None = None
        self._losses = [0] * count
        self._codes: dict[int, int] = {}

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to wait for."""
        if BundleState.RUNNING in self.states:
            return False
        is_anybody_wanted = self.stop_signal is None and not self._codes
        return not (is_anybody_wanted and BundleState.PENDING in self.states)

    @property
    def code(self) -> int:
        """The job's exit code, from those of the agents, which share one verdict.

        An agent reports success only if all nodes of the run have succeeded. So one success
        outweighs an agent that was stopped or lost before.
        """
        if 0 in self._codes.values():
            return 0
        if self._codes:
            return self._codes[min(self._codes)]
        return 1 if self.stop_signal is None else 128 + self.stop_signal

    def begin(self, bundle: int) -> None:
        """An agent has begun."""
        self.states[bundle] = BundleState.RUNNING

    def end(self, bundle: int, code: int) -> None:
        """An agent has ended by itself."""
        self.states[bundle] = BundleState.ENDED
        self._codes[bundle] = code

    def lose(self, bundle: int) -> bool:
        """An agent was lost, perhaps with its node; returns whether to start another one."""
        self._losses[bundle] += 1
        gives_up = self._losses[bundle] > LOSSES_MAX or self.stop_signal is not None
        self.states[bundle] = BundleState.GIVEN_UP if gives_up else BundleState.PENDING
        return not gives_up

    def stop(self, signal: int) -> list[int]:
        """A signal has come; returns the bundles whose agents get it."""
        if self.stop_signal is None:
            self.stop_signal = signal
        return [bundle for bundle, state in enumerate(self.states) if state is BundleState.RUNNING]
