"""The children of a worker process, as it sees them: processes behind pipes.

Carries out what the group orders, by way of the fork server, and reads the completion pipe: words
about children are told to the group, all others are the caller's.

Ends of pipes: the worker process keeps both ends of every task pipe, and opens the reading end a
second time to take words back. The writing end of the completion pipe is closed here, so that its
end of file can come: when the fork server is dead, and so all who could write.
"""

import gc
import os
import signal
import socket
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from rankwise.base.errors import (
    BootstrapFailed,
    BootstrapRefused,
    LocalProtocolError,
    TreeError,
    WorkerDied,
)
from rankwise.base.failure import ExitStatus, Failure, FailureCause
from rankwise.base.units import SECOND, Duration, Instant, after
from rankwise.core.tree.child_group import (
    CameUp,
    ChildEnded,
    ChildGroup,
    ChildGroupEffect,
    ChildGroupPhase,
    ChildGroupSpec,
    ChildGroupStimulus,
    ChildLost,
    ChildReady,
    ChildRefused,
    ChildReplaced,
    ForkServerEnded,
    GroupClosed,
    GroupCloseRequested,
    GroupLost,
    KillChild,
    Release,
    Spawn,
    StartFailed,
    StartRequested,
)
from rankwise.core.tree.vocabulary import ChildPool
from rankwise.drivers.feed import Door
from rankwise.drivers.real.hosting.wire import send
from rankwise.drivers.real.interrupts import HandlerGate, write_to_reader
from rankwise.drivers.real.tree.arena import Arena
from rankwise.drivers.real.tree.child import CUT_OFF, ChildEnds, Role, live
from rankwise.drivers.real.tree.fork_server import CompletionWriter, flush_output, serve_tree
from rankwise.drivers.real.tree.forking import fork_from_new_thread, named_native_threads
from rankwise.drivers.real.tree.pipe_protocol import (
    ENDED,
    FIELD_MASK,
    KIND_SHIFT,
    NOT_STARTED,
    READY,
    REFUSED,
    RELEASE,
    WOKEN,
    WORD_BYTES,
    Descriptor,
    completion,
    open_pipe,
    opened_again,
    pack_word,
    read_without_waiting,
    signed_value,
    unpack_word,
    wait_readable,
)
from rankwise.drivers.real.tree.reports import EXIT_REPORT, UNTOLD, Report, ReportFile, exception_of
from rankwise.ports.journal import Journal

if TYPE_CHECKING:
    from rankwise.drivers.real.tree.engine import TreeEngine

