"""What every process host must do, so that gangs behave alike in all of them.

A *world* is a process host with everything around it: it takes a gang's description and its
workers' programs, runs the gang to its end, and hands back the record. A behaviour is a function
that takes a world and asserts; it looks at nothing but records. Its patience is long enough for
real processes on a busy machine, and all that must not be missed is far away from it.
"""

from collections.abc import Callable
from inspect import isfunction, signature
from typing import Protocol

from rankwise.base.failure import FailureCause, Outcome, OutcomeStatus
from rankwise.base.units import MILLISECOND, SECOND, Duration
from rankwise.core.gang.vocabulary import (
    DumpStacks,
    GangSpec,
    SpawnWorker,
    Sweep,
    Swept,
    WorkerExited,
    WorkerReported,
    WorkerSpawned,
)
from rankwise.core.rendezvous.configuration import RestartPolicy
from rankwise.drivers.virtual.story import StoryLine, read_journal
from rankwise.testing.programs import Dies, Exits, Lives, Raises, RunsForever, WorkerProgram

SIGABRT, SIGKILL, SIGSEGV, SIGTERM = 6, 9, 11, 15
SOON = Duration(300 * MILLISECOND)
"""Far enough for all workers to be up."""
LATER = Duration(2 * SECOND)
"""Far enough for all workers to have said how they take signals, on a busy machine too."""
GRACE = Duration(20 * SECOND)
ONE_RESTART = RestartPolicy(restarts_max=1)
RUNS = WorkerProgram(ending=RunsForever())
RUNS_STUBBORNLY = WorkerProgram(ending=RunsForever(), stop_takes=None)


class WorldRecord(Protocol):
    """The result of a gang that ran in a world."""

    @property
    def outcome(self) -> Outcome:
        """What became of it."""
        ...

    @property
    def journal(self) -> bytes:
        """Its journal, as JSON lines."""
        ...

    @property
    def left_behind(self) -> tuple[int, ...]:
        """Processes of the gang that were still alive when it was over."""
        ...


class ProcessWorld(Protocol):
    """A process host with everything around it."""

    def run(
        self,
        spec: GangSpec,
        programs: Lives,
        policy: RestartPolicy = ...,
        *,
        stop_after: Duration | None = None,
    ) -> WorldRecord:
        """Run one node's gangs to their end.

        Args:
            spec: the gang of each attempt.
            programs: for each attempt the programs by local rank; the last attempt's repeat.
            policy: which failures are followed by another attempt; none if nothing is said.
            stop_after: when SIGTERM asks it to stop; None never.
        """
        ...


Behaviour = Callable[[ProcessWorld], None]


def check_process_host(make_world: Callable[[], ProcessWorld]) -> None:
    """Assert every behaviour, each in a world of its own.

    Raises:
        AssertionError: with a note that names the behaviour.
    """
    for name, behaviour in PROCESS_HOST_BEHAVIOURS.items():
        try:
            behaviour(make_world())
        except AssertionError as error:
            error.add_note(f"expected of a process host: {name.replace('_', ' ')}")
            raise


def a_gang_whose_workers_end_well_succeeds(world: ProcessWorld) -> None:
    """If every worker exits with 0, the gang succeeds, and no process is left."""
    record = world.run(
        GangSpec(size=3), [[WorkerProgram(), WorkerProgram(after=SOON), WorkerProgram()]]
    )

    assert record.outcome == Outcome(status=OutcomeStatus.SUCCEEDED, attempts=1)
    assert record.left_behind == ()


def an_exit_code_stops_the_others(world: ProcessWorld) -> None:
    """The first failure ends all, and is the root cause."""
    failing = WorkerProgram(ending=Exits(7), after=SOON)
    record = world.run(GangSpec(size=3, grace=GRACE), [[RUNS, failing, RUNS]])

    told = _failures_in(record)
    assert told[0] == (1, FailureCause.EXITED, 7)
    assert sorted(told[1:]) == [
        (0, FailureCause.STOPPED, -SIGTERM),
        (2, FailureCause.STOPPED, -SIGTERM),
    ]
    assert record.left_behind == ()


def a_failure_before_all_have_come_up_ends_the_attempt(world: ProcessWorld) -> None:
    """All or nothing holds while workers are being started, too."""
    programs = [WorkerProgram(ending=Exits(3)), *[RUNS] * 7]
    record = world.run(GangSpec(size=8, grace=GRACE), [programs])

    assert _failures_in(record)[0] == (0, FailureCause.EXITED, 3)
    assert len(record.outcome.failures) == 8
    assert record.left_behind == ()


