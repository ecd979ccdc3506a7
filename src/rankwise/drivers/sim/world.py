"""A simulated world for one gang: virtual time, virtual processes, and the real machine.

The machine and its dispatch are those of the real driver. The world gives them a virtual host,
moves the clock from one happening to the next, and lets the checker look after every step. At one
instant, what has happened is heard before a deadline is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rankwise.base.errors import SimulationError
from rankwise.base.failure import Outcome
from rankwise.base.units import Duration, Instant
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.vocabulary import GangSpec, Started, Stimulus, StopRequested
from rankwise.drivers.dispatch import Announcement, GangDispatch
from rankwise.drivers.sim.agenda import Agenda, VirtualClock
from rankwise.drivers.sim.checkers import GangChecker
from rankwise.drivers.sim.faults import Faults, StopOrder
from rankwise.drivers.sim.journal import MemoryJournal
from rankwise.drivers.sim.processes import SimulatedProcessHost
from rankwise.drivers.sim.programs import Lives
from rankwise.drivers.sim.streams import stream

SIGTERM = 15
STEPS_MAX = 1_000_000


@dataclass(frozen=True)
class SimulatedRun:
    """What a simulated run left.

    Attributes:
        outcome: what became of the gang.
        journal: every stimulus and effect, as JSON lines.
        left_behind: processes that were alive when it finished (pids).
    """

    outcome: Outcome
    journal: bytes
    left_behind: tuple[int, ...]


class SimulatedWorld:
    """A world in which gangs run in no time.

    Args:
        seed: decides all that is left to chance.
        faults: how slow, unordered and mortal the world is.
        make_gang: makes the machine; others than `Gang` show that the checkers can fail.
    """

    def __init__(
        self,
        seed: int = 0,
        faults: Faults | None = None,
        make_gang: Callable[[GangSpec], Gang] = Gang,
    ) -> None:
        self.seed = seed
        self.faults = faults or Faults()
        self.make_gang = make_gang
        self.journal = MemoryJournal()
        """Of the present or last run, also when it broke off."""

    def run(
        self, spec: GangSpec, programs: Lives, stop_after: Duration | None = None
    ) -> SimulatedRun:
        """Run one gang to its outcome, checked after every step.

        Args:
            spec: the gang.
            programs: for each attempt the programs by local rank; the last attempt's repeat.
            stop_after: when SIGTERM asks it to stop, beside the stops of the faults.

        Raises:
            InvariantBroken: the machine did what no gang may do.
            SimulationError: the world can never end, because nobody in it does.
        """
        stops = self.faults.stops
        if stop_after is not None:
            stops = (*stops, StopOrder(Instant(stop_after), SIGTERM))
        self.journal = MemoryJournal()
        return _Life(self, spec, programs, stops).live()


class _Life:
    """One gang's life in a world."""

    def __init__(
        self, world: SimulatedWorld, spec: GangSpec, programs: Lives, stops: Sequence[StopOrder]
    ) -> None:
        self._world = world
        self._stops = stops
        self._clock = VirtualClock()
        self._agenda = Agenda(self._clock)
        self._gang = world.make_gang(spec)
        self._host = SimulatedProcessHost(
            agenda=self._agenda,
            clock=self._clock,
            lives=programs,
            faults=world.faults,
            chance=stream(world.seed, "latency"),
            deliver=self._deliver,
        )
        self._checker = GangChecker(spec, self._gang, self._host)
        journal = _BothJournals(world.journal, self._checker)
        self._dispatch = GangDispatch(self._gang, self._host, self._clock, journal, _nobody_listens)

    def live(self) -> SimulatedRun:
        """From `Started` to the outcome, and a look at what comes after."""
        self._dispatch.deliver(Started())
        self._checker.after_step(self._clock.now())
        for stop in self._stops:
            self._agenda.at(stop.at, partial(self._deliver, StopRequested(stop.signal)))
        lost_at = self._world.faults.guardian_lost_at
        if lost_at is not None:
            self._agenda.at(lost_at, self._host.lose_guardian)
        steps = 0
        while self._dispatch.outcome is None:
            self._step()
            self._checker.after_step(self._clock.now())
            steps += 1
            if steps > STEPS_MAX:
                raise SimulationError(f"no outcome after {STEPS_MAX} steps")
        left_behind = tuple(process.pid for process in self._host.living())
        self._hear_out()
        return SimulatedRun(self._dispatch.outcome, self._world.journal.lines(), left_behind)

    def _step(self) -> None:
        deadline, happening = self._dispatch.next_deadline, self._agenda.next_instant
        if happening is not None and (deadline is None or happening <= deadline):
            self._agenda.run_next()
        elif deadline is not None:
            self._clock.advance_to(max(deadline, self._clock.now()))
            self._dispatch.tick()
        else:
            self._checker.judge_stillness(may_wait=bool(self._host.living()))

    def _hear_out(self) -> None:
        """Deliver what was still on its way: a gang that has finished must not answer."""
        while self._agenda.next_instant is not None:
            self._agenda.run_next()

    def _deliver(self, stimulus: Stimulus) -> None:
        if self._dispatch.outcome is None:
            self._dispatch.deliver(stimulus)
        else:
            self._checker.judge_silence(self._gang.handle(stimulus, self._clock.now()))


class _BothJournals:
    """Writes everything into the journal first, then shows it to the checker."""

    def __init__(self, journal: MemoryJournal, checker: GangChecker) -> None:
        self._journal = journal
        self._checker = checker

    def stimulus(self, machine: str, stimulus: Any, now: Instant) -> None:
        self._journal.stimulus(machine, stimulus, now)
        self._checker.stimulus(machine, stimulus, now)

    def effect(self, machine: str, effect: Any, now: Instant) -> None:
        self._journal.effect(machine, effect, now)
        self._checker.effect(machine, effect, now)


def _nobody_listens(announcement: Announcement) -> None:
    """A simulated gang has no user; the journal has the announcement."""
    del announcement
