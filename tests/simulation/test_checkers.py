"""Broken gangs and agents, each in one way: the checkers must catch every one of them."""

from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from rankwise.base.errors import SimulationError
from rankwise.base.failure import Failure, FailureCause, Outcome, OutcomeStatus
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant
from rankwise.core.agent.alone import Alone, AloneEffect
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.vocabulary import AgentSpec, FinishRun
from rankwise.core.agent.vocabulary import Effect as AgentEffect
from rankwise.core.agent.vocabulary import Stimulus as AgentStimulus
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import (
    Effect,
    GangSpec,
    SpawnWorker,
    Stimulus,
    StopRequested,
    Sweep,
    Swept,
    WorkerSpawned,
)
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig
from rankwise.core.rendezvous.vocabulary import GangEnded, RefusalKind, Refused
from rankwise.drivers.virtual.cluster.root_cause_truth import loss_is_root_cause
from rankwise.drivers.virtual.cluster.simulated_worker import SimulatedWorker
from rankwise.drivers.virtual.gang_simulator import GangSimulator, MakeAgent
from rankwise.drivers.virtual.invariants import InvariantBroken
from rankwise.drivers.virtual.random_plans import random_plan
from rankwise.drivers.virtual.worker_behaviour import (
    PEER_IS_GONE,
    Exits,
    Raises,
    RunsForever,
    WorkerProgram,
)
from rankwise.sim.faults.vocabulary import Preempt

if TYPE_CHECKING:
    from rankwise.drivers.virtual.cluster.node import SimulatedNode


class LeavesOneBehind(Gang):
    """Tells all siblings to stop, but one."""

    def _signal_all(self, signal: int) -> list[Effect]:
        return super()._signal_all(signal)[1:]


class ForgetsLateComers(Gang):
    """Does not pass an order to stop on to workers that come up after it."""

    def _on_spawned(self, stimulus: WorkerSpawned, now: Instant) -> list[Effect]:
        super()._on_spawned(stimulus, now)
        return []


class NeverKills(Gang):
    """Waits for ever for workers that ignore SIGTERM."""

    def tick(self, now: Instant) -> list[Effect]:
        return [] if self.phase is GangPhase.STOPPING else super().tick(now)

    @property
    def next_deadline(self) -> Instant | None:
        return None if self.phase is GangPhase.STOPPING else super().next_deadline