def _a_death_by(signal: int) -> Behaviour:
    def a_death_by_signal_is_told_as_such(world: ProcessWorld) -> None:
        """The signal's number arrives."""
        dying = WorkerProgram(ending=Dies(signal), after=SOON)
        record = world.run(GangSpec(size=2, grace=GRACE), [[RUNS, dying]])

        assert _failures_in(record) == [
            (1, FailureCause.SIGNALED, -signal),
            (0, FailureCause.STOPPED, -SIGTERM),
        ]

    return a_death_by_signal_is_told_as_such


def an_exception_is_reported_before_the_exit(world: ProcessWorld) -> None:
    """What a worker reports is delivered before its end."""
    raising = WorkerProgram(ending=Raises("loss is NaN", exception="ValueError"), after=SOON)
    record = world.run(GangSpec(size=2, grace=GRACE), [[raising, RUNS]])

    root = record.outcome.failures[0]
    assert (root.local_rank, root.cause) == (0, FailureCause.RAISED)
    assert root.error is not None
    assert (root.error.type, root.error.message) == ("ValueError", "loss is NaN")
    assert root.exit is not None
    assert root.exit.code == 1
    facts = [entry.stimulus for entry in _entries(record)]
    (report,) = [at for at, fact in enumerate(facts) if isinstance(fact, WorkerReported)]
    exits = [at for at, fact in enumerate(facts) if isinstance(fact, WorkerExited)]
    assert report < min(exits)


def a_worker_may_end_well_when_told_to_stop(world: ProcessWorld) -> None:
    """A worker that obeys with exit code 0 has not failed."""
    failing = WorkerProgram(ending=Exits(1), after=LATER)
    obeying = WorkerProgram(
        ending=RunsForever(), stop_takes=Duration(50 * MILLISECOND), stop_code=0
    )
    record = world.run(GangSpec(size=2, grace=GRACE), [[failing, obeying]])

    assert _failures_in(record) == [(0, FailureCause.EXITED, 1)]


def a_worker_that_ignores_sigterm_is_killed(world: ProcessWorld) -> None:
    """SIGKILL comes when the grace is over."""
    failing = WorkerProgram(ending=Exits(1), after=LATER)
    record = world.run(GangSpec(size=2, grace=SOON), [[failing, RUNS_STUBBORNLY]])

    assert _failures_in(record) == [
        (0, FailureCause.EXITED, 1),
        (1, FailureCause.STOPPED, -SIGKILL),
    ]
    assert record.left_behind == ()


def without_grace_the_others_are_killed_at_once(world: ProcessWorld) -> None:
    """A grace of nothing means SIGKILL first."""
    failing = WorkerProgram(ending=Exits(1), after=SOON)
    record = world.run(GangSpec(size=2, grace=Duration(0)), [[failing, RUNS]])

    assert _failures_in(record)[1] == (1, FailureCause.STOPPED, -SIGKILL)


def a_failed_gang_is_started_again(world: ProcessWorld) -> None:
    """A restart has new processes, and begins when the old ones are gone and swept."""
    first = [WorkerProgram(ending=Exits(1), after=SOON), RUNS]
    second = [WorkerProgram(), WorkerProgram()]
    record = world.run(GangSpec(size=2, grace=GRACE), [first, second], ONE_RESTART)

    assert record.outcome == Outcome(status=OutcomeStatus.SUCCEEDED, attempts=2)
    entries = _entries(record)
    pids = [e.stimulus.pid for e in entries if isinstance(e.stimulus, WorkerSpawned)]
    assert len(set(pids)) == 4
    swept = _first(entries, lambda entry: isinstance(entry.stimulus, Swept))
    again = _first(
        entries,
        lambda entry: isinstance(entry.effect, SpawnWorker) and entry.effect.attempt == 1,
    )
    assert swept < again


def restarts_are_used_up(world: ProcessWorld) -> None:
    """The last failure is the outcome."""
    failing = [[WorkerProgram(ending=Exits(code), after=SOON)] for code in (1, 2)]
    record = world.run(GangSpec(size=1), failing, ONE_RESTART)

    assert record.outcome.attempts == 2
    assert _failures_in(record) == [(0, FailureCause.EXITED, 2)]


def a_stop_ends_the_gang_without_restart(world: ProcessWorld) -> None:
    """All workers get the signal, and the outcome is no failure."""
    record = world.run(GangSpec(size=2, grace=GRACE), [[RUNS, RUNS]], ONE_RESTART, stop_after=SOON)

    assert record.outcome.status is OutcomeStatus.STOPPED
    assert record.outcome.attempts == 1
    assert record.outcome.stop_signal == SIGTERM
    assert sorted(_failures_in(record)) == [
        (0, FailureCause.STOPPED, -SIGTERM),
        (1, FailureCause.STOPPED, -SIGTERM),
    ]
    assert record.left_behind == ()


