"""`rankwise.spawn`: torch.multiprocessing.spawn's signature and semantics on a rankwise gang.

Beyond the original: functions need not be importable (lambdas and notebook functions travel by
value), all failures are known and not only one, nothing outlives the caller, and output lines of
different processes never tear each other.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVarTuple, Unpack, overload

from rankwise.base.errors import GangError
from rankwise.base.failure import SIGNAL_NAMES, Failure, FailureCause, Outcome, OutcomeStatus
from rankwise.launch.run.function_job import function_job
from rankwise.launch.run.job import LogPlan, StartMethodName
from rankwise.launch.run.supervision import Supervision
from rankwise.launch.telling.outcomes import raise_stopped

SIGTERM = 15


class ProcessException(GangError):
    """A spawned process failed.

    Attributes:
        error_index: which one, counted from 0.
        error_pid: its process id.
        msg: the whole message.
        failures: every process's failure, the root cause first.
    """

    def __init__(self, message: str, failures: tuple[Failure, ...]) -> None:
        super().__init__(message)
        self.msg = message
        self.failures = failures
        self.error_index = failures[0].local_rank
        self.error_pid = failures[0].pid or -1


class ProcessRaisedException(ProcessException):
    """A spawned process ended because its function raised; the message has the traceback."""


class ProcessExitedException(ProcessException):
    """A spawned process was killed by a signal, or ended itself.

    Attributes:
        exit_code: its exit code; minus the signal's number if one killed it.
        signal_name: the signal's name, or None.
    """

    def __init__(
        self, message: str, failures: tuple[Failure, ...], exit_code: int, signal_name: str | None
    ) -> None:
        super().__init__(message, failures)
        self.exit_code = exit_code
        self.signal_name = signal_name


class SpawnContext:
    """The processes of a `spawn(…, join=False)`, as torch's `ProcessContext`.

    The processes run, and their output is shown, whether or not they are joined.
    """

    def __init__(self, supervision: Supervision) -> None:
        self._supervision = supervision

    def pids(self) -> list[int]:
        """The process ids, by rank."""
        pids = self._supervision.pids()
        return [pids[rank] for rank in sorted(pids)]

    def join(
        self,
        timeout: float | None = None,
        grace_period: float | None = None,  # noqa: ARG002  # torch's signature
    ) -> bool:
        """Wait until all processes have ended.

        Args:
            timeout: seconds; None waits for as long as it takes.
            grace_period: accepted for torch's sake. When a process fails the others are told to
                stop at once, with the grace that `spawn` was given, whichever thread waits.

        Returns:
            True when all have ended well, False when `timeout` has passed.

        Raises:
            ProcessRaisedException: the function raised in the process that failed first.
            ProcessExitedException: the process that failed first ended otherwise.
        """
        outcome = self._supervision.wait(timeout)
        if outcome is None:
            return False
        raise_unless_joined(outcome, self._supervision)
        return True

    def stop(self, signum: int = SIGTERM) -> None:
        """Send all processes a signal that ends them; the second time, kill them."""
        self._supervision.stop(signum)


Ts = TypeVarTuple("Ts")


@overload
def spawn(
    fn: Callable[[int, Unpack[Ts]], Any],
    args: tuple[*Ts] | list[Any] = ...,
    nprocs: int = ...,
    join: Literal[True] = ...,
    daemon: bool = ...,
    start_method: StartMethodName = ...,
    *,
    start_timeout: float = ...,
) -> None: ...


@overload
def spawn(
    fn: Callable[[int, Unpack[Ts]], Any],
    args: tuple[*Ts] | list[Any] = ...,
    nprocs: int = ...,
    *,
    join: Literal[False],
    daemon: bool = ...,
    start_method: StartMethodName = ...,
    start_timeout: float = ...,
) -> SpawnContext: ...


def spawn(  # noqa: PLR0917  # torch's signature, which is all positional
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: StartMethodName = "spawn",
    *,
    start_timeout: float = 600.0,
) -> SpawnContext | None:
    """Call `fn(i, *args)` in process `i` of `nprocs`; a drop-in for torch.multiprocessing.spawn.

    Args:
        fn: called with the process's number first.
        args: its further arguments, the same in every process.
        nprocs: number of processes.
        join: wait for all of them; otherwise return a context at once.
        daemon: what becomes of processes that were not joined when the program ends: they end
            with it, or else it waits for them. None outlives it in any case.
        start_method: `spawn` (a fresh interpreter each) or `forkserver` (import once, fork).
        start_timeout: seconds that starting all processes may take; torch has no such limit.

    Returns:
        None with `join`, else a context whose `join` waits.

    Raises:
        ProcessRaisedException: `fn` raised; the message has its traceback.
        ProcessExitedException: a process was killed or exited.
        KeyboardInterrupt: Ctrl-C while joining, after all processes have ended.
    """
    job = function_job(
        fn,
        args,
        nprocs,
        start_method=start_method,
        start_timeout=start_timeout,
        logs=LogPlan(prefix_template=""),
        pass_rank=True,
        console=False,
    )
    supervision = Supervision(job)
    if join:
        raise_unless_joined(supervision.run(), supervision)
        return None
    supervision.start_in_thread(daemon=daemon)
    supervision.wait_begun()
    return SpawnContext(supervision)


def raise_unless_joined(outcome: Outcome, supervision: Supervision) -> None:
    """Raise what torch.multiprocessing.spawn would raise for this outcome."""
    match outcome.status:
        case OutcomeStatus.SUCCEEDED:
            return
        case OutcomeStatus.STOPPED:
            raise_stopped(supervision)
        case OutcomeStatus.FAILED:
            raise exception_for(outcome.failures)


def exception_for(failures: tuple[Failure, ...]) -> ProcessException:
    """What torch.multiprocessing.spawn would raise for these failures, the root cause first."""
    root = failures[0]
    if root.error is not None:
        return ProcessRaisedException(
            f"\n\n-- Process {root.local_rank} terminated with the following error:\n"
            f"{root.error.traceback}",
            failures,
        )
    code = 1 if root.exit is None else root.exit.code
    name = SIGNAL_NAMES.get(-code) if code < 0 else None
    how = f"signal {name}" if name is not None else f"exit code {code}"
    # Torch's words, unless there is more to say than them.
    is_out_of_step = root.cause is FailureCause.OUT_OF_STEP
    needs_detail = root.exit is None or root.out_of_memory or is_out_of_step
    detail = f": {root.detail}" if root.detail and needs_detail else ""
    return ProcessExitedException(
        f"process {root.local_rank} terminated with {how}{detail}", failures, code, name
    )
