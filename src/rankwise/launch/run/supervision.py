"""One run, as its caller has it: from a `Job` to its `Outcome`, on processes or simulated ranks.

`Supervision.run` runs a job in the calling thread. `start_in_thread` does the same in a thread of
its own, for callers that must not wait: the workers' pipes are read whether or not a caller is
waiting. The parts of a run, while it lasts, are in `session.py`.
"""

import errno
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from rankwise.base.errors import LocalProtocolError, SpawnFailed
from rankwise.base.failure import Outcome, OutcomeStatus
from rankwise.base.units import Duration
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.hosting.hosting import Hosting
from rankwise.drivers.real.interrupts import gate_here
from rankwise.launch.run.job import Job
from rankwise.launch.run.log_layout import LogLayout, LogPlaces
from rankwise.launch.run.process_run_host import ProcessRunHost
from rankwise.launch.run.run_history import failure_command_of
from rankwise.launch.run.session import Session
from rankwise.launch.run.signal_effects import USER_SIGNALS
from rankwise.launch.telling.notices import notice
from rankwise.wakeup import Wakeup

if TYPE_CHECKING:
    from rankwise.launch.run.session import MakeHost, RunHost


class Supervision:
    """One run of a job.

    Args:
        job: what to run.
        hosting: a warm guardian and fork server to borrow; None makes one for this run.
        started: one that was started for this run, see `hosting_for`; it ends with it.
        places: where log files go, when not as `job.logs` says.
        console_fds: what stands for standard output and standard error.
        make_host: makes the world that the run lives in; None: processes on this machine.
        size: how many ranks there are in that world, as far as this process knows.
        ends_process: whether this process ends with the run, so that a signal after a success has
            nothing left to end. Otherwise it takes its effect, as it may be meant for the program.
    """

    def __init__(
        self,
        job: Job,
        *,
        hosting: Hosting | None = None,
        started: Hosting | None = None,
        places: LogPlaces | None = None,
        console_fds: tuple[int, int] = (1, 2),
        make_host: "MakeHost | None" = None,
        size: int | None = None,
        ends_process: bool = False,
    ) -> None:
        self.job = job
        self.size = job.gang.size if size is None else size
        self._make_host = make_host or self._make_process_host
        self._console_fds = console_fds
        self._ends_process = ends_process
        self.places = places or LogLayout(job.logs, size=self.size, run_id=job.run_id)
        self._hosting = hosting
        self._started = started
        self._clock = SystemClock()
        self._started_at = self._clock.now()
        self._results: Mapping[int, bytes | bytearray] = {}
        self._error: BaseException | None = None
        self._outcome: Outcome | None = None
        self._thread: threading.Thread | None = None
        self._begun = threading.Event()
        self._finished = threading.Event()
        self._session: Session | None = None
        self._early_stops: list[int | None] = []
        """Asked for by other threads before there was a session."""
        self._wakeups: list[Wakeup] = []
        """Of the threads that wait for an event of the run."""
        self._lock = threading.Lock()
        self._failure_command = failure_command_of(job)

    @property
    def results(self) -> Mapping[int, bytes | bytearray]:
        """The result frame of every function worker of the last attempt, by local rank."""
        return self._results

    @property
    def caught_signal(self) -> int | None:
        """The signal to this process that has stopped the run, if one did."""
        return None if self._session is None else self._session.caught_signal

    @property
    def elapsed(self) -> Duration:
        """How long the run has lasted."""
        return Duration(self._clock.now() - self._started_at)

    def pids(self) -> dict[int, int]:
        """The process of every worker of the present attempt, by local rank."""
        session = self._session
        return {} if session is None else session.host.pids()

    def run(self) -> Outcome:
        """Run the job in this thread until it is over.

        Raises:
            ConfigError: the job cannot be run as it is described.
            SpawnFailed: not even the guardian could be started, or there are too few open files.
            KeyboardInterrupt: Ctrl-C after the gang had succeeded; other signals that came so
                late take their effect likewise.
        """
        if self._session is not None or self._finished.is_set():
            raise LocalProtocolError("a supervision runs once; make another for another run")
        try:
            with _too_few_files_explained(), ExitStack() as stack:
                try:
                    session = self._make_session(stack)
                finally:
                    if self._ends_process:  # the command line has held them; see its `start.py`
                        held = {signal.SIGINT, *USER_SIGNALS}
                        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
                with self._lock:
                    self._session = session
                    # A stop may be asked for from another thread while the host is still being
                    # made.
                    for signum in self._early_stops:
                        session.request_stop(signum)
                self._outcome = session.run()
                self._results = session.host.results()
                is_over_for_good = self._ends_process and session.host.end_well_on_signals()
        finally:
            # Also if nothing ever began: a caller that waits for that would wait for ever.
            self._tell(self._begun)
            self._tell(self._finished)
        if self._outcome.status is OutcomeStatus.SUCCEEDED and not is_over_for_good:
            for signum in session.late_signals[:1]:
                # The run took it for a stop, which came too late: the program that called gets its
                # effect.
                signal.raise_signal(signum)
        return self._outcome

    def _make_session(self, stack: ExitStack) -> Session:
        return Session(
            self.job,
            stack,
            self._make_host,
            places=self.places,
            limits=self._clock,
            failure_command=self._failure_command,
        )

    def _make_process_host(self, session: Session, stack: ExitStack) -> "RunHost":
        return ProcessRunHost(
            session,
            stack,
            console_fds=self._console_fds,
            hosting=self._hosting,
            started=self._started,
            clock=self._clock,
            on_begun=partial(self._tell, self._begun),
        )

    def start_in_thread(self, *, daemon: bool = True) -> None:
        """Run the job in a thread of its own; `wait` tells when it is over.

        Args:
            daemon: whether the run ends with the program; otherwise the program's end waits for
                the run's.
        """
        self._thread = threading.Thread(target=self._run_in_thread, name="rankwise", daemon=daemon)
        self._thread.start()

    def wait_begun(self, timeout: float | None = None) -> bool:
        """Wait until every worker's process has been made, or the run is over."""
        return self._wait_for(self._begun, timeout)

    def wait(self, timeout: float | None = None) -> Outcome | None:
        """Wait for a run started with `start_in_thread`; None if it is not over within `timeout`.

        Raises:
            Exception: whatever `run` would have raised.
        """
        if not self._wait_for(self._finished, timeout):
            return None
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._outcome

    def _wait_for(self, event: threading.Event, timeout: float | None) -> bool:
        """Wait for an event of the run; handlers of signals run at once, and may raise."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        if event.is_set() or time.monotonic() >= until:
            return event.is_set()
        with gate_here().used() as gate, Wakeup() as wakeup:

            def patience() -> float:
                gate.run_due()
                return max(0.0, until - time.monotonic())

            with self._lock:
                # A wait of `Event` would hold signals back until it is over.
                self._wakeups.append(wakeup)
            try:
                while not event.is_set() and time.monotonic() < until:
                    wakeup.wait(patience)
            finally:
                with self._lock:
                    self._wakeups.remove(wakeup)
        return event.is_set()

    def _tell(self, event: threading.Event) -> None:
        event.set()
        with self._lock:
            for wakeup in self._wakeups:
                wakeup.ring()

    @property
    def has_failure_command(self) -> bool:
        """Whether the job has a command that is told of failures."""
        return self._failure_command is not None

    def run_failure_command(self) -> None:
        """Run the user's command about a run that has failed, on the node where it did, and wait.

        So does the first node if the time limit has ended it.

        That of an earlier attempt is waited for in any case.
        """
        command, outcome, session = self._failure_command, self._outcome, self._session
        if command is None or outcome is None or session is None:
            return
        from rankwise.launch.telling.failure_command import tell_of_end  # noqa: PLC0415  # rare

        tell_of_end(
            command,
            outcome,
            self,
            is_of_this_node=session.host.has_root_cause(outcome),
            grace_left=session.grace_left,
        )

    def stop(self, signum: int | None = None) -> None:
        """Ask the gang to end, from any thread; asking twice kills it."""
        number = None if signum is None else int(signum)  # no enum on the wire
        with self._lock:
            session = self._session
            if session is None:
                self._early_stops.append(number)
        if session is not None and not self._finished.is_set():
            # Agents are touched by the thread of their loop alone.
            session.host.post(lambda: session.request_stop(number))

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001  # raised again by `wait`
            self._error = error


@contextmanager
def _too_few_files_explained() -> Iterator[None]:
    """Say what to do where the limit of open files ends a run, wherever that is: at an import."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise SpawnFailed(
            f"the limit of open files is too low for this run: {error.strerror}",
            hint="raise the limit: ulimit -n 1024",
        ) from error


