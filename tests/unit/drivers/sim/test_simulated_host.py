"""The simulated host: virtual processes act as their programs say."""

from random import Random

import pytest

from rankwise.base.failure import ExitStatus
from rankwise.base.units import MILLISECOND, SECOND, ZERO, Duration, Instant
from rankwise.core.agent.vocabulary import Stimulus
from rankwise.core.gang.vocabulary import (
    GangSpec,
    GuardianLost,
    ProgressLooked,
    Swept,
    WorkerExited,
    WorkerRefused,
    WorkerReported,
    WorkerSpawned,
)
from rankwise.core.rendezvous.vocabulary import World
from rankwise.drivers.virtual.agenda import Agenda, VirtualClock
from rankwise.drivers.virtual.cluster.cluster_plan import Guardian
from rankwise.drivers.virtual.cluster.host import SimulatedHost
from rankwise.drivers.virtual.cluster.simulator import ClusterSimulator
from rankwise.drivers.virtual.cluster.skewed_clocks import SkewedClock
from rankwise.drivers.virtual.gang_simulator import PROMPT, plan_of_gang
from rankwise.drivers.virtual.worker_behaviour import (
    Dies,
    Exits,
    Raises,
    RunsForever,
    WorkerProgram,
)

SIGTERM, SIGKILL, SIGSEGV = 15, 9, 11
RUNS = WorkerProgram(ending=RunsForever())
ALONE = World(
    round=0,
    node_rank=0,
    members=("0",),
    first_rank=0,
    slots=1,
    size=1,
    master_address="localhost",
    master_port=29500,
    restarts=0,
)


class Stage:
    """A host alone, without an agent."""

    def __init__(self, *programs: WorkerProgram, guardian: Guardian = PROMPT) -> None:
        self.clock = VirtualClock()
        self.agenda = Agenda(self.clock)
        self.heard: list[Stimulus] = []
        plan = plan_of_gang(GangSpec(size=len(programs)), [programs], guardian=guardian)
        world = ClusterSimulator(plan, 0)
        self.host = SimulatedHost(
            world.nodes[0],
            agenda=self.agenda,
            clock=SkewedClock(self.clock, ZERO, 0),
            habits=plan.workers,
            guardian=guardian,
            chance=Random(0),
            deliver=self.heard.append,
            witness=world,
        )
        self.host.begin_attempt(ALONE)

    def living(self) -> list[int]:
        """The pids of all processes that are alive."""
        return [process.pid for process in self.host.processes()]

    def run(self) -> list[Stimulus]:
        """Let everything happen; return what was heard since the last time."""
        while self.agenda.next_instant is not None:
            self.agenda.run_next()
        heard = self.heard.copy()
        self.heard.clear()
        return heard


def spawned(*programs: WorkerProgram) -> Stage:
    stage = Stage(*programs)
    for local_rank in range(len(programs)):
        stage.host.spawn(local_rank, 0)
    stage.run()
    return stage


def codes(stimuli: list[Stimulus]) -> list[int]:
    return [fact.exit.code for fact in stimuli if isinstance(fact, WorkerExited)]


@pytest.mark.parametrize(("ending", "code"), [(Exits(3), 3), (Dies(SIGSEGV), -11), (Exits(), 0)])
def test_a_worker_comes_up_and_ends(ending: Exits | Dies, code: int) -> None:
    stage = Stage(WorkerProgram(ending=ending, after=Duration(SECOND)))

    stage.host.spawn(0, 0)

    came_up, ended = stage.run()
    assert came_up == WorkerSpawned(0, 0, 1001)
    at = Instant(SECOND + 100_000)
    assert ended == WorkerExited(0, 0, ExitStatus(code), at)


def test_an_exception_is_reported_when_it_is_raised_and_the_end_comes_later() -> None:
    stage = Stage(WorkerProgram(ending=Raises("no", exit_takes=Duration(5 * MILLISECOND))))

    stage.host.spawn(0, 0)

    _, report, ended = stage.run()
    assert isinstance(report, WorkerReported)
    assert isinstance(ended, WorkerExited)
    assert ended.at - report.error.raised_at == 5 * MILLISECOND


