"""One run while it lasts, on processes or on simulated ranks: from its first word to its outcome.

A `Session` is what a run has once: what is said, the journal, the history of attempts, signals and
the time limit, and the end. The differences of its world are behind a `RunHost`: where agents and
ranks live, where output goes, and the loop in which they turn. `ProcessRunHost` has the agent of
this node, which it feeds by a reactor; `simranks/run/run_host` has the agents of all nodes and lets
ranks pass a run token. `Supervision` makes a session, in whatever thread the run is to live.

```
        make_host            begin             outcome of all agents         finish, told
 MAKING ─────────→ MADE ─────────→ TURNING ──────────────────────→ ENDING ──────────────→ OVER
                                    │   ↑ turn, until there is an outcome
                     signals, limit └───┘ request_stop: the first ends the ranks, the second kills
```

Owners
======

- **The stack of the caller** owns every part, in the order of their making, and takes them down in
  reverse on every path. The host puts its parts onto it; the session owns no resource but the
  journal.
- **Once per run, here**: signals (what each is for, which were told of), the time limit's line,
  notices, complaints of full disks, journal, history, `--on-failure`, where the ranks stood.
- **Once per agent, in the host**: planner, gang, node host. A host has one agent or several.
- **Two clocks** (`RunClocks`): the agents' is virtual in a simulation; that of the limits never is,
  since it says for how long people wait: `--timeout`, the grace of `--on-failure`.

Who dies when
=============

- A rank: its agent is told; this session learns of it by an announcement, if at all.
- An agent: the host gives an outcome when the last one has finished.
- The host, by an exception out of `turn`: the stack takes all down; there is no outcome.
- This process: guardians kill what is left of processes; simulated ranks are in it.

The loop can be interrupted: a reactor by a pipe that signals write to, simulated ranks by a handler
that runs while a rank computes, and takes the run token away from it.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from msgspec.structs import replace

from rankwise.base.failure import (
    TIME_LIMIT_SIGNAL,
    Failure,
    Outcome,
    OutcomeStatus,
    Stood,
)
from rankwise.base.units import Duration, Instant, after
from rankwise.drivers.real.journal import FileJournal
from rankwise.drivers.real.logs.file import DiskComplaints
from rankwise.drivers.real.proc import check_proc
from rankwise.launch.run.job import Job
from rankwise.launch.run.log_layout import LogPlaces
from rankwise.launch.run.run_history import RunHistory
from rankwise.launch.run.signal_effects import SignalEffect, effects_of
from rankwise.launch.telling.notices import notice
from rankwise.ports.clock import Clock

if TYPE_CHECKING:
    from rankwise.launch.telling.failure_command import FailureCommand
    from rankwise.launch.telling.failure_description import RankEvidence

SIGTERM = 15


class RunClocks(NamedTuple):
    """The two times of a run; on processes they are one.

    Attributes:
        agents: that of agents and ranks: virtual in a simulation.
        limits: that of people who wait for the run.
    """

    agents: Clock
    limits: Clock


class RunHost(Protocol):
    """Where the agents of a run and their ranks live, write and turn."""

    @property
    def outcome(self) -> Outcome | None:
        """What became of the run, once all agents have finished."""
        ...

    def begin(self) -> None:
        """Let the agents begin their lives. From now on signals and the time limit count."""
        ...

    def turn(self) -> None:
        """Let agents and ranks go on until something has happened."""
        ...

    def finish(self, outcome: Outcome) -> Outcome:
        """Let all output out; the outcome with what is known now, each failure described."""
        ...

    def on_outcome_shown(self, outcome: Outcome) -> None:
        """The outcome is complete: tell those who wait for it."""
        ...

    def stop(self, signum: int | None) -> None:
        """All agents are asked to stop; `Session.stops_asked` says how often they were."""
        ...

    def pass_on(self, signum: int) -> None:
        """Send a signal to the ranks that catch it, and have `Session.tell_passed_on` say so."""
        ...

    def post(self, call: Callable[[], None]) -> None:
        """Have something called where the loop runs; callable from any thread."""
        ...

    def has_root_cause(self, outcome: Outcome) -> bool:
        """Whether the run failed because of an agent that lives here."""
        ...

    def end_well_on_signals(self) -> bool:
        """After a success, have signals end this process as a success; tell whether they do."""
        ...

    def pids(self) -> dict[int, int]:
        """The processes of the present attempt, by local rank; callable from any thread."""
        ...

    def results(self) -> Mapping[int, bytes | bytearray]:
        """What function ranks have sent."""
        ...


class Session:
    """One run while it lasts; `stack` owns its parts, in the order of their making.

    Args:
        job: what to run.
        stack: takes everything down; the caller closes it.
        make_host: makes the host, which first sets `write`, and `clocks` where agents have another.
        places: where log files go.
        limits: the clock of people who wait for the run.
        failure_command: is told of attempts that fail.

    Attributes:
        clocks: of its agents and of its limits.
        write: writes a notice for the user, between the lines of ranks and never inside one.
        caught_signal: the signal to this process that has stopped the run, if one did.
        late_signals: those that came when the gang had finished, complete when `stack` is closed.
        signals_caught: how many were to stop the run while it went on.
        stops_asked: how often the run was asked to stop, by whatever.
        stop_signal: by what it was asked first.
        is_interrupted: whether a signal came when the run was over: no output is waited for.
        effects: what each signal to this process does.

    Raises:
        ConfigError: the job cannot be run as it is described.
        SpawnFailed: not even the guardian could be started.
    """

    def __init__(
        self,
        job: Job,
        stack: ExitStack,
        make_host: "MakeHost",
        *,
        places: LogPlaces,
        limits: Clock,
        failure_command: "FailureCommand | None" = None,
    ) -> None:
        check_proc()  # first of all: whatever reads there would fail in a way of its own
        self.job = job
        self.places = places
        self.write: Callable[[bytes], object] = _write_nothing
        self.caught_signal: int | None = None
        self.late_signals: list[int] = []
        self.signals_caught = 0
        self.stops_asked = 0
        self.stop_signal: int | None = None
        self.is_interrupted = False
        self.effects = effects_of(job.signals, job.passed_signals, heeds_all=job.heeds_all_signals)
        self.complaints = DiskComplaints(self.say)
        self.history = RunHistory(limits.wall_ns, failure_command)
        self.clocks = RunClocks(agents=limits, limits=limits)
        self._caught_as: int | None = None
        """As it was sent: a program may handle SIGALRM, of which SIGTERM is only our reading."""
        self._signals_announced: set[int] = set()
        self._passed_announced: dict[int, tuple[list[int], list[int]]] = {}
        """Which ranks a signal was passed on to, and which others there were, as was last told."""
        self._stop_asked_at: Instant | None = None
        self._is_asked_by_ranks = False
        self._stood: tuple[Stood, ...] = ()
        self._awaited = ""
        self.host = make_host(self, stack)

    def run(self) -> Outcome:
        """Turn until all agents have finished and all that was written is out."""
        host = self.host
        host.begin()
        while (outcome := host.outcome) is None:
            host.turn()
        if outcome.status is OutcomeStatus.SUCCEEDED and self._caught_as is not None:
            # It came when all ranks had ended, before the gang knew that it had succeeded.
            self.is_interrupted = True
            self.late_signals.append(self._caught_as)
        outcome = host.finish(outcome)
        # A run that was stopped before the restart that was announced ends in that attempt.
        last = {failure.attempt for failure in outcome.failures[:1]}
        earlier = tuple(each for each in self.history.earlier if each.number not in last)
        outcome = replace(outcome, earlier=earlier)
        if outcome.status is OutcomeStatus.STOPPED:
            # Only of a stop: of a failure the report tells where its root cause stood.
            outcome = replace(outcome, stood=self._stood, awaited=self._awaited)
        host.on_outcome_shown(outcome)
        return outcome

    @property
    def is_over(self) -> bool:
        """Whether all agents have finished."""
        return self.host.outcome is not None

    def say(self, message: str, event: str = "notice", **fields: Any) -> None:
        """Tell the user something."""
        if self.job.console:
            line = notice(self.job, message, event, **fields)
            self.write(line.encode("utf-8", "replace"))

    def open_journal(self, stack: ExitStack) -> FileJournal | None:
        """Open the run's journal, if it has one; `stack` closes it. A bad disk ends no run.

        It is beside the logs, when the user has named a place for logs. A report or a timeline
        without logs is made of a file without a name (`Job.journal_fd`).
        """
        job, places, complain = self.job, self.places, self.complaints.complain
        wall_ns = self.clocks.agents.wall_ns
        if job.journal_fd is not None:
            name = "the record of this run, in the place for temporary files"
            journal = FileJournal(name, complain, wall_ns, job.journal_fd)
            stack.callback(journal.close)
            return journal
        if not job.logs.directory or job.logs.directory == os.devnull or places.directory is None:
            return None
        path = os.path.join(places.directory, "journal.jsonl")  # pathlib costs milliseconds
        try:
            # A disk that is full or read-only costs the journal, and not the run.
            journal = FileJournal(path, complain, wall_ns)
        except OSError as error:
            complain(path, error)
            return None
        stack.callback(journal.close)
        return journal

    def describe(
        self, failures: tuple[Failure, ...], gather: "Callable[[Failure], RankEvidence]"
    ) -> tuple[Failure, ...]:
        """Describe failures by what the host knows of them, each once, in the same order."""
        if not failures:
            return ()
        from rankwise.launch.telling.failure_description import describe_failure  # noqa: PLC0415  # rare

        # A path in the report must lead somewhere: files of an unnamed place go at the end.
        keeps_files = self.places.keep
        return tuple(
            describe_failure(each, self.job, gather, keeps_files=keeps_files) for each in failures
        )

    def on_signal(self, signum: int) -> None:
        """Do what a signal to this process is for."""
        stopping = self._heed(signum)
        if stopping is None:
            return
        if self.is_over:
            self.is_interrupted = True
            self.late_signals.append(signum)
        else:
            # The first one counts: it decides the exit code, as a shell expects it.
            self.caught_signal = self.caught_signal or stopping
            self._caught_as = self._caught_as or signum
            self.signals_caught += 1
        # That ranks got it too, and said so first, does not make it the second request.
        if not self._is_asked_by_ranks or self.signals_caught != 1:
            self.request_stop(stopping)

    def _heed(self, signum: int) -> int | None:
        """Do what a signal asks for; the one by which it stops the run, if it does."""
        effect, is_new = self.effects[signum], signum not in self._signals_announced
        self._signals_announced.add(signum)
        match effect:
            case SignalEffect.STOPS:
                return signum
            case SignalEffect.STOPS_AS_SIGTERM:
                # Once: the kernel repeats SIGXCPU every second. It only begins a stop: a batch
                # system sends it beside SIGTERM, and ranks that save are to go on saving.
                begins = not self.stops_asked
                if is_new and not self.is_over:
                    from rankwise.launch.telling.announcements import as_sigterm_line  # noqa: PLC0415  # rare

                    self.say(as_sigterm_line(signum, begins=begins), "signal", signal=signum)
                return SIGTERM if is_new and begins else None
            case SignalEffect.PASSED_ON:
                if not self.is_over:
                    self.host.pass_on(signum)
            case SignalEffect.OUTLIVED:
                pass
        return None

    def tell_passed_on(self, signum: int, reached: list[int], others: list[int]) -> None:
        """Say which ranks were sent a signal, unless that is what the last line said of it."""
        if self._passed_announced.get(signum) != (reached, others):
            self._passed_announced[signum] = reached, others
            from rankwise.launch.telling.announcements import passed_on_line  # noqa: PLC0415  # rare

            self.say(passed_on_line(signum, reached, others), "signal", signal=signum)

    def stop_for_ranks(self) -> None:
        """A rank that asks `should_stop` was sent SIGTERM, so all have to stop."""
        if not self._is_asked_by_ranks and not self.stops_asked:
            self._is_asked_by_ranks = True
            self.request_stop(SIGTERM)

    def stop_on_command(self, at_once: bool) -> None:  # the only argument
        """`rankwise stop`: as SIGTERM does; a second command does not kill, unless it says so."""
        if self.is_over:
            return
        if not self.stops_asked:
            self.request_stop(SIGTERM)
        if at_once:
            self.request_stop(SIGTERM)

    def request_stop(self, signum: int | None) -> None:
        """Ask the agents to end; the second time their ranks are killed."""
        if not self.stops_asked:
            # By the clock of people: in a simulation the grace of this process is real time.
            self.stop_signal, self._stop_asked_at = signum, self.clocks.limits.now()
        self.stops_asked += 1
        self.host.stop(signum)

    @property
    def is_time_limit_due(self) -> bool:
        """Whether the time limit would still end the run."""
        return not self.is_over and not self.stops_asked

    def tell_time_limit(self) -> None:
        """Say that the time limit is over."""
        from rankwise.launch.telling.announcements import time_limit_line  # noqa: PLC0415  # rare

        assert self.job.timeout is not None, "there is a limit"
        self.say(time_limit_line(self.job.timeout, self.job.gang.grace), "timeout")

    def note_stand(self, awaited: str, stood: tuple[Stood, ...]) -> None:
        """Keep where the ranks stood when the time limit was over, and who kept them waiting."""
        self._awaited, self._stood = awaited, stood

    @property
    def is_out_of_time(self) -> bool:
        """Whether the time limit was the first to ask for a stop."""
        return self.stop_signal == TIME_LIMIT_SIGNAL

    @property
    def grace_left(self) -> Duration:
        """How much of the time is left that this node has to end once it is told to stop."""
        now = self.clocks.limits.now()
        asked_at = now if self._stop_asked_at is None else self._stop_asked_at
        return Duration(max(0, after(asked_at, self.job.gang.grace) - now))


MakeHost = Callable[[Session, ExitStack], RunHost]


def _write_nothing(_line: bytes) -> None:
    """There is no output yet."""
