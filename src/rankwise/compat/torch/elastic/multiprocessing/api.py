"""Contexts: workers that have been started, and what waits for them and ends them.

A context is a thin front of `rankwise.launch.run.supervision`. The run goes on in a thread of its
own, which reads the workers' pipes whether or not it is waited for; `wait`, `pids` and `close` ask
it. torch's contexts look every so often; the supervision is told as it happens.

While a context is open, the signals that end a run raise `SignalException` in the main thread, as
programs written for torch expect: they catch it, and close the context with its `sigval`. From
then on a further signal means "now". `close` puts the handlers back that were there before.
"""

import errno
import logging
import os
import shutil
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from rankwise.base.errors import LocalProtocolError, PicklableError, SpawnFailed
from rankwise.base.failure import Failure, FailureCause, Outcome, OutcomeStatus
from rankwise.base.units import MILLISECOND, Duration
from rankwise.compat.torch.elastic.multiprocessing.logs_specs import (
    DefaultLogsSpecs,
    LogsDest,
    LogsSpecs,
)
from rankwise.compat.torch.elastic.multiprocessing.numa import cpus_for
from rankwise.compat.torch.elastic.multiprocessing.redirects import redirect_stderr, redirect_stdout
from rankwise.compat.torch.elastic.multiprocessing.reified_logs import ReifiedLogs, log_plan
from rankwise.compat.torch.elastic.multiprocessing.replaced_streams import ReplacedStreams
from rankwise.compat.torch.elastic.multiprocessing.results import RunProcsResult, process_failures
from rankwise.compat.torch.elastic.multiprocessing.std import Std, to_map
from rankwise.compat.torch.lazy_names import lazy_names
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.drivers.real.call_pickle import name_of
from rankwise.launch.inside.function_payload import pack_function
from rankwise.launch.inside.function_results import values_by_rank
from rankwise.launch.run.function_job import parse_start_method
from rankwise.launch.run.job import Executable, Function, Job, Program, StartMethod
from rankwise.launch.run.supervision import Supervision

if TYPE_CHECKING:
    from rankwise.compat.torch.elastic.multiprocessing.tail_log import TailLog

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "get_std_cm",
    "redirect_stderr",
    "redirect_stdout",
    "start_processes",
    "to_map",
]

logger = logging.getLogger(__name__)

IS_WINDOWS = IS_MACOS = False

# Programs find these here in torch, though they are defined elsewhere.
__getattr__ = lazy_names(
    __name__.rpartition(".")[0],
    {
        "ProcessFailure": "errors",
        "SubprocessHandler": "subprocess_handler",
        "TailLog": "tail_log",
        "_wrap": "function_worker",
        "get_subprocess_handler": "subprocess_handler",
        "record": "errors",
    },
)

STOP_DELAY = Duration(200 * MILLISECOND)
"""How long the other programs may go on when one has failed.

All that were told to stop are failures here, as in torch, which looks ten times a second: so one
that ends at almost the same moment by itself must not be told to.
"""
SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"

Handler = Callable[[int, FrameType | None], Any] | int | None


class SignalException(PicklableError):
    """A signal has come that ends the run.

    Attributes:
        sigval: which one; hand it to `PContext.close`.
    """

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


started_contexts: "WeakSet[PContext]" = WeakSet()
"""For who has to signal all workers of this process."""


