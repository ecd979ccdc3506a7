"""The runs of an initialised worker: one after the other, each to its end, also when it fails."""

import time
from threading import Lock, get_ident
from typing import Any, NoReturn

from rankwise.base.errors import LocalProtocolError
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant
from rankwise.core.tree.vocabulary import Drained
from rankwise.drivers.real.interrupts import HandlerGate, gate_here
from rankwise.drivers.real.this_process import mark
from rankwise.workers.chip_timeline import Timeline
from rankwise.workers.failures import TaskFailure, exception_for
from rankwise.workers.orchestrator import Orchestrator
from rankwise.workers.worker_tree import WorkerTree

_GRACE = Duration(2 * SECOND)
"""How long tasks may go on after an interrupt before their children are killed."""
_KILL_PATIENCE = Duration(5 * SECOND)
"""How long it may take until a child that is killed is known to be dead."""
_LATE_GRACE = Duration(300 * MILLISECOND)
_LATE_KILL_PATIENCE = Duration(250 * MILLISECOND)
"""The same after a time-out: all of it together takes less than a second."""

_NOTES_MAX = 20


class Runs:
    """Runs orchestration functions, and remembers what became of the last one.

    Attributes:
        failures: what went wrong in the last run, in the order of submission.
        timeline: what chips did in simulated time in the last run.
    """

    def __init__(self, tree: WorkerTree | None, level: int) -> None:
        self._tree = tree
        self._level = level
        self._process = mark()
        self._going_on = Lock()
        """Held by the run that is going on."""
        self._thread = 0
        self.failures: tuple[TaskFailure, ...] = ()
        self.timeline = Timeline([])
        if tree is not None:
            tree.timeline = self.timeline

    @property
    def is_running(self) -> bool:
        """Whether a run is going on."""
        return self._going_on.locked()

    def check_idle(self, what: str, hint: str) -> None:
        """Refuse what is not done during a run.

        Raises:
            LocalProtocolError: a run is going on.
        """
        if not self._going_on.locked():
            return
        if self._thread != get_ident():
            raise LocalProtocolError(
                f"{what} was called while another thread is in run()",
                hint="one thread at a time uses a worker: take a lock around its calls",
            )
        raise LocalProtocolError(f"{what} was called inside of run()", hint=hint)

    def check_ready(self) -> WorkerTree:
        """Refuse what cannot work.

        Raises:
            LocalProtocolError: a run is going on.
            WorkerDied: a child that is not replaced has ended.
        """
        tree = self._tree
        assert tree is not None, "the worker is initialised"
        if self._going_on.locked():
            self.check_idle("run()", "submit tasks to the orchestrator")
        if tree.engine.children.lost:
            tree.engine.children.check_whole()
        return tree

    def run(
        self,
        callable_: Any,
        args: Any,
        config: Any,
        *,
        patience: Duration | None = None,
        clock: int = 0,
    ) -> None:
        """Call an orchestration function, and wait for all that it submits; see `Worker.run`.

        Signal handlers run at once in the function, and elsewhere only in waits.
        """
        tree = self.check_ready()
        gate = gate_here()
        gate.shut()
        try:
            if not self._going_on.acquire(blocking=False):
                self.check_ready()  # another thread was quicker
            try:
                self._run(tree, gate, callable_, args, config, patience, clock)
            finally:
                self._going_on.release()
        finally:
            gate.is_shut = False
            if gate.due:
                gate.run_due()

    def _run(  # noqa: PLR0917  # what run() was given, without packing it up
        self,
        tree: WorkerTree,
        gate: HandlerGate,
        callable_: Any,
        args: Any,
        config: Any,
        patience: Duration | None,
        clock: int,
    ) -> None:
        self._thread = get_ident()
        engine = tree.engine
        engine.children.gate = gate
        if self.timeline.entries:
            tree.timeline = self.timeline = Timeline([])
        deadline = None
        if patience is not None:
            deadline = Instant(time.monotonic_ns() + patience)
        self.failures = ()
        if tree.table.dropped:
            tree.table.let_go()
        engine.begin_run(clock, deadline)
        orch = Orchestrator(tree)
        error: BaseException | None = None
        try:
            gate.is_shut = False
            try:
                if gate.due:
                    gate.run_due()
                callable_(orch, args, config)
            except Exception as raised:  # noqa: BLE001  # raised again when all tasks have ended
                error = raised
            finally:
                gate.is_shut = True
            if mark() is not self._process:
                self._refuse_copy()
            orch.finish()
            drained = engine.drain()
        except BaseException as interrupt:  # goes on when all is quiet
            orch.abandon()
            if mark() is not self._process:
                raise
            deadline, last = self._abandon(tree, interrupt)
            if error is not None and isinstance(last, TimeoutError):
                raise error  # noqa: B904  # it came first; the time-out is its context
            if last is not interrupt:
                raise last  # noqa: B904  # the one before it is its context
            raise
        finally:
            if tree.has_domains and mark() is self._process:
                _close_domains(tree, gate, deadline)
        if error is not None or drained.unfinished:
            self._raise(error, drained, tree)

    def _refuse_copy(self) -> NoReturn:
        raise LocalProtocolError(
            "an orchestration function returned in a process that it had forked",
            hint="end such a process with os._exit()",
        )

    def _abandon(self, tree: WorkerTree, interrupt: BaseException) -> tuple[Instant, BaseException]:
        """Cancel what has not begun, and wait a little for the rest.

        Returns:
            Until when children may take to leave their domains, and what to raise: the interrupt,
            or another one that came while the rest was waited for.
        """
        grace, kill_patience = _GRACE, _KILL_PATIENCE
        if isinstance(interrupt, TimeoutError):
            grace, kill_patience = _LATE_GRACE, _LATE_KILL_PATIENCE
        try:
            drained, another = tree.engine.abandon_run(grace, kill_patience)
        except BaseException:  # noqa: BLE001  # the interrupt goes on instead
            # The state of the children is unknown.
            tree.give_up()
        else:
            self.failures = tuple(TaskFailure.of(one, tree) for one in drained.unfinished)
            interrupt = another or interrupt
            for failure in self.failures[:_NOTES_MAX]:
                interrupt.add_note(f"besides, {failure.summary}")
        return Instant(time.monotonic_ns() + grace), interrupt

    def _raise(self, error: BaseException | None, drained: Drained, tree: WorkerTree) -> NoReturn:
        self.failures = tuple(TaskFailure.of(one, tree) for one in drained.unfinished)
        if error is None:
            raise exception_for(self.failures, self._level)
        for failure in self.failures:
            error.add_note(f"besides, {failure.summary}")
        raise error


def _close_domains(tree: WorkerTree, gate: HandlerGate, deadline: Instant | None) -> None:
    try:
        tree.close_domains(deadline)
    except BaseException:
        # The interrupt goes on when all children have left, or when those that have not are killed.
        with gate.patience():
            tree.close_domains(Instant(time.monotonic_ns() + _GRACE))
        raise
