"""What a run has once, in whichever world its agents and ranks live."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import msgspec

from rankwise.base.failure import (
    TIME_LIMIT_SIGNAL,
    ExitStatus,
    Failure,
    FailureCause,
    Outcome,
    OutcomeStatus,
    Stood,
)
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.cli.run import config_from_cli
from rankwise.core.agent.vocabulary import AnnounceRestart
from rankwise.launch.run.job import Job
from rankwise.launch.run.log_layout import LogLayout
from rankwise.launch.run.session import Session
from rankwise.simranks.run.run_host import SimulatedRunHost

SUCCESS = Outcome(status=OutcomeStatus.SUCCEEDED, attempts=1)
STOPPED = Outcome(status=OutcomeStatus.STOPPED, attempts=1, stop_signal=TIME_LIMIT_SIGNAL)


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.instant = Instant(0)

    def now(self) -> Instant:
        return self.instant

    def wall_ns(self) -> int:
        return 1_000_000_000


class ScriptedHost:
    """A world without ranks, whose agents end after the events of a script."""

    def __init__(self, outcome: Outcome, *events: Callable[[], None]) -> None:
        self.outcome: Outcome | None = None
        self.stops: list[int | None] = []
        self.passed: list[int] = []
        self.told: Outcome | None = None
        self._events = list(events)
        self._end = outcome

    def begin(self) -> None:
        pass

    def turn(self) -> None:
        if self._events:
            self._events.pop(0)()
        else:
            self.outcome = self._end

    def finish(self, outcome: Outcome) -> Outcome:
        return outcome

    def on_outcome_shown(self, outcome: Outcome) -> None:
        self.told = outcome

    def stop(self, signum: int | None) -> None:
        self.stops.append(signum)

    def pass_on(self, signum: int) -> None:
        self.passed.append(signum)

    def post(self, call: Callable[[], None]) -> None:
        call()

    def has_root_cause(self, outcome: Outcome) -> bool:
        return not outcome.failures

    def end_well_on_signals(self) -> bool:
        return False

    def pids(self) -> dict[int, int]:
        return {}

    def results(self) -> Mapping[int, bytes]:
        return {}


def job_of(*options: str) -> Job:
    return config_from_cli([*options, "--no-python", "true"], os.environ)


def session_of(host: ScriptedHost, job: Job | None = None) -> tuple[Session, list[str]]:
    """A session, and what it says."""
    job = job_of() if job is None else job
    said: list[str] = []
    places = LogLayout(job.logs, size=1, run_id=job.run_id)
    session = Session(
        job, ExitStack(), lambda _session, _stack: host, places=places, limits=ManualClock()
    )
    session.write = lambda line: said.append(line.decode())
    return session, said


def signals(session: Session, numbers: Sequence[int]) -> list[Callable[[], None]]:
    return [lambda number=number: session.on_signal(number) for number in numbers]  # type: ignore[misc]


def run_with_signals(outcome: Outcome, *numbers: int) -> tuple[Session, ScriptedHost, list[str]]:
    host = ScriptedHost(outcome)
    session, said = session_of(host)
    host._events = signals(session, numbers)  # the script of this test
    session.run()
    return session, host, said


def test_each_signal_that_stops_a_run_is_a_request_of_its_own() -> None:
    session, host, _ = run_with_signals(STOPPED, signal.SIGINT, signal.SIGTERM)

    assert host.stops == [signal.SIGINT, signal.SIGTERM]
    assert (session.caught_signal, session.stop_signal) == (signal.SIGINT, signal.SIGINT)


def test_a_repeated_signal_that_counts_as_sigterm_begins_one_stop_and_is_told_once() -> None:
    _, host, said = run_with_signals(STOPPED, signal.SIGXCPU, signal.SIGXCPU)

    assert host.stops == [signal.SIGTERM]
    assert said == ["rankwise: SIGXCPU: the run is stopped as by SIGTERM\n"]


def test_the_ranks_that_a_signal_reached_are_told_again_only_when_they_are_others() -> None:
    session, said = session_of(ScriptedHost(SUCCESS))

    for reached in ([0, 1], [0, 1], [1]):
        session.tell_passed_on(signal.SIGWINCH, reached, [])

    assert said == [
        "rankwise: SIGWINCH: passed on to ranks 0-1\n",
        "rankwise: SIGWINCH: passed on to rank 1\n",
    ]


def test_a_signal_after_the_end_is_kept_for_the_caller() -> None:
    host = ScriptedHost(SUCCESS)
    session, _ = session_of(host)
    session.run()

    session.on_signal(signal.SIGINT)

    assert (session.late_signals, session.caught_signal) == ([signal.SIGINT], None)
    assert session.is_interrupted


def test_a_signal_that_came_too_late_to_stop_anything_is_kept_for_the_caller_as_it_was_sent() -> (
    None
):
    session, _, _ = run_with_signals(SUCCESS, signal.SIGXCPU, signal.SIGINT)

    assert session.late_signals == [signal.SIGXCPU]
    assert session.is_interrupted  # no output is waited for


def test_the_request_of_ranks_and_the_signal_that_reached_them_are_one_request() -> None:
    host = ScriptedHost(STOPPED)
    session, _ = session_of(host)

    session.stop_for_ranks()
    session.on_signal(signal.SIGTERM)

    assert host.stops == [signal.SIGTERM]
    session.on_signal(signal.SIGTERM)
    assert host.stops == [signal.SIGTERM, signal.SIGTERM]


def test_the_time_limit_leaves_a_run_alone_that_is_being_stopped() -> None:
    session, _ = session_of(ScriptedHost(STOPPED), job_of("--timeout=2s"))
    assert session.is_time_limit_due

    session.request_stop(signal.SIGTERM)

    assert not session.is_time_limit_due
    assert not session.is_out_of_time


def test_time_limit_of_simulated_ranks_does_not_hurry_a_stop_that_came_meanwhile() -> None:
    """The timer of the limit may have to wait for a console before it sends its signal."""
    session, _ = session_of(ScriptedHost(STOPPED), job_of("--timeout=5"))
    host = object.__new__(SimulatedRunHost)
    host._session = session  # all that the handler reads
    session.on_signal(signal.SIGTERM)

    host._on_signal(TIME_LIMIT_SIGNAL, None)

    assert session.stops_asked == 1


def test_the_grace_that_is_left_counts_from_the_first_request() -> None:
    host = ScriptedHost(STOPPED)
    session, _ = session_of(host, job_of("--shutdown-timeout=10s"))
    limits = session.clocks.limits
    assert isinstance(limits, ManualClock)

    session.request_stop(signal.SIGTERM)
    limits.instant = Instant(4 * SECOND)
    session.request_stop(signal.SIGTERM)

    assert session.grace_left == Duration(6 * SECOND)


def test_where_ranks_stood_is_told_of_a_run_that_was_stopped_and_of_no_other() -> None:
    stood = (Stood(rank=0, waits_for="rank 1"),)
    for outcome in (STOPPED, SUCCESS):
        host = ScriptedHost(outcome)
        session, _ = session_of(host)
        session.note_stand("rank 1 is awaited", stood)

        told = session.run()

        expected = ("rank 1 is awaited", stood) if outcome is STOPPED else ("", ())
        assert (told.awaited, told.stood) == expected
        assert host.told == told


def test_the_attempt_that_was_the_last_after_all_is_not_among_the_earlier_ones() -> None:
    failures = tuple(
        Failure(
            local_rank=0, rank=0, attempt=attempt, cause=FailureCause.EXITED, at=Instant(1),
            exit=ExitStatus(3), host="h0",
        )
        for attempt in (0, 1)
    )  # fmt: skip
    host = ScriptedHost(msgspec.structs.replace(STOPPED, failures=failures[1:]))
    session, _ = session_of(host)
    for failure in failures:
        session.history.note(
            AnnounceRestart(
                failure.attempt, restarts_left=1, pause=Duration(0), failures=(failure,)
            )
        )

    told = session.run()

    assert [each.number for each in told.earlier] == [0]
