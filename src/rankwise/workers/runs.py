"""The runs of an initialised worker: one after the other, each to its end, whatever happens."""

import os
import time
from typing import Any, NoReturn

from rankwise.base.errors import LocalProtocolError
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.tree.vocabulary import Drained, EndCause, Unfinished
from rankwise.drivers.real.tree.reports import Report
from rankwise.workers.failures import TaskFailure, exception_for
from rankwise.workers.household import Household
from rankwise.workers.orchestrator import Orchestrator
from rankwise.workers.timeline import Timeline

_GRACE = Duration(2 * SECOND)
"""How long tasks may go on after an interrupt or a time-out before their children are killed."""

_NOTES_MAX = 20


class Runs:
    """Runs orchestration functions, and remembers what became of the last one.

    Attributes:
        failures: what went wrong in the last run, in the order of submission.
        timeline: what chips did in simulated time in the last run.
        is_running: whether a run is going on.
    """

    def __init__(self, household: Household | None, level: int) -> None:
        self._household = household
        self._level = level
        self._pid = os.getpid()
        self.failures: tuple[TaskFailure, ...] = ()
        self.timeline = Timeline([])
        self.is_running = False
        if household is not None:
            household.timeline = self.timeline

    def check_ready(self) -> Household:
        """Refuse what cannot work.

        Raises:
            LocalProtocolError: a run is going on.
            WorkerDied: a child that nobody replaces has ended.
        """
        assert self._household is not None, "the worker is initialised"
        if self.is_running:
            raise LocalProtocolError(
                "run() was called inside of run()", hint="submit tasks to the orchestrator"
            )
        self._household.engine.children.check_whole()
        return self._household

    def run(
        self,
        callable_: Any,
        args: Any,
        config: Any,
        *,
        patience: Duration | None = None,
        clock: int = 0,
    ) -> None:
        """Call an orchestration function, and wait for all that it submits; see `Worker.run`."""
        household = self.check_ready()
        engine = household.engine
        if self.timeline.entries:
            household.timeline = self.timeline = Timeline([])
        deadline = None
        if patience is not None:
            deadline = Instant(time.monotonic_ns() + patience)
        self.failures = ()
        if household.table.dropped:
            household.table.let_go()
        self.is_running = True
        engine.begin_run(clock, deadline)
        orch = Orchestrator(household)
        error: BaseException | None = None
        try:
            try:
                callable_(orch, args, config)
            except Exception as raised:  # noqa: BLE001  # raised again when all tasks have ended
                error = raised
            if os.getpid() != self._pid:
                self._refuse_copy()
            orch.finish()
            drained = engine.drain()
        except BaseException as interrupt:  # goes on when all is quiet
            orch.abandon()
            if os.getpid() != self._pid:
                raise
            self._abandon(household, interrupt)
        finally:
            self.is_running = False
            if household.has_domains and os.getpid() == self._pid:
                household.close_domains()
        if error is not None or drained.unfinished:
            self._raise(error, drained, household)

    def _refuse_copy(self) -> NoReturn:
        raise LocalProtocolError(
            "an orchestration function has forked, and this is the copy",
            hint="os._exit() at the end of what the copy does",
        )

    def _abandon(self, household: Household, interrupt: BaseException) -> NoReturn:
        """Cancel what has not begun, wait a little for the rest, and go on with the exception."""
        try:
            drained = household.engine.abandon_run(_GRACE)
        except BaseException:  # noqa: BLE001  # the interrupt goes on instead
            # Interrupted in the middle of something: nobody knows what the children still do.
            household.give_up()
            raise interrupt from None
        self.failures = tuple(_failure(one, household) for one in drained.unfinished)
        for failure in self.failures[:_NOTES_MAX]:
            interrupt.add_note(f"besides, {failure.summary}")
        raise interrupt

    def _raise(
        self, error: BaseException | None, drained: Drained, household: Household
    ) -> NoReturn:
        self.failures = tuple(_failure(one, household) for one in drained.unfinished)
        if error is None:
            raise exception_for(self.failures, self._level)
        for failure in self.failures:
            error.add_note(f"besides, {failure.summary}")
        raise error


def _failure(unfinished: Unfinished, household: Household) -> TaskFailure:
    told = household.engine.reports.get(unfinished.number, ())
    child = unfinished.child
    if told and unfinished.cause is EndCause.RAISED:
        # Of a group, the first member that failed may only be one that has heard of the failure.
        child = min(told, key=_by_consequence)[0]
    return TaskFailure(
        number=unfinished.number,
        name=unfinished.name,
        cause=unfinished.cause,
        child="" if child is None else household.engine.children.name_of(child),
        how=household.last_ending if child is None else household.endings.get(child, ""),
        because=unfinished.because,
        reports=tuple(report for _, report in told),
    )


def _by_consequence(told: tuple[int, Report]) -> bool:
    return told[1].is_consequence
