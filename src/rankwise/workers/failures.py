"""What went wrong in a run, and the exception that tells it.

A `Failure` is of a process: what it raised, or how it ended. A `TaskFailure` is of a task, which
may have been at several processes, and whose `EndCause` a process cannot have: it was skipped.
So a task's failure holds those of the processes that ran it, in `root_cause`'s order.

Tasks have an order of their own. Which of them only follow from others the task graph knows, so
nothing has to be guessed from instants; of several to blame, the first that was submitted is told,
so that equal runs raise equal exceptions.
"""

from collections.abc import Iterable
from typing import Self

import msgspec

from rankwise.base.errors import WorkerDied
from rankwise.base.failure import Failure, FailureCause
from rankwise.base.root_cause import is_of_our_collectives, root_cause_first
from rankwise.core.tree.vocabulary import EndCause, Unfinished
from rankwise.drivers.real.tree.reports import Report, rebuilt
from rankwise.workers.worker_tree import WorkerTree


class TaskFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A task that did not complete.

    Attributes:
        number: its place in the order of submission, from 0.
        name: what it called.
        cause: why it did not complete.
        child: where it was, empty when it never was anywhere.
        how: how the child ended, if it did.
        because: for a skipped task, the number of the one that tainted it.
        failures: those of the children that ran it, the root cause first; of a group's members
            each that failed. A `local_rank` is the number of a child.
        raised: what came from the child that is the root cause, if it raised.
    """

    number: int
    name: str
    cause: EndCause
    child: str
    how: str = ""
    because: int | None = None
    failures: tuple[Failure, ...] = ()
    raised: Report | None = None

    @classmethod
    def of(cls, unfinished: Unfinished, tree: WorkerTree) -> Self:
        """What the children of a tree have told of a task that did not complete."""
        reports = dict(tree.engine.reports.get(unfinished.number, ()))
        failures = root_cause_first(
            [
                *map(_failure_of, reports, reports.values()),
                *(tree.ends[one] for one in unfinished.deaths),
            ]
        )
        cause, child = unfinished.cause, unfinished.child
        if failures:
            child = failures[0].local_rank
            has_raised = failures[0].cause is FailureCause.RAISED
            cause = EndCause.RAISED if has_raised else EndCause.DIED
        how = tree.last_ending
        if child is not None:
            how = tree.ends[child].detail if child in tree.ends else ""
        return cls(
            number=unfinished.number,
            name=unfinished.name,
            cause=cause,
            child="" if child is None else tree.engine.children.name_of(child),
            how=how,
            because=unfinished.because,
            failures=failures,
            raised=None if child is None or cause is not EndCause.RAISED else reports.get(child),
        )

    @property
    def is_consequence(self) -> bool:
        """Whether it only follows from what happened to another task."""
        if self.cause in (EndCause.SKIPPED, EndCause.CANCELLED, EndCause.LOST):
            return True
        return bool(self.failures) and all(map(is_of_our_collectives, self.failures))

    @property
    def task(self) -> str:
        """What to call the task."""
        return f"task {self.number} ({self.name})" if self.name else f"task {self.number}"

    @property
    def summary(self) -> str:
        """One line."""
        match self.cause:
            case EndCause.RAISED:
                what = "it raised" if self.raised is None else self.raised.summary
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
    """What `run` raises: a task's own exception, with where it happened and what else did."""
    root = root_cause_of(failures)
    if root.raised is not None:
        error = rebuilt(root.raised, f"{root.task} at {root.child} of a level-{level} worker")
    else:
        error = WorkerDied(root.summary)
    for failure in failures:
        if failure is not root:
            error.add_note(f"besides, {failure.summary}")
    return error


def root_cause_of(failures: Iterable[TaskFailure]) -> TaskFailure:
    """The first task that did not only fail because another one had."""
    return min(failures, key=_root_cause_key)


def _root_cause_key(failure: TaskFailure) -> tuple[bool, bool, int]:
    return failure.is_consequence, failure.cause is EndCause.SKIPPED, failure.number


def _failure_of(child: int, report: Report) -> Failure:
    assert report.error is not None, "it tells of an exception"
    return Failure(
        local_rank=child,
        attempt=0,
        cause=FailureCause.RAISED,
        at=report.error.raised_at,
        wall_ns=report.error.wall_ns,
        error=report.error,
    )
