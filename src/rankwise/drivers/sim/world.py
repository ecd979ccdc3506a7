"""A simulated world for one node: virtual time, virtual processes, and the real machine.

The agent, which is alone, and its dispatch are those of the real driver. The world gives them a
virtual host, moves the clock from one happening to the next, and lets the checker look after every
step. At one instant, what has happened is heard before a deadline is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rankwise.base.errors import SimulationError
from rankwise.base.failure import Outcome
from rankwise.base.units import Duration, Instant
from rankwise.core.agent.alone import spec_alone
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.vocabulary import AgentSpec, Stimulus
from rankwise.core.gang.vocabulary import GangSpec, RanksBlamed, StopRequested
from rankwise.core.rendezvous.configuration import RestartPolicy
from rankwise.drivers.agent_dispatch import AgentDispatch
from rankwise.drivers.sim.agenda import Agenda, VirtualClock
from rankwise.drivers.sim.checkers import GangChecker
from rankwise.drivers.sim.faults import Accusation, Faults, StopOrder
from rankwise.drivers.sim.journal import MemoryJournal
from rankwise.drivers.sim.processes import SimulatedProcessHost
from rankwise.drivers.sim.programs import Lives
from rankwise.drivers.sim.streams import stream

SIGTERM = 15
STEPS_MAX = 1_000_000
ONE_ATTEMPT = RestartPolicy()


@dataclass(frozen=True)
class SimulatedRun:
    """What a simulated run left.

    Attributes:
        outcome: what became of the run.
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
        make_agent: makes the machine; others than `Agent` show that the checkers can fail.
    """

    def __init__(
        self,
        seed: int = 0,
        faults: Faults | None = None,
        make_agent: Callable[[AgentSpec], Agent] = Agent,
    ) -> None:
        self.seed = seed
        self.faults = faults or Faults()
        self.make_agent = make_agent
        self.journal = MemoryJournal()
        """Of the present or last run, also when it broke off."""

    def run(
        self,
        spec: GangSpec,
        programs: Lives,
        policy: RestartPolicy = ONE_ATTEMPT,
        *,
        stop_after: Duration | None = None,
    ) -> SimulatedRun:
        """Run one node's gangs to the outcome, checked after every step.

        Args:
            spec: the gang of each attempt.
            programs: for each attempt the programs by local rank; the last attempt's repeat.
            policy: which failures are followed by another attempt.
            stop_after: when SIGTERM asks it to stop, beside the stops of the faults.

        Raises:
            InvariantBroken: the machine did what no agent may do.
            SimulationError: the world can never end, because no worker in it does.
        """
        stops = self.faults.stops
        if stop_after is not None:
            stops = (*stops, StopOrder(Instant(stop_after), SIGTERM))
        self.journal = MemoryJournal()
        return _Life(self, spec, policy, programs, stops).run()


class _Life:
    """One agent's life in a world."""

    def __init__(
        self,
        world: SimulatedWorld,
        gang: GangSpec,
        policy: RestartPolicy,
        programs: Lives,
        stops: Sequence[StopOrder],
    ) -> None:
        self._world = world
        self._stops = stops
        self._clock = VirtualClock()
        self._agenda = Agenda(self._clock)
        agent = world.make_agent(spec_alone(gang, policy))
        self._host = SimulatedProcessHost(
            agenda=self._agenda,
            clock=self._clock,
            lives=programs,
            faults=world.faults,
            chance=stream(world.seed, "latency"),
            deliver=self._deliver,
        )
        self._checker = GangChecker(agent, self._host)
        self._dispatch = AgentDispatch(
            agent,
            host=self._host,
            clock=self._clock,
            journal=_BothJournals(world.journal, self._checker),
        )

    def run(self) -> SimulatedRun:
        """From its start to the outcome, and a look at what comes after."""
        self._dispatch.start()
        self._checker.after_step(self._clock.now())
        for stop in self._stops:
            self._agenda.at(stop.at, partial(self._dispatch.deliver, StopRequested(stop.signal)))
        for accusation in self._world.faults.accusations:
            self._agenda.at(accusation.at, partial(self._accuse, accusation))
        lost_at = self._world.faults.guardian_lost_at
        if lost_at is not None:
            self._agenda.at(lost_at, self._host.lose_guardian)
        steps = 0
        while (finished := self._dispatch.finished) is None:
            self._step()
            self._checker.after_step(self._clock.now())
            steps += 1
            if steps > STEPS_MAX:
                raise SimulationError(f"no outcome after {STEPS_MAX} steps")
        left_behind = tuple(process.pid for process in self._host.living())
        self._hear_out()
        return SimulatedRun(finished.as_outcome(), self._world.journal.lines(), left_behind)

    def _step(self) -> None:
        deadline, happening = self._dispatch.next_deadline, self._agenda.next_instant
        if happening is not None and (deadline is None or happening <= deadline):
            self._agenda.run_next()
        elif deadline is not None:
            self._clock.advance_to(max(deadline, self._clock.now()))
            self._dispatch.wake()
        else:
            self._checker.judge_stillness(may_wait=bool(self._host.living()))

    def _deliver(self, stimulus: Stimulus) -> None:
        self._dispatch.deliver(stimulus)

    def _accuse(self, accusation: Accusation) -> None:
        ranks, attempt = (accusation.local_rank,), self._host.latest_attempt
        self._dispatch.deliver(RanksBlamed(ranks, attempt, "has not come to all_reduce #1"))

    def _hear_out(self) -> None:
        """Deliver what was still on its way: an agent that has finished must not answer."""
        while self._agenda.next_instant is not None:
            self._agenda.run_next()


class _BothJournals:
    """Writes everything into the journal first, then shows it to the checker."""

    def __init__(self, journal: MemoryJournal, checker: GangChecker) -> None:
        self._journal = journal
        self._checker = checker

    def stimulus(self, machine: str, number: int, stimulus: Any, now: Instant) -> None:
        self._journal.stimulus(machine, number, stimulus, now)
        self._checker.stimulus(stimulus, now)

    def effect(self, machine: str, cause: int, effect: Any, now: Instant) -> None:
        self._journal.effect(machine, cause, effect, now)
        self._checker.effect(effect, now)
