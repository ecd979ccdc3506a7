"""One gang on one node, and how it stops: ranks that count their steps all do so after the same.

Asked to stop, the agent lets the ranks stand that call `rankwise.should_stop`, and has them stop at
the largest step of any. They are not sent the signal by which the run was asked to stop, which
would end a step too early; they keep their grace, and the kill at its end is sent as ever. Ranks
that count no steps are told by the signal.
"""

from functools import partial
from typing import TYPE_CHECKING

from rankwise.core.gang.machine import Gang
from rankwise.core.gang.state import Phase
from rankwise.core.gang.vocabulary import Stimulus, StopRequested, WorkerExited
from rankwise.drivers.dispatch import Announcement, GangDispatch
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.reactor import Reactor
from rankwise.launch.planning import JobPlanner
from rankwise.ports.clock import Clock
from rankwise.ports.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.launch.agreement import Agreement

SIGKILL = 9


class SteppingRanks:
    """A process host whose ranks can be brought to one step; a `rankwise.ports.ProcessHost`."""

    def __init__(
        self, host: RealProcessHost, planner: JobPlanner, reactor: Reactor, clock: Clock
    ) -> None:
        self._host = host
        self._planner = planner
        self._reactor = reactor
        self._clock = clock
        self._agreement: Agreement | None = None

    def spawn(self, local_rank: int, attempt: int) -> None:
        """Make a worker's process."""
        self._host.spawn(local_rank, attempt)

    def signal(self, local_rank: int, attempt: int, signal: int) -> None:
        """Signal a worker's process group, unless its rank is on its way to a step to stop at."""
        agreement = self._agreement
        if signal == SIGKILL or agreement is None or not agreement.concerns(local_rank):
            self._host.signal(local_rank, attempt, signal)

    def look_for_progress(self, attempt: int) -> None:
        """Find the last sign of life."""
        self._host.look_for_progress(attempt)

    def dump_stacks(self, attempt: int) -> None:
        """Make every living worker print its stacks."""
        self._host.dump_stacks(attempt)

    def sweep(self, attempt: int) -> None:
        """Kill what the attempt's workers left behind."""
        self._host.sweep(attempt)

    def gather(self) -> None:
        """Let the ranks that count their steps stand, and stop where the last of them does."""
        segment = self._planner.segment
        if self._agreement is not None or segment is None or segment.steps() is None:
            return
        from rankwise.drivers.real.stop_words import StopWords  # noqa: PLC0415  # only at a stop
        from rankwise.launch.agreement import Agreement  # noqa: PLC0415  # the same

        self._agreement = Agreement(
            StopWords(segment, self._clock),
            alive={rank for rank, link in self._host.links.items() if not link.is_over},
            on_stood=lambda step: self._reactor.post(partial(self._decide, step)),
        )

    def on_over(self, local_rank: int) -> None:
        """A rank has ended: nobody waits for it."""
        if self._agreement is not None:
            self._agreement.on_over(local_rank)

    def close(self) -> None:
        """End the wait."""
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.close()

    def _decide(self, step: int) -> None:
        if self._agreement is not None:
            self._agreement.words.decide(step)


class OneGang(GangDispatch):
    """Runs one gang, and gathers its ranks when it is asked to stop while they run."""

    def __init__(
        self,
        gang: Gang,
        ranks: SteppingRanks,
        clock: Clock,
        journal: Journal,
        on_announcement: "Callable[[Announcement], None]",
    ) -> None:
        super().__init__(gang, ranks, clock, journal, on_announcement)
        self._machine = gang
        self._ranks = ranks

    def deliver(self, stimulus: Stimulus) -> None:
        """Tell the gang a fact, after what has to come before it."""
        match stimulus:
            case StopRequested() if self._machine.phase is Phase.RUNNING:
                self._ranks.gather()
            case WorkerExited():
                self._ranks.on_over(stimulus.local_rank)
            case _:
                pass
        super().deliver(stimulus)