_WOKEN_WORD = completion(WOKEN, 0)
_READ_BYTES = 1 << 12
"""512 words: Python takes memory for as many before it reads, whether they come or not."""
_PIPE_BYTES = 1 << 16
_KIND_MASK = 0xFF
_LIMITS = "each takes five descriptors and a process: look at ulimit -n and ulimit -u"
_KILL_PATIENCE = Duration(SECOND // 2)
"""How long it may take, when time is up, until those are dead who are killed."""
_now: Callable[[], Any] = time.monotonic_ns
_CUT_OFF = "ended, since its task has closed descriptors that it did not open"
_FRAMES_TO_INIT = 7
"""From the warning to the caller of `Worker.init`."""


class ChildSpec(msgspec.Struct, frozen=True):
    """A child that a worker is to have.

    Attributes:
        name: what to call it: `chip 0`.
        pool: whose tasks it takes.
        stage: when it is released on closing, those of stage 0 first.
        replaceable: whether it gets a successor when it dies.
        role: makes what it is, in its own process.
        processors: on which it runs; any if there are none.
    """

    name: str
    pool: ChildPool
    stage: int
    replaceable: bool
    role: Callable[[ChildEnds], Role]
    processors: tuple[int, ...] = ()


class Children:
    """All children of one worker process.

    Attributes:
        lost: children that are gone for good, or about to go, with what became of them.
        reports: for each child its report file.
        exit_reports: what children have said when they were closed, by their numbers.
        gate: keeps signal handlers waiting; they end the sleep in `read`.
    """

    def __init__(
        self,
        specs: tuple[ChildSpec, ...],
        arena: Arena,
        listener: "TreeEngine",
        *,
        start_patience: Duration,
        close_patience: Duration,
        journal: Journal | None = None,
    ) -> None:
        self._specs = specs
        self._arena = arena
        self._listener = listener
        self._group = ChildGroup(
            ChildGroupSpec(
                names=tuple(spec.name for spec in specs),
                stages=tuple(spec.stage for spec in specs),
                replaceable=tuple(spec.replaceable for spec in specs),
                start_patience=start_patience,
                close_patience=close_patience,
                kill_patience=_KILL_PATIENCE,
            )
        )
        self._door: Door[ChildGroupStimulus, ChildGroupEffect] = Door(
            "children", self._group, journal
        )
        self._start_patience = start_patience
        self._close_patience = close_patience
        self.gate = HandlerGate()
        self._waker = self._wake
        self.lost: dict[int, str] = {}
        self.reports: list[ReportFile] = []
        self.exit_reports: dict[int, Report] = {}
        self._refusals: dict[int, Report] = {}
        self._not_started: set[int] = set()
        self._exits: dict[int, ExitStatus] = {}
        self._killed: set[int] = set()
        self._failure: StartFailed | None = None
        self._closed: GroupClosed | None = None
        self._fork_server = 0
        self._resources = ExitStack()

    def name_of(self, child: int) -> str:
        """What a child is called."""
        return self._specs[child].name

    def failure_of_ended(self, child: int, how: str) -> Failure:
        """The end of a child as a failure; `how` is what is told of it."""
        exit_ = self._exits.get(child)
        if exit_ is None:
            cause = FailureCause.GUARDIAN_LOST
        else:
            cause = FailureCause.STOPPED if child in self._killed else exit_.failure_cause
        return Failure(
            local_rank=child, attempt=0, cause=cause, at=Instant(_now()), exit=exit_, detail=how,
            ended_by_us=child in self._killed,
        )  # fmt: skip

    @property
    def first_lost(self) -> tuple[str, str] | None:
        """The first child that is gone for good: its name, and what became of it."""
        if not self.lost:
            return None
        child, how = min(self.lost.items())
        return self.name_of(child), how

    def check_whole(self) -> None:
        """Refuse to begin anything after the death of a child that is not replaced.

        Raises:
            WorkerDied: one is gone.
        """
        if self.lost:
            raise WorkerDied(
                " ".join(self.first_lost or ()), hint="close() the worker, and init() it again"
            )

    # From nothing to ready

    def start(self) -> None:
        """Start all children and wait until they are ready.

        Raises:
            LocalProtocolError: this process has other Python threads.
            BootstrapFailed: a child did not come up; nothing is left of the others.
        """
        others = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
        if others:
            raise LocalProtocolError(
                f"init() forks, but this process has other threads: {', '.join(others)}",
                hint="call init() in the main thread, before anything starts threads",
            )
        _warn_of_native_threads()
        deadline = after(_now(), self._start_patience)
        try:
            self._open_all()
            self._tell_group(StartRequested())
            while self._group.phase in (ChildGroupPhase.STARTING, ChildGroupPhase.ABORTING):
                self._on_messages(self.read(self._group.next_deadline))
                self.gate.run_due()
        except BaseException:
            self.abandon(deadline)
            raise
        if self._failure is not None:
            self.abandon(deadline)
            self._raise(self._failure)

    def _raise(self, failure: StartFailed) -> NoReturn:
        if failure.child is None:
            more = f" and {len(self._specs) - 1} more" if len(self._specs) > 1 else ""
            raise BootstrapFailed(f"bootstrap of {self.name_of(0)}{more} failed: {failure.reason}")
        name = self.name_of(failure.child)
        if failure.child in self._not_started:
            raise BootstrapFailed(f"{name} bootstrap failed: it {failure.reason}", hint=_LIMITS)
        if not failure.refused:
            raise BootstrapFailed(f"{name} bootstrap failed: it {failure.reason}")
        report = self._refusals[failure.child]
        cause = exception_of(report)
        # One that tells of its own child has said where it happened.
        kind = BootstrapRefused if isinstance(cause, ValueError) else BootstrapFailed
        if isinstance(cause, BootstrapFailed):
            error = kind(cause.message, hint=cause.hint)
        else:
            error = kind(f"{name} bootstrap failed: {report.summary}")
        assert report.error is not None, "it has refused"
        error.add_note(f"traceback in {name}:\n{report.error.traceback}")
        raise error from cause

    def _open_all(self) -> None:
        try:
            self._open()
            self._fork_fork_server()
        except OSError as error:
            count = len(self._specs)
            raise TreeError(
                f"{count} child{'' if count == 1 else 'ren'} could not be started: "
                f"{error.strerror}",
                hint=_LIMITS,
            ) from error

    def _open(self) -> None:
        with ExitStack() as stack:
            self._done, self._done_write = open_pipe(stack)
            self._done_now = opened_again(self._done, stack)
            pipes = [open_pipe(stack) for _ in self._specs]
            self._task_reads = [read for read, _ in pipes]
            self._task_writes = [write.number for _, write in pipes]
            self._recalls = [opened_again(read, stack) for read, _ in pipes]
            self.reports = [ReportFile() for _ in self._specs]
            for file in self.reports:
                stack.callback(file.close)
            ours, theirs = socket.socketpair()
            self._orders = stack.enter_context(ours)
            self._their_orders = stack.enter_context(theirs)
            self._resources = stack.pop_all()

    def _fork_fork_server(self) -> None:
        flush_output()
        fork_from_new_thread(self._become_fork_server, self._on_fork_server)
        self._done_write.close()
        self._their_orders.close()

    def _on_fork_server(self, pid: int) -> None:
        self._fork_server = pid

    def _become_fork_server(self) -> NoReturn:
        """The main thread of a new process: whatever happens in here, it ends here."""
        try:
            gc.disable()
            serve_tree(
                self._their_orders,
                CompletionWriter(self._done_write.number, self.reports),
                self._become_child,
                (self._done.number, self._done_now.number, self._orders.fileno()),
            )
        finally:
            os._exit(1)

    def _become_child(self, child: int) -> int:
        gc.enable()
        if self._specs[child].processors:
            with suppress(OSError):  # they were taken away from this process
                os.sched_setaffinity(0, self._specs[child].processors)
        ends = ChildEnds(
            child,
            self._arena,
            self._task_reads[child].number,
            self._done_write.number,
            self.reports[child],
        )
        return live(self._specs[child].role(ends), ends)

    # While they are up

    def send(self, child: int, words: list[int]) -> None:
        """Put words into a child's pipe, which has room for all that may be in it."""
        if len(words) == 1:
            os.write(self._task_writes[child], pack_word(words[0]))
        else:
            os.write(self._task_writes[child], array("Q", words).tobytes())

    def take_back(self, child: int) -> list[int]:
        """The words that a child has not taken, which it will not find any more."""
        taken = array("Q", read_without_waiting(self._recalls[child].number, _PIPE_BYTES))
        return taken.tolist()

    def read(self, deadline: Instant | None) -> list[int]:
        """Wait for words: ends of tasks and answers, and what `on_word` understands.

        None come when the deadline passes first, when a signal handler is due, which the caller
        runs, and at the death of the fork server, which the listener is told.
        """
        gate = self.gate
        gate.waker = self._waker
        try:
            if gate.due:
                return []
            if deadline is not None:
                patience = Duration(deadline - time.monotonic_ns())
                if not wait_readable(self._done.number, patience):
                    self._carry_out(self._door.wake(Instant(time.monotonic_ns())))
                    return []
            taken = os.read(self._done.number, _READ_BYTES)
        finally:
            gate.waker = None
        if len(taken) == WORD_BYTES:  # what most often comes, in half of the time
            return list(unpack_word(taken))
        if not taken:
            self._tell_group(ForkServerEnded())
        return array("Q", taken).tolist()

    def _wake(self) -> None:
        """End the sleep of `read`, from a signal handler."""
        write_to_reader(self._done.number, _WOKEN_WORD)

    def read_now(self) -> list[int]:
        """The words that are there."""
        taken = read_without_waiting(self._done_now.number, _READ_BYTES)
        return array("Q", taken).tolist()

    def kill(self, child: int) -> None:
        """Kill a child; its end is told as usual."""
        self._killed.add(child)
        self._order("signal", child, int(signal.SIGKILL), False)  # noqa: FBT003  # a frame's own fields

    def _order(self, name: str, child: int, *details: Any) -> None:
        """Tell the fork server to do something."""
        self.continue_fork_server()
        send(self._orders, (name, child, *details))

    def continue_fork_server(self) -> None:
        """Let a stopped fork server go on, so that it tells which children have ended."""
        with suppress(ProcessLookupError):
            os.kill(self._fork_server, signal.SIGCONT)

    def on_word(self, word: int) -> bool:
        """Tell the group what a word says of a child; whether it was about one."""
        kind, child = word >> KIND_SHIFT & _KIND_MASK, word & FIELD_MASK
        if kind == ENDED:
            status = self._exits[child] = ExitStatus(signed_value(word))
            how = _CUT_OFF if status.code == CUT_OFF else status.in_words
            self._tell_group(ChildEnded(child, how, is_well=status.ok))
        elif kind == READY:
            self._tell_group(ChildReady(child))
        elif kind == NOT_STARTED:
            self._not_started.add(child)
            reason = self._last_report(child).summary
            self._tell_group(ChildEnded(child, f"could not be started: {reason}"))
        elif kind == REFUSED:
            report = self._refusals[child] = self._last_report(child)
            self._tell_group(ChildRefused(child, report.summary))
        else:
            return kind == WOKEN
        return True

    def _last_report(self, child: int) -> Report:
        told = self.reports[child].read_new()
        return told[-1][1] if told else UNTOLD

    def _tell_group(self, stimulus: ChildGroupStimulus) -> None:
        self._carry_out(self._door.tell(stimulus, Instant(time.monotonic_ns())))

    def _on_messages(self, words: list[int]) -> None:
        for word in words:
            self.on_word(word)

    def _carry_out(self, effects: Sequence[ChildGroupEffect]) -> None:
        for effect in effects:
            match effect:
                case Spawn(child=child):
                    self._order("spawn", child, {"child": child})
                case KillChild(child=child):
                    self.kill(child)
                case Release(child=child):
                    self.send(child, [RELEASE])
                case StartFailed():
                    self._failure = effect
                case CameUp():
                    self._failure = None
                case ChildLost(child=child):
                    self._on_lost(effect)
                case ChildReplaced(child=child):
                    self._exits.pop(child, None)
                    self._killed.discard(child)
                    self._listener.child_replaced(child)
                case GroupLost(children=left):
                    self._on_group_lost(left)
                case GroupClosed():
                    self._closed = effect

    def _on_lost(self, lost: ChildLost) -> None:
        how = lost.how
        if not lost.successor:
            # One that has said before that it would be of no use any more has told why.
            how = self.lost.setdefault(lost.child, how)
        self._listener.child_lost(lost.child, how, successor=lost.successor)

    def _on_group_lost(self, left: tuple[int, ...]) -> None:
        for child in left:
            how = "was lost with the fork server, the parent of all children, which has ended"
            self._on_lost(ChildLost(child, how, successor=False))

    # The end

    def close(self) -> tuple[str, ...]:
        """Let all children end, stage by stage; returns the names of those that were killed.

        It takes a second longer than `close_patience` at most.
        """
        killed: tuple[int, ...] = ()
        deadline = after(_now(), self._close_patience)
        if self._fork_server and self._group.phase is ChildGroupPhase.UP:
            try:
                self._tell_group(GroupCloseRequested())
                while self._closed is None:
                    self._on_messages(self.read(self._group.next_deadline))
                    self.gate.run_due()
                self._read_exit_reports()
            finally:
                killed = () if self._closed is None else self._closed.killed
                self.abandon(deadline)
        self.abandon(deadline)
        return tuple(self.name_of(child) for child in killed)

    def _read_exit_reports(self) -> None:
        for child, file in enumerate(self.reports):
            for subject, report in file.read_new():
                if subject == EXIT_REPORT:
                    self.exit_reports[child] = report

    def abandon(self, deadline: Instant) -> None:
        """End everything that is left at once, and close all descriptors; twice is once.

        Whatever their processes have left behind may take until the deadline to end.
        """
        try:
            if self._fork_server:
                pid, self._fork_server = self._fork_server, 0
                self._end_fork_server(pid, deadline)
        finally:
            self._resources.close()

    def _end_fork_server(self, pid: int, deadline: Instant) -> None:
        """When the end of its orders is told, it kills all its descendants and ends."""
        has_ended = False
        try:
            # Closing would not do: whatever was forked meanwhile, another tree, has a copy of it.
            self._orders.shutdown(socket.SHUT_RDWR)
            with closing(Descriptor(os.pidfd_open(pid))) as pidfd:
                os.kill(pid, signal.SIGCONT)  # it may be stopped
                patience = Duration(max(0, deadline - _now()) + _KILL_PATIENCE)
                has_ended = wait_readable(pidfd.number, patience)
        finally:  # a Ctrl-C in the middle leaves nothing behind either
            if not has_ended:
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):  # the program reaps whatever it finds
                os.waitpid(pid, 0)

    def give_up(self) -> None:
        """End everything that is left at once, without telling the listener."""
        self.abandon(Instant(_now()))
        for child in range(len(self._specs)):
            self.lost.setdefault(child, "was killed, as its worker was interrupted")


def _warn_of_native_threads() -> None:
    names = named_native_threads()
    if names:
        warnings.warn(
            f"init() forks, and children will not have this process's native threads "
            f"{', '.join(names)}: a task that uses what they belong to may hang (use it first in "
            "tasks, or after init())",
            RuntimeWarning,
            stacklevel=_FRAMES_TO_INIT,
        )
