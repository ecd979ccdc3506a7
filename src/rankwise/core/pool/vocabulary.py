"""The facts that a pool of workers is told, and its orders.

Tasks and workers are numbers that are never used twice. The function of a task, and the end of its
future, is the driver's business.
"""

from enum import StrEnum

import msgspec

from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant


class TaskEnd(StrEnum):
    """How a task ended, from the pool's point of view."""

    ANSWERED = "answered"
    """Its worker has sent a value or an exception."""
    DIED = "died"
    """Its worker ended while it ran, and it may not be tried again."""
    SKIPPED = "skipped"
    """A future that it needs has failed."""
    CANCELLED = "cancelled"
    ABANDONED = "abandoned"
    """The pool cannot run any task any more."""


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a pool.

    Attributes:
        size: how many workers there are at most.
        tasks_max: how many tasks a worker runs before another one takes its place; None for any.
        depth: how many tasks a worker is sent ahead of its answers at least: while it runs one, the
            next lies in its socket.
        depth_max: the same for tasks that are short.
        ahead: how long a worker is to be busy with what it was sent.
        starts_max: how many workers in a row may end before they can take a task.
        grace: how long a task may take to end after it was interrupted.
        end_patience: how long an idle worker may take to end.
    """

    size: int
    tasks_max: int | None = None
    depth: int = 2
    depth_max: int = 48
    ahead: Duration = Duration(2 * MILLISECOND)
    starts_max: int = 3
    grace: Duration = Duration(5 * SECOND)
    end_patience: Duration = Duration(30 * SECOND)


# Stimuli


class PoolTaskSubmitted(msgspec.Struct, frozen=True, gc=False, tag="TaskSubmitted"):
    """A task was handed in. `needs` futures must be done first; `attempts` is at least 1."""

    task: int
    needs: int = 0
    attempts: int = 1


class NeedMet(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A future that the task needs has a value."""

    task: int


class NeedFailed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A future that the task needs has failed, or was cancelled."""

    task: int
    was_cancelled: bool = False


class TaskCancelled(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The task's future was cancelled, before the task was sent."""

    task: int


class TaskWithdrawn(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The task could not be sent: it was cancelled just before, or cannot be pickled."""

    worker: int
    task: int


class TaskAnswered(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A worker has sent what the task returned or raised, after `took` nanoseconds."""

    worker: int
    task: int
    took: int = 0


class WorkerReady(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A worker can take tasks."""

    worker: int


class PoolWorkerRefused(msgspec.Struct, frozen=True, tag=True):
    """A worker's process could not be made."""

    worker: int
    reason: str


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """A worker's process has ended. It had taken the tasks in `begun`, and not answered.

    Those in `advanced` are chunks of which it had done a part: the call that ran is another one
    than in the attempt before.
    """

    worker: int
    reason: str
    begun: tuple[int, ...] = ()
    advanced: tuple[int, ...] = ()


class InitializerFailed(msgspec.Struct, frozen=True, tag=True):
    """A worker's initializer has raised an exception."""

    worker: int
    reason: str


class TasksRecalled(msgspec.Struct, frozen=True, tag=True):
    """The answer to `RecallTasks`: the tasks that the worker had not taken, perhaps none."""

    worker: int
    tasks: tuple[int, ...]


class CloseRequested(msgspec.Struct, frozen=True, tag=True):
    """No more tasks will come; with `cancels`, those that were not sent are cancelled."""

    cancels: bool = False


class PoolStopRequested(msgspec.Struct, frozen=True, tag=True):
    """The pool is to end now; a second request ends the grace, too."""


class HostLost(msgspec.Struct, frozen=True, tag=True):
    """The process that starts workers has ended, and all workers with it."""

    reason: str


PoolStimulus = (
    PoolTaskSubmitted
    | NeedMet
    | NeedFailed
    | TaskCancelled
    | TaskWithdrawn
    | TaskAnswered
    | WorkerReady
    | PoolWorkerRefused
    | WorkerEnded
    | InitializerFailed
    | TasksRecalled
    | CloseRequested
    | PoolStopRequested
    | HostLost
)


class PoolWorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker of a pool is.

    Attributes:
        worker: its number.
        is_ready: whether it has taken, or could take, a task.
        task: the one that it runs.
        since: when it got this task, or answered the one before.
    """

    worker: int
    is_ready: bool
    task: int | None
    since: Instant


# Effects


class StartWorker(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Make a worker's process; told is `WorkerReady`, a refusal or its end."""

    worker: int


class SendTask(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Send a task to a worker, after those that it was sent before."""

    worker: int
    task: int


class RecallTasks(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Take back what a worker has not taken; told is `TasksRecalled`."""

    worker: int


class EndWorker(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Let a worker without tasks end by itself."""

    worker: int


class InterruptWorker(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Interrupt the task that a worker runs, as Ctrl-C does."""

    worker: int


class KillWorker(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Kill a worker."""

    worker: int


class EndTask(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The task is over: conclude its future. Ordered once for each task.

    `reason` tells how its worker ended, or why the pool cannot run tasks; `worker` is the one that
    died in it.
    """

    task: int
    end: TaskEnd
    reason: str = ""
    worker: int | None = None


class ReleasePool(msgspec.Struct, frozen=True, gc=False, tag=True):
    """No worker is left and none will be needed: let go of everything. It is the last order."""


PoolEffect = (
    StartWorker
    | SendTask
    | RecallTasks
    | EndWorker
    | InterruptWorker
    | KillWorker
    | EndTask
    | ReleasePool
)
