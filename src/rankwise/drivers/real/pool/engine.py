"""The engine: carries out what the machine of a pool orders, and tells it what happens.

Any thread may submit. Facts for the machine go through an inbox, and the thread that holds the lock
empties it. So a caller's own thread sends a task to an idle worker: nothing is handed to another
thread on the way. If no worker has room, a submission is an entry in the inbox and no more: the
reader looks there when one has.

One thread, the reader, waits for answers, deaths and deadlines, unpickles, and concludes futures.
Futures are concluded without the lock, since what waits for them may submit.

A message that takes long to write (large arrays) is written without the lock, too. Messages to one
worker stay in order: they pass through its outbox, which one thread at a time empties.

In the main thread, handlers of signals wait while the machine is told something: one that raised in
the middle would part it from the workers.
"""

import os
import pickle
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import count, dropwhile
from socket import (
    AF_UNIX,
    SHUT_WR,
    SOCK_SEQPACKET,
    SOCK_STREAM,
    socketpair,
)
from threading import Lock, Thread
from typing import Any, Protocol

import msgspec

from rankwise.base.errors import LocalProtocolError, WorkerDied
from rankwise.base.failure import ExitStatus
from rankwise.base.units import SECOND, Duration, Instant, after, format_duration
from rankwise.core.pool.machine import PoolMachine, PoolPhase
from rankwise.core.pool.vocabulary import (
    CloseRequested,
    EndTask,
    EndWorker,
    HostLost,
    InitializerFailed,
    InterruptWorker,
    KillWorker,
    NeedFailed,
    NeedMet,
    PoolEffect,
    PoolSpec,
    PoolStimulus,
    PoolStopRequested,
    PoolTaskSubmitted,
    PoolWorkerRefused,
    PoolWorkerView,
    RecallTasks,
    ReleasePool,
    SendTask,
    StartWorker,
    TaskAnswered,
    TaskEnd,
    TasksRecalled,
    TaskWithdrawn,
    WorkerEnded,
    WorkerReady,
)
from rankwise.drivers.feed import Door
from rankwise.drivers.real.call_pickle import name_of
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.hosting.connection import MARK_VARIABLE
from rankwise.drivers.real.hosting.environments import inherited_environment, server_environment
from rankwise.drivers.real.hosting.hosting import Hosting
from rankwise.drivers.real.interrupts import for_an_instant
from rankwise.drivers.real.oom import OomWatch
from rankwise.drivers.real.pool.errors import BrokenPool
from rankwise.drivers.real.pool.messages import (
    CHUNKS,
    DONT_WAIT,
    FIRST_SHIFT,
    NO_SLOT,
    SLOT_COUNT,
    MessageKind,
    Packed,
    PoolMessage,
    Receiver,
    send_small,
    task_of_unread,
)
from rankwise.drivers.real.pool.notes import new_notes, pieces, read_notes
from rankwise.drivers.real.pool.pickles import dumps_call
from rankwise.drivers.real.pool.pool_process import NOTES_VARIABLE, SOCKET_VARIABLE, serve
from rankwise.drivers.real.pool.remembered_functions import FunctionTable
from rankwise.drivers.real.pool.submitted_task import PoolFuture, SubmittedTask, unsendable
from rankwise.drivers.real.reactor import Reactor
from rankwise.drivers.real.report_pipe import ReportPipe
from rankwise.drivers.real.this_process import mark
from rankwise.drivers.real.worker_process import WorkerProcess

_SIGINT, _SIGKILL = 2, 9
_ANSWERS_AT_ONCE = 16
_REPORT_CHUNK_BYTES = 1 << 16
_now = time.monotonic_ns


class PoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine makes its workers.

    Attributes:
        spec: for the machine.
        initializer: what each worker calls first, with its arguments; None for nothing.
        preload: modules that the fork server imports; None guesses from what is imported here.
        environment: variables to add.
        is_writable: whether arrays are writable for their receivers.
        start_timeout: how long the fork server may import at most.
        label: what messages call the pool.
    """

    spec: PoolSpec
    initializer: tuple[Callable[..., object], tuple[Any, ...]] | None = None
    preload: tuple[str, ...] | None = None
    environment: Mapping[str, str] = {}
    is_writable: bool = False
    start_timeout: Duration = Duration(600 * SECOND)


class WorkerSample(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a worker.

    Attributes:
        worker: its number.
        pid: its process; 0 while that is not known.
        is_ready: whether it has started.
        task: the name of the function that it calls; empty while it has nothing to do.
        call_count: how many calls the task is.
        for_ns: for how long it has run it.
        done_count: how many calls it has answered.
    """

    worker: int
    pid: int
    is_ready: bool
    task: str
    call_count: int
    for_ns: int
    done_count: int


class PoolSample(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a pool.

    Attributes:
        phase: from start to shutdown.
        queued: the number of tasks that no worker runs yet.
        done, failed: the number of calls that have ended, and of these with an error.
        workers: the state of each worker.
    """

    phase: PoolPhase
    queued: int
    done: int
    failed: int
    workers: tuple[WorkerSample, ...]


class ControlSocket(Protocol):
    """Answers questions about a pool; never blocks."""

    def fileno(self) -> int:
        """The descriptor to watch for readability."""
        ...

    def on_readable(self) -> None:
        """Serve whatever is ready."""
        ...

    def close(self) -> None:
        """Give the name up."""
        ...


class _WorkerLink:
    """The pool's end of one worker."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.notes = new_notes()
        """Memory with the results of the worker's present chunk."""
        try:
            self.ours, self.theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        except BaseException:
            os.close(self.notes)
            raise
        self.report = -1
        self.process: WorkerProcess | None = None
        self.outbox: deque[int] = deque()
        self.sent: deque[int] = deque()
        """What the worker was sent and has not answered."""
        self.is_gone = False
        self.is_recall_wanted = False
        """Whether a thread that sent kept another one from recalling tasks."""
        self.sending = Lock()
        self.stuck: Packed | None = None
        """A message for which the socket had no room."""
        self.is_ready = False
        self.functions = [0] * SLOT_COUNT
        """Which generation of each function the worker remembers."""
        self.pid = 0
        self.done_count = 0
        """How many calls it has answered."""

    @property
    def has_work(self) -> bool:
        return bool(self.outbox or self.stuck or self.is_recall_wanted)

    def signal(self, signum: int) -> None:
        if self.process is not None:
            self.process.signal(signum, group=False)

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
        if self.stuck is not None:
            self.stuck.close()
        if self.notes >= 0:
            os.close(self.notes)
            self.notes = -1
        if self.report >= 0:
            os.close(self.report)
            self.report = -1
        if self.process is not None:
            self.process.close()


class _Death(msgspec.Struct, frozen=True):
    """How a worker ended."""

    code: int
    words: str
    stack: str
    was_oom: bool | None


class PoolEngine:
    """The workers and the tasks of one pool; made with the gate for signal handlers shut.

    Attributes:
        on_change: called by the reader after it was told something; for those that show progress.
    """

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self._machine = PoolMachine(options.spec)
        door: Door[PoolStimulus, PoolEffect] = Door("pool", self._machine, None)
        self._tell_machine, self._wake_machine = door.tell, door.wake
        self._owner = mark()
        self._owner_pid = os.getpid()
        self._functions = FunctionTable()
        self._numbers = count(1)
        self._tasks: dict[int, SubmittedTask] = {}
        self._links: dict[int, _WorkerLink] = {}
        self._link_of_order: dict[int, _WorkerLink] = {}
        self._deaths: dict[int, _Death] = {}
        self._inbox: deque[PoolStimulus] = deque()
        self._unconcluded: list[tuple[SubmittedTask, EndTask]] = []
        """Tasks that are over, and whose futures an interrupt kept from being told."""
        self._lock = Lock()
        self._is_closed = self._is_start_limited = False
        self._is_released = False
        self._is_finished = False
        self._oom = OomWatch()
        self._control: ControlSocket | None = None
        self.on_change: Callable[[], None] | None = None
        self.done_count = self.failed_count = 0
        self.has_ended = False
        self._receiver = Receiver(is_writable=options.is_writable)
        self._payload = _payload(options)
        self._order: dict[str, Any] = {
            "env": {**inherited_environment(), **options.environment},
            "cwd": os.getcwd(),
            "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
            "program": ("function",),
        }
        hosting: Hosting | None = None
        try:
            self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            self._hosting = hosting = Hosting(
                os.urandom(8).hex(),
                preload=(*_ALWAYS_NEEDED, *_preload(options)),
                is_guess=options.preload is None,
                environment={**server_environment(), **options.environment},
            )
            self._order["env"][MARK_VARIABLE] = hosting.guardian.mark
            self._reactor = Reactor(SystemClock())
            self._thread = Thread(target=self._run, name="rankwise-pool", daemon=True)
            self._thread.start()
        except BaseException:
            if hosting is not None:
                hosting.close()
            os.close(self._payload)
            raise

    # For any thread

    def submit(
        self,
        kind: int,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        attempts: int,
        *,
        items: range | None = None,
    ) -> PoolFuture:
        """Hand in a task; `items` are the positions of a chunk in the input of its `map`."""
        self.check_open()
        future = PoolFuture()
        task = SubmittedTask(future, kind, call)
        task.name_after(args, items)
        number = next(self._numbers)
        needs: list[Future[Any]] = [each for each in args if isinstance(each, Future)]
        if kwargs:
            needs += [each for each in kwargs.values() if isinstance(each, Future)]
        if needs:
            task.arguments = args, kwargs
        else:
            try:
                task.pack(self._functions, args, kwargs)
            except Exception as error:  # noqa: BLE001  # the future tells it
                future.set_running_or_notify_cancel()
                future.set_exception(unsendable(call, args, kwargs, error, kind))
                return future
        future.task, future.tell = number, self.tell
        self._tasks[number] = task
        self._inbox.append(PoolTaskSubmitted(number, len(needs), attempts))
        # Read after the entry is made: a thread that makes room looks into the inbox after that.
        if needs or self._machine.can_send or self._machine.phase is not PoolPhase.OPEN:
            self._pump()
        for need in needs:
            need.add_done_callback(partial(self._on_need_done, number))
        return future

    def check_open(self) -> None:
        """Refuse a task that no worker would get."""
        if mark() is not self._owner:
            raise LocalProtocolError(
                f"this pool belongs to process {self._owner_pid}, of which this process is a fork",
                hint="make a rankwise.Pool here",
            )
        machine = self._machine
        if machine.reason:
            raise BrokenPool(f"the pool cannot run tasks any more: {machine.reason}")
        if self._is_closed:
            raise LocalProtocolError(
                "cannot schedule new futures after shutdown of the pool",
                hint="submit inside its `with` block",
            )

    @property
    def is_open(self) -> bool:
        """Whether `check_open` would say nothing."""
        return mark() is self._owner and not self._is_closed and not self._machine.reason

    def tell(self, stimulus: PoolStimulus) -> None:
        """Tell the machine something."""
        if mark() is self._owner:
            self._inbox.append(stimulus)
            self._pump()

    def close(self, *, cancels: bool) -> None:
        """Take no more tasks; workers end when those that there are have ended."""
        self._is_closed = True
        self.tell(CloseRequested(cancels))

    def stop(self) -> None:
        """End tasks and workers now: at once when called again."""
        self._is_closed = True
        self.tell(PoolStopRequested())

    def close_later(self) -> None:
        """Do what `close` does, from the reader: for callers that may hold the lock already."""
        if mark() is self._owner:
            self._reactor.post(partial(self.close, cancels=False))

    def wait_released(self, timeout: float | None = None) -> bool:
        """Wait until all processes have ended; whether they have."""
        if mark() is not self._owner:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many calls wait, how many run, and how many workers there are."""
        with self._lock:
            views = self._machine.workers
            calls = sum(task.call_count for task in [*self._tasks.values()])
        running = sum(view.task is not None for view in views)
        return max(calls - running, 0), running, len(views)

    def look(self) -> PoolSample:
        """The state of the pool and of each worker; call it in the reader's thread."""
        now = _now()
        with self._lock:
            views = self._machine.workers
            workers = tuple(self._look_at(view, now) for view in views)
            # Tasks in the inbox are queued, too.
            queued = len(self._tasks) - sum(bool(worker.task) for worker in workers)
            return PoolSample(
                phase=self._machine.phase,
                queued=max(queued, 0),
                done=self.done_count,
                failed=self.failed_count,
                workers=workers,
            )

    def _look_at(self, view: PoolWorkerView, now: int) -> WorkerSample:
        link = self._links.get(view.worker)
        task = None if view.task is None else self._tasks.get(view.task)
        return WorkerSample(
            worker=view.worker,
            pid=0 if link is None else link.pid,
            is_ready=view.is_ready,
            task="" if task is None else name_of(task.call),
            call_count=0 if task is None else task.call_count,
            for_ns=0 if task is None else max(0, now - view.since),
            done_count=0 if link is None else link.done_count,
        )

    def answer_through(self, control: ControlSocket) -> None:
        """Let the reader serve a socket, and close it when the pool has ended."""
        self._control = control
        self._reactor.post(
            partial(self._reactor.watch_readable, control.fileno(), control.on_readable)
        )

    # Between the machine and the rest

    def _pump(self) -> None:
        """Tell the machine what is in the inbox, and carry out what it orders."""
        over: list[tuple[SubmittedTask, EndTask]] = []
        try:
            with for_an_instant():
                touched: list[_WorkerLink] = []
                with self._lock:
                    if self._unconcluded:
                        over, self._unconcluded = self._unconcluded, []
                    inbox, tell, now = self._inbox, self._tell_machine, Instant(_now())
                    while inbox:
                        for effect in tell(inbox.popleft(), now):
                            self._carry_out(effect, touched, over)
                for link in touched:
                    self._flush(link)
            for task, end in over:
                if end.end is TaskEnd.ANSWERED:
                    self._conclude_with(task, *task.answer)
                else:
                    self._conclude(task, end)
        except BaseException:
            # An interrupt: the machine does not know these tasks any more, but their users do.
            self._unconcluded += [pair for pair in over if not pair[0].is_concluded]
            self._reactor.post(self._pump)
            raise
        if self._inbox:  # what could not be sent
            self._pump()

    def _carry_out(
        self,
        effect: PoolEffect,
        touched: list[_WorkerLink],
        over: list[tuple[SubmittedTask, EndTask]],
    ) -> None:
        match effect:
            case SendTask(worker=number, task=task):
                link = self._links[number]
                link.outbox.append(task)
                if link not in touched:
                    touched.append(link)
            case EndTask(task=number):
                over.append((self._tasks.pop(number), effect))
            case StartWorker(worker=number):
                try:
                    self._links[number] = _WorkerLink(number)
                except OSError as error:
                    self._inbox.append(PoolWorkerRefused(number, f"no socket for it: {error}"))
                else:
                    self._reactor.post(partial(self._start, number))
            case RecallTasks(worker=number):
                link = self._links[number]
                # First, so that a thread that sends just now sees it when it is done.
                link.is_recall_wanted = True
                if link.sending.acquire(blocking=False):
                    try:
                        self._recall(link)
                    finally:
                        link.sending.release()
            case EndWorker(worker=number):
                if number in self._links:
                    self._links[number].ours.shutdown(SHUT_WR)
                self._reactor.post(_nothing)  # a deadline may be new
            case InterruptWorker(worker=number):
                # In the reader: a worker may run before the fork server has told its process.
                self._reactor.post(partial(self._signal, number, _SIGINT))
            case KillWorker(worker=number):
                self._reactor.post(partial(self._signal, number, _SIGKILL))
            case ReleasePool():
                self._is_released = True
                self._reactor.post(_nothing)

    def _recall(self, link: _WorkerLink) -> None:
        """Tell what could be taken back; with the lock, and while no task is being sent."""
        link.is_recall_wanted = False
        self._inbox.append(TasksRecalled(link.number, self._take_back(link)))

    def _take_back(self, link: _WorkerLink) -> tuple[int, ...]:
        """What the worker has not taken: from its socket, then from its outbox."""
        found = []
        while (number := task_of_unread(link.theirs)) is not None:
            found.append(number)
            link.sent.remove(number)
            task = self._tasks.get(number)
            if task is not None and task.sent.slot != NO_SLOT:
                link.functions[task.sent.slot] = 0  # it may not have got the function
        while link.outbox:
            with suppress(IndexError):
                found.append(link.outbox.popleft())
        return tuple(found)

    def _flush(self, link: _WorkerLink) -> None:
        """Send what is in a worker's outbox, unless another thread does."""
        while link.has_work and link.sending.acquire(blocking=False):
            try:
                if link.is_gone:
                    return
                if link.is_recall_wanted:
                    with self._lock:
                        self._recall(link)
                if link.stuck is not None:
                    link.stuck.send(link.ours, DONT_WAIT)
                    link.stuck = None
                while True:
                    self._send(link, link.outbox.popleft())
            except IndexError:
                pass
            except BlockingIOError:
                self._reactor.post(partial(self._watch_writable, link))
                return
            finally:
                link.sending.release()

    def _send(self, link: _WorkerLink, number: int) -> None:
        task = self._tasks.get(number)
        if task is None:
            return  # it was abandoned
        if not task.has_begun:
            if not task.future.set_running_or_notify_cancel():
                task.is_notified = True
                self._inbox.append(TaskWithdrawn(link.number, number))
                return
            task.has_begun = True
        packed = None
        link.sent.append(number)
        try:
            if task.arguments is not None:
                task.pack_late(self._functions)
            sent = task.sent
            function = b""
            if sent.slot != NO_SLOT and link.functions[sent.slot] != sent.generation:
                function = sent.pickled
                link.functions[sent.slot] = sent.generation
            task.sent_from = len(task.values)
            extra = task.sources_at | task.sent_from << FIRST_SHIFT
            rest = sent.slot, sent.generation, extra, function
            if task.buffers.found or not send_small(
                link.ours, task.kind, number, task.body, *rest, DONT_WAIT
            ):
                packed = Packed(task.kind, number, task.body, task.buffers.described(), *rest)
                packed.send(link.ours, DONT_WAIT)
        except BlockingIOError:
            rest = task.sent.slot, task.sent.generation, extra, function
            link.stuck = packed or Packed(task.kind, number, task.body, (), *rest)
            raise
        except Exception as error:  # noqa: BLE001  # its future tells it
            if packed is not None:
                packed.close()
            link.sent.remove(number)
            task.failure = error
            self._inbox.append(TaskWithdrawn(link.number, number))

    def _conclude(self, task: SubmittedTask, end: EndTask) -> None:
        future = task.future
        error: BaseException | None
        match end.end:
            case TaskEnd.ANSWERED:
                error = task.answer[1]
            case TaskEnd.DIED:
                error = self._death_of(task, end)
            case TaskEnd.ABANDONED:
                error = BrokenPool(f"the pool cannot run tasks any more: {end.reason}")
            case TaskEnd.SKIPPED | TaskEnd.CANCELLED:
                error = task.failure
                if error is None and task.has_begun:
                    error = CancelledError()  # it was taken back from a worker
                if error is None:
                    future.tell = None
                    if not task.is_notified and future.cancel():
                        future.set_running_or_notify_cancel()
                        task.is_notified = True
                    return
        self._conclude_with(task, None, error)

    def _conclude_with(self, task: SubmittedTask, value: Any, error: BaseException | None) -> None:
        future = task.future
        future.tell = None
        if error is not None and task.values:
            # The failed call does not lose the results of the calls before it.
            value, error = (task.values, error), None
        if error is None and task.kind in CHUNKS:
            has_failed = value[1] is not None
            self.done_count += len(value[0]) + has_failed
            self.failed_count += has_failed
        else:
            self.done_count += 1
            self.failed_count += error is not None
        try:
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
        except InvalidStateError:  # it was cancelled just now
            with suppress(RuntimeError):
                future.set_running_or_notify_cancel()

    def _death_of(self, task: SubmittedTask, end: EndTask) -> WorkerDied:
        death = self._deaths[end.worker or 0]
        words = f"{death.words} while it ran {name_of(task.call)}{task.about_in_words()}"
        if death.stack:
            words += f"\n{death.stack.rstrip()}"
        return WorkerDied(
            words,
            hint=None if death.stack else "with Pool(retries=N) it runs again, up to N times",
            exit_code=death.code,
            stack=death.stack,
            was_oom=death.was_oom,
        )

    def _on_need_done(self, number: int, need: "Future[Any]") -> None:
        if need.cancelled():
            self.tell(NeedFailed(number, was_cancelled=True))
            return
        error = need.exception()
        if error is None:
            self.tell(NeedMet(number))
            return
        task = self._tasks.get(number)
        if task is not None:
            task.failure = error
        self.tell(NeedFailed(number))

    # The reader

    def _run(self) -> None:
        try:
            self._hosting.attach(self._reactor, self)
            while not self._is_released:
                self._reactor.run_once(self._machine.next_deadline)
                deadline = self._machine.next_deadline
                if deadline is not None and _now() >= deadline:
                    self._wake()
                if self.on_change is not None:
                    self.on_change()
        except BaseException as error:
            self._fail_all(error)
            raise
        finally:
            if self._control is not None:
                self._control.close()
            self._hosting.detach()
            self._hosting.close()
            self._reactor.close()
            for link in self._links.values():
                link.close()
            os.close(self._payload)
            os.close(self._null)
            self.has_ended = True
            if self.on_change is not None:
                self.on_change()

    def call_at(self, instant: Instant, callback: Callable[[], None]) -> None:
        """Call back in the reader; only it may ask for that."""
        self._reactor.call_at(instant, callback)

    def _fail_all(self, error: BaseException) -> None:
        """Fail every waiting call: a mistake of ours has ended the reader."""
        self._is_closed = True
        for task in [*self._tasks.values()]:
            with suppress(InvalidStateError):
                task.future.set_exception(BrokenPool(f"the pool's thread has failed: {error!r}"))

    def _wake(self) -> None:
        with self._lock:
            for effect in self._wake_machine(Instant(_now())):
                self._carry_out(effect, [], [])

    def _start(self, number: int) -> None:
        link = self._links.get(number)
        if link is None:
            return
        if not self._is_start_limited:
            self._is_start_limited = True
            limit = after(Instant(_now()), self._options.start_timeout)
            self._reactor.call_at(limit, self._give_up_server)
        spawner = self._hosting.spawner
        try:
            report, end_of_report = socketpair(AF_UNIX, SOCK_STREAM)
        except OSError as error:
            self.tell(PoolWorkerRefused(number, f"no socket for it: {error}"))
            return
        report.setblocking(False)  # noqa: FBT003  # the standard library's signature
        link.report = report.detach()
        descriptors = {
            0: self._null,
            SOCKET_VARIABLE: link.theirs.fileno(),
            NOTES_VARIABLE: link.notes,
            "RANKWISE_REPORT_FD": end_of_report.fileno(),
            "RANKWISE_PAYLOAD_FD": self._payload,
        }
        order_number = spawner.next_number()
        self._link_of_order[order_number] = link
        with end_of_report:
            order = {**self._order, "fds": [*descriptors]}
            spawner.spawn(order_number, order, [*descriptors.values()])
        self._reactor.watch_readable(link.ours.fileno(), partial(self._on_readable, link))

    def _give_up_server(self) -> None:
        """Break the pool if the fork server still imports: no worker has started."""
        if module := self._hosting.importing:
            limit = format_duration(self._options.start_timeout)
            reason = f"no worker started within {limit}: the fork server was importing {module}"
            self.tell(HostLost(reason))

    def _watch_writable(self, link: _WorkerLink) -> None:
        def go_on() -> None:
            self._reactor.unwatch_writable(link.ours.fileno())
            self._flush(link)
            if self._inbox:
                self._pump()

        if link.number in self._links:
            self._reactor.watch_writable(link.ours.fileno(), go_on)

    def _signal(self, number: int, signum: int) -> None:
        link = self._links.get(number)
        if link is None:
            return
        if link.process is not None:
            link.signal(signum)
            return
        # Its process is not known yet.
        for order_number, each in self._link_of_order.items():
            if each is link:
                self._hosting.spawner.signal(order_number, signum, group=False)

    def _on_readable(self, link: _WorkerLink) -> None:
        with suppress(BlockingIOError):
            for _ in range(_ANSWERS_AT_ONCE):
                message = self._receiver.receive(link.ours, DONT_WAIT)
                if message is None:
                    break
                self._take(link, message)
                if message.buffers or not link.sent:
                    break  # large ones let others have a turn; without tasks, there is no more
        message = None
        self._pump()

    def _take(self, link: _WorkerLink, message: PoolMessage) -> None:
        """Note what a worker has sent."""
        if message.kind == MessageKind.READY:
            link.is_ready = True
            self._inbox.append(WorkerReady(link.number))
            return
        if message.kind == MessageKind.INITIALIZER_FAILED:
            _, text, line = pickle.loads(message.body)  # noqa: S301  # of a worker of ours
            self._inbox.append(
                InitializerFailed(link.number, f"the initializer raised {line}\n{text}")
            )
            return
        task = self._tasks.get(message.task)
        if message.kind == MessageKind.PART:
            if task is not None:
                task.failure = task.failure or task.add_values(message)
            return
        try:
            link.sent.remove(message.task)
        except ValueError:
            return  # an interrupt came just after its answer
        if message.kind == MessageKind.FUNCTION_MISSING:
            link.functions[message.slot] = 0
            self._inbox.append(TasksRecalled(link.number, (message.task,)))
            return
        if task is not None:
            link.done_count += task.call_count - task.sent_from
            task.future.took_ns = 0 if task.sent_from else message.extra
            task.answer = task.answer_of(message)
            self._inbox.append(TaskAnswered(link.number, message.task, message.extra))

    def _add_noted(self, link: _WorkerLink, number: int) -> bool:
        """Take over what a dead worker has done of a chunk; whether it had done anything."""
        task = self._tasks.get(number)
        if task is None or task.kind not in CHUNKS:
            return False
        # A process that has damaged its memory may have damaged these.
        with suppress(Exception):
            task.add_noted(pieces(read_notes(link.notes, number, len(task.values))))
        return len(task.values) > task.sent_from

    # What the processes' host tells

    def on_spawned(self, worker: int, pid: int) -> None:
        """A process exists."""
        link = self._link_of_order.get(worker)
        if link is not None:
            link.pid = pid
            with suppress(OSError):  # it has ended already, which is told next
                link.process = WorkerProcess(pid)

    def on_refused(self, worker: int, reason: str) -> None:
        """A process could not be made."""
        link = self._link_of_order.pop(worker, None)
        if link is not None:
            self.tell(PoolWorkerRefused(link.number, reason))
            self._drop(link)

    def on_exited(self, worker: int, code: int, at: Instant) -> None:  # noqa: ARG002  # a listener's
        """A process has ended; what it has sent is handled first."""
        link = self._link_of_order.pop(worker, None)
        if link is None:
            return
        with suppress(BlockingIOError):
            while (message := self._receiver.receive(link.ours, DONT_WAIT)) is not None:
                self._take(link, message)
        self._pump()
        death = self._note_death(link, code)
        with link.sending:  # nothing is half-way there
            link.is_gone = True
            with self._lock:
                self._take_back(link)
                begun = tuple(link.sent)
        advanced = tuple(number for number in begun if self._add_noted(link, number))
        self.tell(WorkerEnded(link.number, death.words, begun, advanced))
        del self._deaths[link.number]
        self._drop(link)

    def _note_death(self, link: _WorkerLink, code: int) -> _Death:
        words = f"worker {link.number} (process {link.pid}) {ExitStatus(code).in_words}"
        was_oom = None
        if not link.is_ready:
            initializer = self._options.initializer
            words += f" in {name_of(initializer[0])}, the initializer" if initializer else ""
        if code == -_SIGKILL:
            verdict = self._oom.verdict()
            self._oom = OomWatch()
            was_oom = verdict.was_oom
            if was_oom:
                words += f", out of memory ({verdict.evidence})"
        reports = ReportPipe()
        with suppress(BlockingIOError):
            while chunk := os.read(link.report, _REPORT_CHUNK_BYTES):
                reports.feed(chunk)
        reports.finish()
        death = _Death(code, words, _stack_of_task(reports.fatal_stacks), was_oom)
        self._deaths[link.number] = death
        return death

    def _drop(self, link: _WorkerLink) -> None:
        self._reactor.unwatch_readable(link.ours.fileno())
        self._reactor.unwatch_writable(link.ours.fileno())
        with self._lock:
            self._links.pop(link.number, None)
        with link.sending:
            link.is_gone = True
            link.close()

    def on_swept(self, token: int, survivors: tuple[int, ...], killed: Mapping[int, str]) -> None:
        """Nothing is asked for that."""

    def on_ready(self, details: Mapping[str, Any]) -> None:
        """The fork server has imported what it was told to."""
        failed = details.get("failed") or {}
        for name, reason in failed.items() if self._options.preload is not None else ():
            print(f"rankwise: the pool cannot preload {name}: {reason}", file=sys.stderr)  # noqa: T201

    def on_lost(self, reason: str) -> None:
        """What makes the processes is gone, and the workers with it."""
        self.tell(HostLost(reason))


def _stack_of_task(stacks: str) -> str:
    """What a fatal signal has made a worker tell, without the frames that have called the task."""
    lines = stacks.splitlines()
    ours = f'  File "{serve.__code__.co_filename}"'
    first = next((place for place, line in enumerate(lines) if line.startswith(ours)), None)
    if first is None:
        return stacks
    frames = iter(lines[first:])
    return "\n".join([*lines[:first], *dropwhile(lambda line: line.startswith("  "), frames)])


_ALWAYS_NEEDED = ("rankwise.drivers.real.pool.pool_process", "cloudpickle")
_WORTH_PRELOADING = ("numpy", "scipy")
"""What starts no thread when it is imported, and does not take so long that tasks that do not need
it would wait for nothing, as they would for torch."""


def _preload(options: PoolOptions) -> tuple[str, ...]:
    if options.preload is not None:
        return options.preload
    return tuple(name for name in _WORTH_PRELOADING if name in sys.modules)


def _payload(options: PoolOptions) -> int:
    """A file with what each worker is told; see `drivers.real.worker.function`."""
    initializer = b""
    sources: dict[str, Any] = {}
    if options.initializer is not None:
        function, args = options.initializer
        try:
            initializer, buffers, sources = dumps_call((function, args))
            if buffers.found:  # to each worker, whenever it starts: inside of the pickle
                initializer = pickle.dumps((function, args))
        except Exception as error:
            raise unsendable(function, args, {}, error) from error
    here = os.getcwd()
    header = {
        "name": "the loop of a pool's worker",
        "sys_path": [entry or here for entry in sys.path],
        "argv": list(sys.argv),
        "pass_rank": False,
        "arguments_by_rank": False,
        "sources": {},
    }
    call = partial(serve, initializer, sources, is_writable=options.is_writable)
    fd = os.memfd_create("rankwise-pool-start", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(pickle.dumps(header))
        file.write(pickle.dumps((call, ())))
    return fd


def _nothing() -> None:
    """Wake the reader up."""