class KillsTooEarly(Gang):
    """Thinks that half of the grace is enough."""

    def _begin_stopping(self, now: Instant) -> list[Effect]:
        effects = super()._begin_stopping(now)
        if self.phase is GangPhase.STOPPING:
            self._deadline = Instant(now + self.spec.grace // 2)
        return effects


class EndsWithoutSweeping(Gang):
    """Has ended when the last worker has."""

    def _begin_sweep(self, now: Instant) -> list[Effect]:
        super()._begin_sweep(now)
        return self.handle(Swept(self.attempt), now)


class ForgetsSurvivors(Gang):
    """Has ended well although something of it is alive."""

    def _on_swept(self, stimulus: Swept, now: Instant) -> list[Effect]:
        return super()._on_swept(Swept(stimulus.attempt), now)


class HasNoBudget(Alone):
    """Restarts as often as it likes."""

    def _judge(self, ended: GangEnded) -> str | None:
        return super()._judge(ended) and None


class GivesUpAtOnce(Alone):
    """Fails although restarts are left."""

    def _judge(self, ended: GangEnded) -> str | None:
        return super()._judge(ended) or "no"


class RetriesWhatCannotStart(Alone):
    """Tries again whatever the policy says."""

    def __init__(self, config: RendezvousConfig, offer: NodeOffer) -> None:
        policy = msgspec.structs.replace(config.policy, retries_startup_errors=True)
        super().__init__(msgspec.structs.replace(config, policy=policy), offer)


class DoesNotBackOff(Alone):
    """Begins the next attempt at once, whatever it announced."""

    def _begin_again(self, ended: GangEnded, now: Instant) -> list[AloneEffect]:
        effects = super()._begin_again(ended, now)
        self._pause_ends = now
        return effects


class BlamesTheLast(Gang):
    """Tells the failures in the wrong order."""

    def _failures(self) -> tuple[Failure, ...]:
        return tuple(reversed(super()._failures()))


class BlamesTheEarliest(Gang):
    """Knows nothing of the head start of violent deaths."""

    def _failures(self) -> tuple[Failure, ...]:
        return tuple(sorted(super()._failures(), key=lambda f: (f.cause == "stopped", f.at)))


class CallsEverythingASuccess(Gang):
    """Looks at no exit code when all is over."""

    @property
    def _status(self) -> OutcomeStatus:
        return OutcomeStatus.SUCCEEDED


class KeepsSurvivorsSecret(Gang):
    """Does not name those who live on."""

    def _finish(self, survivors: tuple[int, ...] = (), obstacle: str = "") -> list[Effect]:
        del survivors
        return super()._finish((), obstacle)


class StartsOneTwice(Gang):
    """Orders its first worker twice."""

    def _begin(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        return [*super()._begin(stimulus, now), SpawnWorker(0, self.attempt)]


class ForgetsTheLastOne(Gang):
    """Starts one worker too few."""

    def _begin(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        return super()._begin(stimulus, now)[:-1]


class SignalsTheUnborn(Gang):
    """Sends signals to workers that have not come up."""

    def _signal_all(self, signal: int) -> list[Effect]:
        return [self._signal(w, signal) for w in self._workers if not w.has_ended]


class IgnoresStops(Gang):
    """Does not listen when somebody asks for an end."""

    def _on_stop_requested(self, stimulus: StopRequested, now: Instant) -> list[Effect]:
        del stimulus, now
        return []


class TalksAfterTheEnd(Agent):
    """Finishes again with every fact that comes late."""

    def handle(self, stimulus: AgentStimulus, now: Instant) -> list[AgentEffect]:
        last_words = [] if self.finished is None else [self.finished]
        return [*super().handle(stimulus, now), *last_words]


class SweepsTooEarly(Gang):
    """Sweeps when the first worker has ended."""

    def _sweep_if_all_ended(self, now: Instant) -> list[Effect]:
        return self._begin_sweep(now)


class SweepsTwice(Gang):
    """Orders every sweep twice."""

    def _begin_sweep(self, now: Instant) -> list[Effect]:
        return [*super()._begin_sweep(now), Sweep(self.attempt)]


Mutant = type[Gang | Alone | Agent]
MUTANTS: list[Mutant] = [
    LeavesOneBehind,
    ForgetsLateComers,
    NeverKills,
    KillsTooEarly,
    EndsWithoutSweeping,
    ForgetsSurvivors,
    HasNoBudget,
    GivesUpAtOnce,
    RetriesWhatCannotStart,
    DoesNotBackOff,
    BlamesTheLast,
    BlamesTheEarliest,
    CallsEverythingASuccess,
    KeepsSurvivorsSecret,
    StartsOneTwice,
    ForgetsTheLastOne,
    SignalsTheUnborn,
    IgnoresStops,
    TalksAfterTheEnd,
    SweepsTooEarly,
    SweepsTwice,
]


def maker_of(mutant: Mutant) -> MakeAgent:
    """Makes agents of which one part is broken, or that are broken themselves."""
    if issubclass(mutant, Agent):
        return mutant

    def make(spec: AgentSpec) -> Agent:
        agent = Agent(spec)
        if issubclass(mutant, Alone):
            agent.rendezvous = mutant(spec.rendezvous, spec.offer)
        else:
            agent.make_gang = mutant
        return agent

    return make


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_what_is_broken_is_caught_by_some_seed(mutant: Mutant) -> None:
    def is_caught_by(seed: int) -> bool:
        try:
            GangSimulator(seed, make_agent=maker_of(mutant)).run_plan(random_plan(seed))
        except InvariantBroken:
            return True
        return False

    assert any(is_caught_by(seed) for seed in range(400))


def test_a_world_without_an_end_is_refused_with_what_to_do() -> None:
    world = GangSimulator()

    with pytest.raises(SimulationError, match=r"never ends.*give stop_after"):
        world.run(GangSpec(size=1), [[WorkerProgram(ending=RunsForever())]])


def test_a_world_can_be_stopped_from_outside() -> None:
    run = GangSimulator().run(
        GangSpec(size=1), [[WorkerProgram(ending=RunsForever())]], stop_after=Duration(5)
    )

    assert run.outcome.status is OutcomeStatus.STOPPED
    assert run.left_behind == ()


def test_checker_counts_ranks_that_a_stop_signal_reached_first_as_its_consequences() -> None:
    # Seeds 15867 and 17828: the scheduler signals the ranks 100 ms before their agent, while the
    # agent waits for the death that explains a lost connection.
    lost = WorkerProgram(ending=Raises(PEER_IS_GONE), after=Duration(SECOND))
    runs = WorkerProgram(ending=RunsForever(), stop_takes=Duration(MILLISECOND))
    early = Duration(100 * MILLISECOND)
    stop = Preempt(at=Instant(2 * SECOND), node=0, ranks_before=early)

    outcome = GangSimulator(faults=(stop,)).run(GangSpec(size=2), [[lost, runs]]).outcome

    assert outcome.status is OutcomeStatus.FAILED
    assert [(each.local_rank, each.cause) for each in outcome.failures] == [
        (0, FailureCause.RAISED),
        (1, FailureCause.STOPPED),
    ]


def told_without_a_store(failure: Failure) -> FinishRun:
    refusal = Refused(RefusalKind.STORE, "no etcd member answered")
    outcome = Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=(failure,))
    return FinishRun(outcome=outcome, refusal=refusal)


def test_checker_catches_a_node_without_store_that_accuses_a_rank_which_lost_its_peer() -> None:
    raised = Failure(local_rank=1, attempt=3, cause=FailureCause.RAISED, at=Instant(1))
    worker = SimulatedWorker(
        node=cast("SimulatedNode", None), round=3, local_rank=1, rank=1, pid=7,
        program=WorkerProgram(), started_at=Instant(0), life=0,
    )  # fmt: skip
    told = told_without_a_store(raised)

    assert loss_is_root_cause(told, {(3, 1): worker}) == ""

    worker.blames_peer = True
    assert "the store is lost" in loss_is_root_cause(told, {(3, 1): worker})
    assert loss_is_root_cause(told, {(2, 1): worker}) == ""


def test_the_journal_of_a_broken_run_is_kept() -> None:
    world = GangSimulator(make_agent=maker_of(CallsEverythingASuccess))

    with pytest.raises(InvariantBroken, match="a success with exit codes"):
        world.run(GangSpec(size=1), [[WorkerProgram(ending=Exits(3))]])

    assert b'"FinishRun"' in world.journal.lines()
