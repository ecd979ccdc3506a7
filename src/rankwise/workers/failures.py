"""What went wrong in a run, and the exception that tells it."""

import msgspec

from rankwise.base.errors import WorkerDied
from rankwise.core.tree.vocabulary import EndCause
from rankwise.drivers.real.tree.reports import Report, rebuilt


class TaskFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A task that did not complete.

    Attributes:
        number: its place in the order of submission, from 0.
        name: what it called.
        cause: why it did not complete.
        child: where it was, empty when it never was anywhere.
        how: how the child ended, if it did.
        because: for a skipped task, the number of the one that tainted it.
        reports: what it raised; a group's members each, those that did.
    """

    number: int
    name: str
    cause: EndCause
    child: str
    how: str = ""
    because: int | None = None
    reports: tuple[Report, ...] = ()

    @property
    def is_consequence(self) -> bool:
        """Whether it only follows from what happened to another task."""
        if self.cause in (EndCause.SKIPPED, EndCause.CANCELLED, EndCause.LOST):
            return True
        return bool(self.reports) and all(report.is_consequence for report in self.reports)

    @property
    def task(self) -> str:
        """What to call the task."""
        return f"task {self.number} ({self.name})" if self.name else f"task {self.number}"

    @property
    def summary(self) -> str:
        """One line."""
        match self.cause:
            case EndCause.RAISED:
                told = min(self.reports, key=_by_consequence, default=None)
                what = told.summary if told is not None else "it raised"
                return f"{self.task} failed at {self.child}: {what}"
            case EndCause.DIED:
                return f"{self.child} {self.how or 'ended'} in {self.task}"
            case EndCause.LOST:
                return f"{self.task} could not run any more: {self.how or 'its child is gone'}"
            case EndCause.SKIPPED:
                return f"{self.task} was skipped, since it needs task {self.because}"
            case EndCause.CANCELLED:
                return f"{self.task} was cancelled"


def exception_for(failures: tuple[TaskFailure, ...], level: int) -> BaseException:
    """What `run` raises: a task's own exception, with where it happened and what else did.

    It is that of the first task that did not only fail because another one had.
    """
    primary = min(failures, key=_root_cause_key)
    if primary.cause is EndCause.RAISED and primary.reports:
        error = rebuilt(
            min(primary.reports, key=_by_consequence),
            f"{primary.task} at {primary.child} of a level-{level} worker",
        )
    else:
        error = WorkerDied(primary.summary)
    for failure in failures:
        if failure is not primary:
            error.add_note(f"besides, {failure.summary}")
    return error


def _root_cause_key(failure: TaskFailure) -> tuple[bool, bool, int]:
    return failure.is_consequence, failure.cause is EndCause.SKIPPED, failure.number


def _by_consequence(report: Report) -> bool:
    return report.is_consequence