def a_stop_kills_those_that_ignore_it(world: ProcessWorld) -> None:
    """The grace holds for stops as it does for failures."""
    record = world.run(GangSpec(size=1, grace=SOON), [[RUNS_STUBBORNLY]], stop_after=LATER)

    assert record.outcome.status is OutcomeStatus.STOPPED
    assert _failures_in(record) == [(0, FailureCause.STOPPED, -SIGKILL)]
    assert record.left_behind == ()


def strays_of_a_success_are_swept(world: ProcessWorld) -> None:
    """What a worker leaves behind, in a session of its own, does not outlive the gang."""
    record = world.run(GangSpec(size=2), [[WorkerProgram(strays=2), WorkerProgram(after=SOON)]])

    assert record.outcome.status is OutcomeStatus.SUCCEEDED
    assert record.outcome.survivors == ()
    assert record.left_behind == ()


def strays_of_a_killed_worker_are_swept(world: ProcessWorld) -> None:
    """Nor do those of a worker that could clean up nothing."""
    dying = WorkerProgram(ending=Dies(SIGKILL), after=SOON, strays=1)
    record = world.run(GangSpec(size=2, grace=GRACE), [[dying, RUNS]], ONE_RESTART)

    assert record.outcome.attempts == 2
    assert record.left_behind == ()


def silence_is_a_hang(world: ProcessWorld) -> None:
    """When no worker makes progress, stacks are asked for and the gang is ended."""
    patience = Duration(3 * SECOND)
    silent = WorkerProgram(ending=RunsForever(), progress_every=SOON, silent_after=SOON)
    record = world.run(GangSpec(size=2, hang_timeout=patience, grace=GRACE), [[silent, RUNS]])

    assert record.outcome.status is OutcomeStatus.FAILED
    assert sorted(told[:2] for told in _failures_in(record)) == [
        (0, FailureCause.HUNG),
        (1, FailureCause.HUNG),
    ]
    assert any(isinstance(entry.effect, DumpStacks) for entry in _entries(record))
    assert record.left_behind == ()


def one_lively_worker_is_no_hang(world: ProcessWorld) -> None:
    """Progress of any worker counts for all."""
    patience = Duration(3 * SECOND)
    lively = WorkerProgram(after=Duration(5 * SECOND), progress_every=Duration(100 * MILLISECOND))
    quiet = WorkerProgram(after=Duration(5 * SECOND))
    record = world.run(GangSpec(size=2, hang_timeout=patience), [[lively, quiet]])

    assert record.outcome.status is OutcomeStatus.SUCCEEDED


def the_journal_tells_lives_in_order(world: ProcessWorld) -> None:
    """Every worker comes up, then ends, and then all are swept; time never goes back."""
    size = 6
    record = world.run(GangSpec(size=size), [[WorkerProgram()] * size])

    entries = _entries(record)
    instants = [entry.at for entry in entries]
    assert instants == sorted(instants)
    started: set[int] = set()
    ended: set[int] = set()
    for entry in entries:
        match entry.stimulus:
            case WorkerSpawned(local_rank):
                assert local_rank not in started
                started.add(local_rank)
            case WorkerExited(local_rank, _, _, at):
                assert local_rank in started - ended
                assert at <= entry.at
                ended.add(local_rank)
            case _:
                pass
        if isinstance(entry.effect, Sweep):
            assert ended == set(range(size))


PROCESS_HOST_BEHAVIOURS: dict[str, Behaviour] = {
    **{
        name: behaviour
        for name, behaviour in list(globals().items())
        if isfunction(behaviour) and list(signature(behaviour).parameters) == ["world"]
    },
    **{
        f"a_death_by_signal_{signal}_is_told_as_such": _a_death_by(signal)
        for signal in (SIGKILL, SIGSEGV, SIGABRT)
    },
}
"""Every behaviour by its name, for suites that want one test for each."""


def _failures_in(record: WorldRecord) -> list[tuple[int, FailureCause, int | None]]:
    return [
        (failure.local_rank, failure.cause, None if failure.exit is None else failure.exit.code)
        for failure in record.outcome.failures
    ]


def _entries(record: WorldRecord) -> list[StoryLine]:
    return read_journal(record.journal)


def _first(entries: list[StoryLine], is_wanted: Callable[[StoryLine], bool]) -> int:
    return next(index for index, entry in enumerate(entries) if is_wanted(entry))
