"""The exception tree: every error that rankwise raises on purpose.

Each carries a one-line message that names the thing, the value and what was expected, and
optionally a `hint` that says what to do next.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from rankwise.base.failure import Failure, Stood

DEVICE_FULL_EXIT_CODE = 77
"""Of a simulated rank whose modelled device is full, and of its run. It stands here since this
module imports nothing: the help of commands shows it."""


class PicklableError(Exception):
    """An exception that keeps attributes, notes and causes when it is pickled or copied.

    Its class may be called with any arguments. Attributes of a cause may be lost: see
    `rankwise.base.exception_pickle`.
    """

    def __reduce__(self) -> "tuple[Any, ...]":
        from rankwise.base.exception_pickle import made_without_calling, state_of  # noqa: PLC0415  # rare

        return made_without_calling, (type(self), self.args), state_of(self)

    def __setstate__(self, state: "dict[str, Any] | None") -> None:
        from rankwise.base.exception_pickle import set_state  # noqa: PLC0415  # rare

        set_state(self, state or {})


class RankwiseError(PicklableError):
    """Base of all errors that rankwise raises on purpose."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class RemoteTraceback(RankwiseError):
    """Where in another process an exception was raised: its traceback, as text."""

    def __init__(self, trace: str) -> None:
        super().__init__(f"\n{trace.rstrip()}")


class ConfigError(RankwiseError, ValueError):
    """A value that the user gave cannot be used; the message names the option and the value."""


class LocalProtocolError(RankwiseError, RuntimeError):
    """The caller used an object in a way that its life cycle does not allow."""


class RemoteProtocolError(RankwiseError):
    """The other side of a connection sent something that the protocol does not allow."""


class GangError(RankwiseError):
    """A gang of workers could not do its job."""


class SpawnFailed(GangError):
    """A worker could not be started at all."""


class WorkersFailed(GangError):
    """Workers failed.

    Attributes:
        failures: every worker's failure, the root cause first.
        exceptions: the real exception objects that could travel, by rank.
    """

    def __init__(
        self,
        message: str,
        failures: "tuple[Failure, ...]",
        exceptions: "Mapping[int, BaseException] | None" = None,
        *,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.failures = failures
        self.exceptions = dict(exceptions or {})


class RunTimeout(GangError, TimeoutError):
    """A run was stopped because it took longer than it was allowed to.

    Attributes:
        stood: where the ranks stood when its time was over.
    """

    def __init__(self, message: str, stood: "tuple[Stood, ...]" = ()) -> None:
        super().__init__(message)
        self.stood = stood


class StoreError(RankwiseError):
    """The store that the nodes share could not do what it was asked for."""


class StoreUnavailable(StoreError):
    """The store does not answer; the message names its addresses, and how long was tried."""


class StoreRefused(StoreError):
    """The store answers, but will not let us in: password, token, certificate or version."""


class StoreOfAnotherRun(StoreRefused):
    """The store answers, and is another run's: its token is not ours."""


class LeaseLost(StoreError):
    """A lease has ended, and the entries that were bound to it are gone."""


class Compacted(StoreError):
    """The store has forgotten changes that a watch had not told yet.

    Attributes:
        revision: the oldest revision from which a watch could still begin.
    """

    def __init__(self, message: str, revision: int = 0, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.revision = revision


class RendezvousError(RankwiseError):
    """The nodes of a run could not come to an agreement."""


class RendezvousClosed(RendezvousError):
    """The run is over, or was never open to this node; the message says why."""


class RendezvousTimeout(RendezvousError, TimeoutError):
    """Too few nodes came in time; the message says which ones did."""


class CollectiveError(RankwiseError, RuntimeError):
    """A collective operation between ranks could not be completed."""


class PeerDied(CollectiveError):
    """A rank that this rank was waiting for has died."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """A rank that this rank was waiting for did not come before the deadline."""


class TreeError(RankwiseError, RuntimeError):
    """A tree of chip workers could not do what it was asked to."""


class TreeValueError(ConfigError, TreeError):
    """A value that was given to a tree of chip workers cannot be used."""


class TreeTimeout(TreeError, TimeoutError):
    """A run took longer than it was allowed to."""


class BootstrapFailed(TreeError):
    """A child of a worker did not come up; nothing that was started is left."""


class BootstrapRefused(BootstrapFailed, TreeValueError):
    """A child of a worker did not come up because of a value that it was given."""


class WorkerDied(TreeError):
    """A worker process ended while it was needed: a child of a tree, or a worker of a pool.

    Attributes:
        exit_code: of a pool's worker, minus the signal that killed it; None if it is not known.
        stack: where it stood, if a fatal signal made it tell; else empty.
        was_oom: whether the kernel killed it for lack of memory; None if it is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        exit_code: int | None = None,
        stack: str = "",
        was_oom: bool | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code
        self.stack = stack
        self.was_oom = was_oom


class TaskFailed(TreeError):
    """A task failed, and its own exception could not travel."""


class MailboxError(RankwiseError, RuntimeError):
    """A message between a worker and its child could not be used."""


class MailboxCorrupt(MailboxError, RemoteProtocolError):
    """A message is cut, damaged, or of another version."""


class WindowError(RankwiseError, RuntimeError):
    """The system has no memory or no descriptors for windows that ranks are to share."""


class SimulationError(RankwiseError):
    """A simulated world came to something that no world may come to."""


class Waiting(NamedTuple):
    """A rank that waits in a simulated world where no rank can run.

    Attributes:
        who: the process, rank, kernel program or queue.
        what: what it waits for.
        since: the simulated instant at which it began to wait.
        where: file, line and function of the user's code that waits.
    """

    who: str
    what: str
    since: int
    where: str

    def __str__(self) -> str:
        return self.describe()

    def describe(self, written: "Callable[[int], str]" = str) -> str:
        """Say it in words; `written` writes an instant."""
        place = f" at {self.where}" if self.where else ""
        return f"{self.who} waits for {self.what} since instant {written(self.since)}{place}"


class Deadlock(SimulationError):
    """A simulated world has no further event, but something still waits.

    Attributes:
        waiting: who waits for what, since when and where, in a fixed order.
    """

    def __init__(
        self, message: str, waiting: tuple[Waiting, ...] = (), *, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.waiting = waiting


class TimeLimit(SimulationError):
    """A simulation went on for longer than it was allowed to, in simulated or in real time."""
