"""Broken gangs, each in one way: the checkers must catch every one of them."""

import pytest

from rankwise.base.errors import SimulationError
from rankwise.base.failure import Failure, OutcomeStatus
from rankwise.base.units import Duration, Instant
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.state import Phase
from rankwise.core.gang.vocabulary import (
    Effect,
    Finish,
    GangSpec,
    SpawnWorker,
    StopRequested,
    Sweep,
    Swept,
    WorkerSpawned,
)
from rankwise.drivers.sim.checkers import InvariantBroken
from rankwise.drivers.sim.plans import random_plan
from rankwise.drivers.sim.programs import Exits, Program, RunsForever
from rankwise.drivers.sim.world import SimulatedWorld


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
        return [] if self.phase is Phase.STOPPING else super().tick(now)

    @property
    def next_deadline(self) -> Instant | None:
        return None if self.phase is Phase.STOPPING else super().next_deadline


class KillsTooEarly(Gang):
    """Thinks that half of the grace is enough."""

    def _begin_stopping(self, now: Instant) -> list[Effect]:
        effects = super()._begin_stopping(now)
        if self.phase is Phase.STOPPING:
            self._deadline = Instant(now + self.spec.grace // 2)
        return effects


class RestartsWithoutSweeping(Gang):
    """Begins the next attempt when the last worker has ended."""

    def _begin_sweep(self, now: Instant) -> list[Effect]:
        super()._begin_sweep(now)
        return self.handle(Swept(self.attempt), now)


class RestartsOverSurvivors(Gang):
    """Begins the next attempt although something of the last is alive."""

    def _on_swept(self, stimulus: Swept, now: Instant) -> list[Effect]:
        return super()._on_swept(Swept(stimulus.attempt), now)


class HasNoBudget(Gang):
    """Restarts as often as it likes."""

    def _begin_restart(self, now: Instant) -> list[Effect]:
        self.restarts_left += 1
        return super()._begin_restart(now)

    @property
    def _may_restart(self) -> bool:
        return self._has_failed and self._stop is None


class GivesUpAtOnce(Gang):
    """Fails although restarts are left."""

    @property
    def _may_restart(self) -> bool:
        return False


class DoesNotBackOff(Gang):
    """Begins the next attempt at once, whatever it announced."""

    def _begin_restart(self, now: Instant) -> list[Effect]:
        effects = super()._begin_restart(now)
        return effects if self.phase is Phase.STARTING else [*effects, *self._begin_attempt(now)]


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

    def _finish(
        self, status: OutcomeStatus, survivors: tuple[int, ...] = (), detail: str = ""
    ) -> list[Effect]:
        del status
        return super()._finish(OutcomeStatus.SUCCEEDED, survivors, detail)


class KeepsSurvivorsSecret(Gang):
    """Does not name those who live on."""

    def _finish(
        self, status: OutcomeStatus, survivors: tuple[int, ...] = (), detail: str = ""
    ) -> list[Effect]:
        del survivors
        return super()._finish(status, (), detail)


class StartsOneTwice(Gang):
    """Orders its first worker twice."""

    def _begin_attempt(self, now: Instant) -> list[Effect]:
        return [*super()._begin_attempt(now), SpawnWorker(0, self.attempt)]


class ForgetsTheLastOne(Gang):
    """Starts one worker too few."""

    def _begin_attempt(self, now: Instant) -> list[Effect]:
        return super()._begin_attempt(now)[:-1]


class SignalsTheUnborn(Gang):
    """Sends signals to workers that have not come up."""

    def _signal_all(self, signal: int) -> list[Effect]:
        return [self._signal(w, signal) for w in self._workers if not w.has_ended]


class IgnoresStops(Gang):
    """Does not listen when somebody asks for an end."""

    def _on_stop_requested(self, stimulus: StopRequested, now: Instant) -> list[Effect]:
        del stimulus, now
        return []


class TalksAfterTheEnd(Gang):
    """Finishes again with every fact that comes late."""

    def _on_spawned(self, stimulus: WorkerSpawned, now: Instant) -> list[Effect]:
        return super()._on_spawned(stimulus, now) or self._last_words()

    def _on_stop_requested(self, stimulus: StopRequested, now: Instant) -> list[Effect]:
        return super()._on_stop_requested(stimulus, now) or self._last_words()

    def _last_words(self) -> list[Effect]:
        return [] if self.outcome is None else [Finish(self.outcome)]


class SweepsTooEarly(Gang):
    """Sweeps when the first worker has ended."""

    def _sweep_if_all_ended(self, now: Instant) -> list[Effect]:
        return self._begin_sweep(now)


class SweepsTwice(Gang):
    """Orders every sweep twice."""

    def _begin_sweep(self, now: Instant) -> list[Effect]:
        return [*super()._begin_sweep(now), Sweep(self.attempt)]


MUTANTS: list[type[Gang]] = [
    LeavesOneBehind,
    ForgetsLateComers,
    NeverKills,
    KillsTooEarly,
    RestartsWithoutSweeping,
    RestartsOverSurvivors,
    HasNoBudget,
    GivesUpAtOnce,
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


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_gang_is_caught_by_some_seed(mutant: type[Gang]) -> None:
    def is_caught_by(seed: int) -> bool:
        try:
            random_plan(seed).run(mutant)
        except InvariantBroken:
            return True
        return False

    assert any(is_caught_by(seed) for seed in range(400))


def test_a_world_without_an_end_is_refused_with_what_to_do() -> None:
    world = SimulatedWorld()

    with pytest.raises(SimulationError, match=r"never ends.*give stop_after"):
        world.run(GangSpec(size=1), [[Program(ending=RunsForever())]])


def test_a_world_can_be_stopped_from_outside() -> None:
    run = SimulatedWorld().run(
        GangSpec(size=1), [[Program(ending=RunsForever())]], stop_after=Duration(5)
    )

    assert run.outcome.status is OutcomeStatus.STOPPED
    assert run.left_behind == ()


def test_the_journal_of_a_broken_run_is_kept() -> None:
    world = SimulatedWorld(make_gang=CallsEverythingASuccess)

    with pytest.raises(InvariantBroken, match="a success with exit codes"):
        world.run(GangSpec(size=1), [[Program(ending=Exits(3))]])

    assert b'"Finish"' in world.journal.lines()
