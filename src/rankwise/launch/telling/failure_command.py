"""`--on-failure CMD`: the user's own way to be told that ranks have failed.

The command is run by a shell, with one JSON object on its standard input:

- `event`: `restart` when another attempt follows, `failure` when the run is over, `timeout` when
  its time limit has ended it;
- `time` (UTC), `run`, `node` (this host, as in JSON lines), `message`: what has happened, in a
  sentence;
- `failures`: one object per rank, the root cause first, with `rank`, `attempt`, `cause`, `host`,
  `pid`, `exit_code`, `error`, `traceback`, `logs`; a hang has the cause `hung`; what is
  `out-of-step`, and for whom ranks that hang wait, has `accused`, all ranks that are so together:
  of several none is the culprit;
- of a restart on one node `restarts_left`; of the end `starts`, and the text of the `report`;
- `logs`: the run's log directory, if it is kept.

A run never waits for it in the middle, but at its end. One event comes after the other: its command
begins when that of the last has ended, or was killed after a minute. A run that is told to stop
leaves it the grace of its ranks; told again, also while it waits at its end, it kills it. Those
behind it are not begun: a line says so. Its output goes to stderr. It changes neither the outcome
nor the exit code.
"""

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from rankwise.base.failure import Failure, Outcome, OutcomeStatus, signal_name
from rankwise.base.units import SECOND, Duration, format_duration
from rankwise.drivers.real.signals import SignalPipe
from rankwise.launch.run.job import Job
from rankwise.launch.run.signal_effects import STOPPING, effects_of
from rankwise.launch.telling.failure_report.sentences import one_line
from rankwise.launch.telling.notices import fields_of, line_for_machines, notice
from rankwise.wakeup import Wakeup

if TYPE_CHECKING:
    from rankwise.launch.run.supervision import Supervision

PATIENCE_S = 60.0
_STDERR = 2


class FailureCommand:
    """Runs the command of one run."""

    def __init__(self, job: Job, command: str) -> None:
        self._job = job
        self._command = command
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up = threading.Event()
        self._wakeup: Wakeup | None = None
        """Of who waits for the commands."""
        self._lock = threading.Lock()

    def start(self, event: str, failures: Sequence[Failure], **fields: Any) -> None:
        """Run it for an event; returns at once."""
        told = [fields_of(failure) for failure in failures]
        message = fields.pop("message", "") or (one_line(failures[0]) if failures else "")
        line = line_for_machines(self._job, message, event, failures=told, **fields)
        before = self._threads[-1] if self._threads else None
        words = msgspec.json.encode(line), before
        thread = threading.Thread(target=self._run_in_turn, args=words, daemon=True)
        self._threads.append(thread)
        with self._lock:
            self._unfinished += 1
        thread.start()

    def wait(
        self, patience_s: float = math.inf, *, begin: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until all that were started have ended, or were killed.

        A signal that ends runs leaves them the grace, and no time where that has begun.

        Args:
            patience_s: when they are killed, at the latest.
            begin: starts the last one, once signals are handled: else one could end this process in
                between, and the command would run on.
        """
        ends_at = time.monotonic() + patience_s
        job = self._job
        effects = effects_of(job.signals, job.passed_signals, heeds_all=job.heeds_all_signals)
        ending = [each for each, effect in effects.items() if effect in STOPPING]
        signals = SignalPipe(ending if self._job.handle_signals else ())

        def patience() -> float:
            nonlocal ends_at
            for signum in signals.take() if signals.is_active else ():
                ends_at = self._end_after_signal(signum, ends_at)
            return max(0.0, ends_at - time.monotonic())

        with signals, Wakeup() as wakeup:
            with self._lock:
                self._wakeup = wakeup
            try:
                begin()
                while self._unfinished and wakeup.wait(patience):
                    pass
            finally:
                with self._lock:
                    self._wakeup = None
                self._give_up()
                for thread in self._threads:
                    thread.join()

    def _end_after_signal(self, signum: int, ends_at: float) -> float:
        if ends_at < math.inf:
            return 0.0
        grace = self._job.gang.grace
        self._say(
            f"{signal_name(signum)}: waiting {format_duration(grace)} for the command of"
            " --on-failure; again to kill it"
        )
        return time.monotonic() + grace / SECOND

    def _give_up(self) -> None:
        with self._lock:
            self._given_up.set()
            if self._process is not None and self._process.returncode is None:
                _kill(self._process)

    def _run_in_turn(self, told: bytes, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            self._run(told)
        finally:
            with self._lock:
                self._unfinished -= 1
                if self._wakeup is not None:
                    self._wakeup.ring()

    def _run(self, told: bytes) -> None:
        with self._lock:
            if self._given_up.is_set():
                self._say(
                    "the command of --on-failure was not run again, since the run was stopped"
                )
                return
            process = self._process = subprocess.Popen(  # noqa: S602  # the user's words for the user's shell
                self._command,
                shell=True,
                stdin=subprocess.PIPE,
                stdout=_STDERR,
                start_new_session=True,  # Ctrl-C is for the run
            )
        trouble = ""
        try:
            process.communicate(told + b"\n", timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.wait()
            trouble = f"did not end within {PATIENCE_S:g} s: killed"
        else:
            if self._given_up.is_set():
                trouble = "was killed, since the run was stopped"
            elif process.returncode:
                trouble = f"ended with {process.returncode}"
        if trouble:
            self._say(f"the command of --on-failure {trouble}")

    def _say(self, message: str) -> None:
        if self._job.console:
            with suppress(OSError):
                os.write(_STDERR, notice(self._job, message).encode("utf-8", "replace"))


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def tell_of_end(
    command: FailureCommand,
    outcome: Outcome,
    run: "Supervision",
    *,
    is_of_this_node: bool = True,
    grace_left: Duration | None = None,
) -> None:
    """Run it for the end of a run that has failed or whose time is up, and wait.

    A command that was started before is waited for in any case.

    Args:
        command: the command.
        outcome: how the run ended.
        run: that run.
        is_of_this_node: whether the root cause is here, so that no other node tells of it.
        grace_left: how long a run that was stopped may wait; None is its grace.
    """
    from rankwise.launch.telling.outcomes import is_out_of_time, report_of, stop_in_words  # noqa: PLC0415  # rare

    is_stopped = outcome.status is OutcomeStatus.STOPPED
    is_timeout = is_stopped and is_out_of_time(outcome, run)
    has_failed = is_timeout or outcome.status is OutcomeStatus.FAILED
    if not has_failed or not is_of_this_node:
        grace = run.job.gang.grace if grace_left is None else grace_left
        # A stopped run waits for no command longer than for its ranks.
        command.wait(grace / SECOND if is_stopped else math.inf)
        return
    event, failures, message = "failure", outcome.failures, outcome.detail
    if is_timeout:
        report = stop_in_words(outcome, run)
        # An exit of a rank after the stop is not a failure of its own.
        event, failures, message = "timeout", (), report.partition("\n")[0]
    else:
        report = report_of(outcome, run)
    start = partial(
        command.start,
        event,
        failures,
        report=report,
        message="" if failures else message,
        starts=outcome.attempts,
        logs=run.places.directory if run.places.keep else None,
    )
    command.wait(begin=start)