class PContext(ABC):
    """The workers of one call of `start_processes`.

    Attributes:
        name: what the workers are called.
        entrypoint: the function or the program.
        args, envs: by local rank.
        nprocs: how many.
        stdouts, stderrs: the files that the streams go to, by local rank; "" for the console.
        error_files: where workers leave their exceptions, by local rank.
        filtered_stdout, filtered_stderr: the files of lines that duplicate filters chose, or None.
    """

    _stop_delay = Duration(0)

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        duplicate_stdout_filters: Sequence[str] | None = None,
        duplicate_stderr_filters: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.nprocs = len(args)
        dest = self._dest = logs_specs.reify(envs)
        _validate_full_rank(dest.stdouts, self.nprocs, "stdouts")
        _validate_full_rank(dest.stderrs, self.nprocs, "stderrs")
        self.stdouts = dest.stdouts
        self.stderrs = dest.stderrs
        self.error_files = dest.error_files
        self.filtered_stdout = dest.filtered_stdout if duplicate_stdout_filters else None
        self.filtered_stderr = dest.filtered_stderr if duplicate_stderr_filters else None
        prefixes = {rank: f"[{name}{rank}]:" for rank in range(self.nprocs)}
        self._logs = log_plan(
            dest,
            {**prefixes, **(log_line_prefixes or {})},
            duplicate_stdout_filters or (),
            duplicate_stderr_filters or (),
        )
        self._supervision: Supervision | None = None
        self._streams: ReplacedStreams | None = None
        self._result: RunProcsResult | None = None
        self._replaced_handlers: dict[signal.Signals, Handler] = {}
        # Ours are shown without files; these are what a program wants followed besides.
        self._tail_logs: list[TailLog] = []
        self._cpus_by_rank: dict[int, frozenset[int]] | None = None

    def start(self) -> None:
        """Start the workers; return when each has its process.

        Raises:
            OSError: a program cannot be started.
            SpawnFailed: a process cannot be made.
            ConfigError: the function cannot be sent to workers.
            LocalProtocolError: the context has been started before.
        """
        self._replaced_handlers = _raise_on_signals()
        started_contexts.add(self)
        self._start()
        for tail in self._tail_logs:
            tail.start()

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:  # noqa: ARG002
        """Wait until all workers have succeeded, or one has failed and the others have ended.

        Args:
            timeout: seconds; 0 only looks, less waits for as long as it takes.
            period: accepted for torch's sake; nothing is looked at periodically.

        Returns:
            The results, or None if the workers are still running after `timeout`.

        Raises:
            SignalException: a signal came meanwhile, in the main thread.
            LocalProtocolError: the context has not been started.
        """
        if self._supervision is None:
            raise LocalProtocolError("the workers have not been started", hint="call start() first")
        outcome = self._supervision.wait(timeout if timeout >= 0 else None)
        if outcome is not None and self._result is None:
            self._result = self._make_result(outcome, self._supervision)
        return self._result

    def pids(self) -> dict[int, int]:
        """The process of every worker, by local rank."""
        return {} if self._supervision is None else self._supervision.pids()

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """End all workers and everything that they have started. Harmless the second time.

        Args:
            death_sig: what to send them first; SIGTERM by default.
            timeout: seconds that they have to end before they are killed, but no more than 30.
        """
        supervision = self._supervision
        if supervision is not None:
            for number in self._own_handlers():
                signal.signal(number, lambda *_: supervision.stop())
            _end(supervision, death_sig or signal.SIGTERM, timeout)
        for tail in self._tail_logs:
            tail.stop()
        if self._streams is not None:
            self._streams.close()
        for number in self._own_handlers():
            signal.signal(number, self._replaced_handlers[number])
        self._replaced_handlers = {}

    def _start(self) -> None:
        if self._supervision is not None:
            raise LocalProtocolError("the workers have been started already; make another context")
        job = self._make_job()
        self._streams = ReplacedStreams()
        supervision = Supervision(
            job,
            places=ReifiedLogs(self._dest, self.envs),
            console_fds=self._streams.console_fds,
        )
        supervision.start_in_thread()
        self._supervision = supervision  # now, since a signal may interrupt us from here on
        supervision.wait_begun()
        try:
            outcome = supervision.wait(0)
        except Exception:
            self._supervision = None  # there is nothing that `close` could end
            raise
        for failure in () if outcome is None else outcome.failures:
            if failure.cause is FailureCause.NOT_STARTED:
                raise SpawnFailed(
                    f"local rank {failure.local_rank} of {self.name} could not be started: "
                    f"{failure.detail}"
                )

    def _own_handlers(self) -> list[signal.Signals]:
        """The signals whose handlers we may put back: not from another thread."""
        if threading.current_thread() is not threading.main_thread():
            return []
        return list(self._replaced_handlers)

    def _make_job(self) -> Job:
        program, start_method = self._program()
        return Job(
            program=program,
            gang=GangSpec(size=self.nprocs, stop_delay=self._stop_delay),
            run_id=f"{self.name}-{os.urandom(4).hex()}",
            role=self.name,
            start_method=start_method,
            environment_by_rank=self.envs,
            rank_variables=False,
            logs=self._logs,
            cpus_by_rank=self._cpus_by_rank,
            handle_signals=False,
            console=False,
        )

    def _make_result(self, outcome: Outcome, supervision: Supervision) -> RunProcsResult:
        failures = outcome.failures
        if outcome.status is OutcomeStatus.FAILED:
            failures = self._failures_to_tell(failures)
        told = process_failures(failures, self.error_files)
        for rank, failure in told.items():
            logger.error(
                "local rank %s of %s failed (exit code %s, pid %s)",
                rank,
                self.name,
                failure.exitcode,
                failure.pid,
            )
        values = {} if told else self._return_values(supervision)
        return RunProcsResult(values, told, self.stdouts, self.stderrs)

    @abstractmethod
    def _program(self) -> tuple[Program, StartMethod]:
        """Say what every worker runs, and how its process is made."""

    @abstractmethod
    def _return_values(self, supervision: Supervision) -> dict[int, Any]:
        """Collect what the workers of a run that succeeded returned."""

    @abstractmethod
    def _failures_to_tell(self, failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
        """Choose those failures of a run that torch tells of."""


class _BoundContext(PContext):
    """Workers that NUMA options may bind to CPUs."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: Sequence[str] | None = None,
        duplicate_stderr_filters: Sequence[str] | None = None,
    ) -> None:
        filters = duplicate_stdout_filters, duplicate_stderr_filters
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters)
        self._cpus_by_rank = cpus_for(numa_options, self.nprocs)


class MultiprocessContext(_BoundContext):
    """A function on several local ranks.

    Args:
        start_method: `spawn`, or `forkserver` or `fork`, which both import once and fork.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: Sequence[str] | None = None,
        duplicate_stderr_filters: Sequence[str] | None = None,
    ) -> None:
        filters = duplicate_stdout_filters, duplicate_stderr_filters
        shared = logs_specs, log_line_prefixes, numa_options
        super().__init__(name, entrypoint, args, envs, *shared, *filters)
        self.start_method = start_method
        self._function = entrypoint

    def _program(self) -> tuple[Program, StartMethod]:
        payload = pack_function(self._function, self.args, arguments_by_rank=True)
        function = Function(name=name_of(self._function), payload=payload)
        return function, parse_start_method(self.start_method)

    def _return_values(self, supervision: Supervision) -> dict[int, Any]:
        values = values_by_rank(supervision.results)
        # A function that left with `sys.exit(0)` has succeeded and returned nothing.
        return {rank: values.get(rank) for rank in range(self.nprocs)}

    def _failures_to_tell(self, failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
        # Of ranks that were ending when they were told to, only the root cause is told.
        root, *others = failures
        return (root, *(failure for failure in others if not _ended_for_us(failure)))


class SubprocessContext(_BoundContext):
    """A program on several local ranks, each in a session of its own."""

    _stop_delay = STOP_DELAY

    def _start(self) -> None:
        for environment in self.envs.values():
            _require_program(str(self.entrypoint), environment)
        super()._start()

    def _program(self) -> tuple[Program, StartMethod]:
        args_by_rank = {rank: tuple(str(arg) for arg in own) for rank, own in self.args.items()}
        return Executable(
            path=str(self.entrypoint), args_by_rank=args_by_rank
        ), StartMethod.SUBPROCESS

    def _return_values(self, supervision: Supervision) -> dict[int, Any]:  # noqa: ARG002
        return dict.fromkeys(range(self.nprocs))

    def _failures_to_tell(self, failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
        return failures  # those that were only told to stop included, as in torch


def _ended_for_us(failure: Failure) -> bool:
    return failure.cause is FailureCause.STOPPED or failure.ended_by_us


def get_std_cm(
    std_rd: str, redirect_fn: Callable[[str], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """Make the context that redirects a stream to `std_rd`, or one that does nothing for ""."""
    return redirect_fn(std_rd) if std_rd else nullcontext()


def _validate_full_rank(values: Mapping[int, Any], nprocs: int, what: str) -> None:
    """Check that there is a value for every local rank.

    Raises:
        RuntimeError: there is one too many or too few.
    """
    expected, actual = set(range(nprocs)), set(values)
    if actual != expected:
        raise RuntimeError(
            f"{what}, local rank mapping mismatch, expected: {expected}, actual: {actual}"
        )


def _raise_on_signals() -> dict[signal.Signals, Handler]:
    """Let the signals that end a run raise in this thread; return the handlers before."""
    if threading.current_thread() is not threading.main_thread():
        logger.warning(
            "Failed to register signal handlers since torchelastic is running on a child thread. "
            "This could lead to orphaned worker processes if the torchrun is terminated."
        )
        return {}
    replaced: dict[signal.Signals, Handler] = {}
    from rankwise.launch.options import default_of  # noqa: PLC0415  # the table is long

    by_default = default_of("signals_to_handle")
    for name in os.environ.get(SIGNALS_VARIABLE, by_default).split(","):
        try:
            number = _signal_number(name.strip())
            replaced[number] = signal.signal(number, _terminate_process_handler)
            logger.info("Registered signal handler for %s", name)
        except (AttributeError, OSError, ValueError):
            logger.warning(
                "Failed to register signal handler for %s, named in %s",
                name,
                SIGNALS_VARIABLE,
                exc_info=True,
            )
        except RuntimeError:
            logger.info("Signal %s is not supported on Windows, skipping", name)
    return replaced


def _signal_number(name: str) -> signal.Signals:
    """The signal of that name.

    Raises:
        ValueError, AttributeError: there is none.
    """
    if not name.startswith("SIG") or name.startswith("SIG_"):  # SIG_IGN, SIG_BLOCK and the like
        raise ValueError(f"{name!r} is not a signal")
    number: signal.Signals = getattr(signal, name)
    return number


def _terminate_process_handler(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise SignalException(f"Process {os.getpid()} got signal: {signum}", signal.Signals(signum))


def _end(supervision: Supervision, death_sig: signal.Signals, timeout: float) -> None:
    """Tell the workers to end, and kill them if they do not."""
    supervision.stop(int(death_sig))
    if supervision.wait(timeout) is None:
        supervision.stop()
        supervision.wait(timeout)


def _require_program(path: str, environment: Mapping[str, str]) -> None:
    """Raise what `subprocess` would raise for a program that is not there or may not be run."""
    if shutil.which(path, path=environment.get("PATH")) is None:
        code = errno.EACCES if os.path.exists(path) else errno.ENOENT
        raise OSError(code, os.strerror(code), path)


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: Mapping[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: Any = None,
    duplicate_stdout_filters: Sequence[str] | None = None,
    duplicate_stderr_filters: Sequence[str] | None = None,
) -> PContext:
    """Start a function, or a program, on `len(args)` local ranks, and return what waits for them.

    Args:
        name: what the workers are called, for prefixes and reports.
        entrypoint: a function, or a program's path.
        args: each local rank's arguments.
        envs: each local rank's variables, added to this process's; TORCHELASTIC_ERROR_FILE is
            written into them.
        logs_specs: where output goes.
        log_line_prefixes: each local rank's prefix for tee'd lines, instead of `[<name><rank>]:`.
        start_method: how functions get their processes: `spawn`, or `forkserver` or `fork`, which
            both import once and fork.
        numa_options: torch's `NumaOptions`: which CPUs each worker is bound to.
        duplicate_stdout_filters: lines of stdout on the console that contain one of these are
            copied to `filtered_stdout.log`.
        duplicate_stderr_filters: the same for stderr.

    Raises:
        RuntimeError: `args` and `envs` are not for the local ranks 0 to n-1.
        OSError: the program cannot be started.
        ConfigError: the function cannot be sent to workers, or an option not be used.
    """
    size = len(args)
    _validate_full_rank(args, size, "args")
    _validate_full_rank(envs, size, "envs")
    shared: dict[str, Any] = {
        "name": name,
        "args": args,
        "envs": envs,
        "logs_specs": logs_specs,
        "log_line_prefixes": log_line_prefixes,
        "numa_options": numa_options,
        "duplicate_stdout_filters": duplicate_stdout_filters,
        "duplicate_stderr_filters": duplicate_stderr_filters,
    }
    context: PContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(entrypoint=entrypoint, **shared)
    else:
        context = MultiprocessContext(entrypoint=entrypoint, start_method=start_method, **shared)
    try:
        context.start()
    except BaseException:
        context.close()
        raise
    return context