def supervise(
    job: Job,
    places: LogPlaces | None = None,
    *,
    started: Hosting | None = None,
    ends_process: bool = False,
) -> Outcome:
    """Run a job in this thread and tell the user on stderr how it went wrong, if it did.

    Args:
        job: what to run.
        places: where log files go, when not as the job says.
        started: see `Supervision`.
        ends_process: the same.

    Raises:
        ConfigError: the job cannot be run as it is described.
        SpawnFailed: not even the guardian could be started, or there are too few open files.
    """
    supervision = Supervision(job, started=started, places=places, ends_process=ends_process)
    outcome = supervision.run()
    if job.console:
        tell(outcome, supervision)
    supervision.run_failure_command()
    return outcome


def tell(outcome: Outcome, supervision: Supervision) -> None:
    """Tell the user on stderr how a run went wrong, if it did."""
    logs = supervision.places.directory if supervision.places.keep else None
    with suppress(OSError):  # the reader of stderr has gone; the exit code tells enough
        if supervision.job.log_format == "json":
            sys.stderr.writelines(_end_for_machines(outcome, supervision))
            return
        if outcome.status is OutcomeStatus.FAILED and not outcome.failures:
            sys.stderr.write(notice(supervision.job, outcome.detail))
        elif outcome.status is OutcomeStatus.FAILED:
            # The report's words cost milliseconds of imports, which a success need not pay. It
            # names the logs, and is the last that is said.
            from rankwise.launch.telling.failure_report.composing import compose_report  # noqa: PLC0415
            from rankwise.launch.telling.failure_report.rendering import write_report  # noqa: PLC0415  # the same
            from rankwise.launch.telling.outcomes import report_context  # noqa: PLC0415

            report = compose_report(outcome, report_context(supervision))
            write_report(report, sys.stderr, os.environ)
            return
        if outcome.status is OutcomeStatus.STOPPED:
            from rankwise.launch.telling.outcomes import stop_in_words  # noqa: PLC0415  # rare

            sys.stderr.write(notice(supervision.job, stop_in_words(outcome, supervision)))
        if logs is not None and os.path.isdir(logs):
            sys.stderr.write(notice(supervision.job, f"logs are in {logs}"))


def _end_for_machines(outcome: Outcome, supervision: Supervision) -> Iterable[str]:
    from rankwise.launch.telling.notices import end_notices  # noqa: PLC0415  # not for a success of people
    from rankwise.launch.telling.outcomes import end_in_words  # noqa: PLC0415  # the same

    message = end_in_words(outcome, supervision)
    why = outcome.awaited or outcome.detail
    message = f"{message}: {why}" if why else message
    return end_notices(supervision.job, outcome, message)