def test_a_worker_that_is_refused_never_lives() -> None:
    stage = Stage(WorkerProgram(refusal="no memory"))

    stage.host.spawn(0, 0)

    assert stage.run() == [WorkerRefused(0, 0, "no memory")]
    assert stage.living() == []


@pytest.mark.parametrize(
    ("program", "signal", "expected"),
    [
        (RUNS, SIGTERM, [-15]),
        (RUNS, SIGKILL, [-9]),
        (WorkerProgram(ending=RunsForever(), stop_code=0), SIGTERM, [0]),
        (WorkerProgram(ending=RunsForever(), stop_takes=None), SIGTERM, []),
        (WorkerProgram(ending=RunsForever(), stop_takes=None), SIGKILL, [-9]),
        (WorkerProgram(ending=RunsForever(), kill_takes=None), SIGKILL, []),
    ],
)
def test_signals_do_what_the_program_lets_them_do(
    program: WorkerProgram, signal: int, expected: list[int]
) -> None:
    stage = spawned(program)

    stage.host.signal(0, 0, signal)

    assert codes(stage.run()) == expected
    assert len(stage.living()) == (0 if expected else 1)


def test_a_signal_to_one_that_is_gone_or_never_was_goes_to_nobody() -> None:
    stage = spawned(WorkerProgram())

    stage.host.signal(0, 0, SIGKILL)
    stage.host.signal(0, 7, SIGKILL)

    assert stage.run() == []


def test_a_sweep_ends_strays_and_tells_who_survives() -> None:
    stage = spawned(WorkerProgram(strays=2), WorkerProgram(strays=1, stray_kill_takes=None))
    assert [process.is_stray for process in stage.host.processes()] == [True] * 3

    stage.host.sweep(0)

    assert stage.run() == [Swept(0, tuple(stage.living()))]
    assert len(stage.living()) == 1


def test_a_sweep_prevents_what_was_yet_to_come_up() -> None:
    stage = Stage(WorkerProgram(start_takes=Duration(SECOND)))
    stage.host.spawn(0, 0)

    stage.host.sweep(0)

    assert stage.run() == [Swept(0)]
    assert stage.living() == []


def test_progress_is_the_latest_sign_of_life_of_anybody() -> None:
    lively = WorkerProgram(
        ending=RunsForever(),
        progress_every=Duration(MILLISECOND),
        silent_after=Duration(3500 * 1000),
    )
    stage = spawned(RUNS, lively)
    stage.clock.advance_to(Instant(SECOND))

    stage.host.look_for_progress(0)

    started_at = 100_000
    assert stage.run() == [ProgressLooked(0, Instant(started_at + 3 * MILLISECOND))]


def test_a_lost_guardian_takes_everybody_along_in_silence() -> None:
    stage = spawned(WorkerProgram(ending=RunsForever(), strays=1), RUNS)

    stage.host.lose_guardian()
    stage.host.sweep(0)

    assert stage.run() == [GuardianLost("the guardian was killed")]
    assert stage.living() == []


def test_news_of_one_worker_keep_their_order_and_those_of_different_ones_do_not() -> None:
    unordered = Guardian(latency_min=Duration(1), latency_max=Duration(SECOND), delays_orders=True)
    raising = WorkerProgram(ending=Raises("no"))
    stage = Stage(*[raising] * 20, guardian=unordered)
    for local_rank in range(20):
        stage.host.spawn(local_rank, 0)

    heard = stage.run()

    for local_rank in range(20):
        kinds = [
            type(fact)
            for fact in heard
            if isinstance(fact, WorkerSpawned | WorkerReported | WorkerExited)
            and fact.local_rank == local_rank
        ]
        assert kinds == [WorkerSpawned, WorkerReported, WorkerExited]
    ends = [fact.local_rank for fact in heard if isinstance(fact, WorkerExited)]
    assert ends != sorted(ends)


@pytest.mark.parametrize(("least", "most"), [(0, 5), (5, 4)])
def test_latencies_that_cannot_be_are_refused(least: int, most: int) -> None:
    with pytest.raises(ValueError, match=f"latency_min is {least} ns"):
        Guardian(latency_min=Duration(least), latency_max=Duration(most))
