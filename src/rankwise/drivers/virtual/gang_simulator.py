"""A simulated world for one node: a cluster of one, whose agent is alone.

Workers follow programs; faults are as in every cluster.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rankwise.base.failure import Outcome
from rankwise.base.units import MICROSECOND, MILLISECOND, ZERO, Duration, Instant
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.vocabulary import AgentSpec
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.core.rendezvous.configuration import RendezvousConfig, RestartPolicy
from rankwise.drivers.virtual.cluster.cluster_plan import Clocks, ClusterPlan, Guardian, Workers
from rankwise.drivers.virtual.cluster.simulator import ClusterSimulator
from rankwise.drivers.virtual.journal import MemoryJournal
from rankwise.drivers.virtual.worker_behaviour import Lives
from rankwise.sim.faults.vocabulary import FaultOfCluster, Preempt

ONE_ATTEMPT = RestartPolicy()
PROMPT = Guardian(
    latency_min=Duration(100 * MICROSECOND),
    latency_max=Duration(100 * MICROSECOND),
    delays_orders=True,
    sweep_takes=Duration(1 * MILLISECOND),
    describe_takes=ZERO,
)
"""A guardian that is as quick as on an idle machine."""

MakeAgent = Callable[[AgentSpec], Agent]


def plan_of_gang(
    spec: GangSpec,
    lives: Lives,
    policy: RestartPolicy = ONE_ATTEMPT,
    guardian: Guardian = PROMPT,
    faults: tuple[FaultOfCluster, ...] = (),
) -> ClusterPlan:
    """A node that is alone, with a clock that is right.

    Args:
        spec: the gang of each attempt.
        lives: for each attempt the programs by local rank; the last attempt's repeat.
        policy: which failures are followed by another attempt.
        guardian: how slow and unordered it is.
        faults: what goes wrong beside what the programs do.
    """
    return ClusterPlan(
        nodes=1,
        rendezvous=RendezvousConfig(nodes_min=1, nodes_max=1, policy=policy),
        workers=Workers(per_node=spec.size, lives=tuple(tuple(life) for life in lives)),
        guardian=guardian,
        clocks=Clocks(offset_max=ZERO, drift_ppm_max=0),
        joins_within=ZERO,
        faults=faults,
        gang=spec,
        is_alone=True,
    )


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


class GangSimulator:
    """Runs gangs in simulated time, which takes none.

    Args:
        seed: decides all that is left to chance.
        faults: what goes wrong beside what the programs do.
        make_agent: makes the machine; others than `Agent` show that the checkers can fail.
    """

    def __init__(
        self,
        seed: int = 0,
        faults: tuple[FaultOfCluster, ...] = (),
        make_agent: MakeAgent = Agent,
    ) -> None:
        self.seed = seed
        self.faults = faults
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
        plan = plan_of_gang(spec, programs, policy, faults=self.faults)
        if stop_after is not None:
            stop = Preempt(at=Instant(stop_after), node=0)
            plan = msgspec.structs.replace(plan, faults=(*plan.faults, stop))
        return self.run_plan(plan)

    def run_plan(self, plan: ClusterPlan) -> SimulatedRun:
        """The same with a plan that is at hand; see `run`."""
        simulator = ClusterSimulator(plan, self.seed, make_agent=self.make_agent)
        self.journal = simulator.journal
        run = simulator.run()
        (finished,) = run.finished.values()
        return SimulatedRun(finished.as_outcome(), self.journal.lines(), run.left_behind)
