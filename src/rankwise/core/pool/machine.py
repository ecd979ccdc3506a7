"""The machine of a pool: which worker runs which task, and what a death means for it.

A task is *waiting* while futures that it needs are not done, then *queued*, then *sent* to a
worker, then over: `EndTask` is ordered exactly once for it. A worker is *starting* until it says
that it is ready, and *ending* once it gets no more tasks.

**Sent ahead.** While a worker runs a task, the next one lies in its socket already, so that it
never waits for the caller; of short tasks there lie many, so that it need not be woken for each.
That must hold up nothing: when a worker has nothing to do and no task
is queued, the machine recalls what lies in a busy worker's socket; and when a worker is done, what
lies behind a task that takes long goes before what is queued. The kernel decides
who gets it, the worker or we: a task is run once.

**Deaths.** The driver tells which tasks a dead worker had begun: one, usually. It fails, or is
queued again while it has attempts left. Attempts are those of a call: if a chunk has advanced, they
count anew. The others are queued again, at the front. Workers are
replaced on demand, since as many are wanted as there are tasks, up to the pool's size.
Some in a row that end before they are ready (a broken import, an initializer that crashes) break
the pool if no other worker is left; else the pool goes on with fewer.

**Ends.** `CloseRequested` lets all tasks end and then the workers. `PoolStopRequested` cancels what
was not sent, interrupts what runs and kills what is left when its grace is over. A broken pool
kills its workers and ends all tasks. Each way leads to `ReleasePool`.

A step is as short as it can be, since it is taken for each task, by the thread that submits.
"""

from collections import OrderedDict, deque
from enum import StrEnum

from rankwise.base.units import MILLISECOND, Instant, after
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
    TaskCancelled,
    TaskEnd,
    TasksRecalled,
    TaskWithdrawn,
    WorkerEnded,
    WorkerReady,
)

_SLOW_NS = 5 * MILLISECOND
"""How long a worker may run a task before others may get what lies behind it."""
_OVERHEAD_NS = 20_000
"""What a worker needs for a task beside the task."""


class PoolPhase(StrEnum):
    """How far a pool has come."""

    OPEN = "open"
    CLOSING = "closing"
    STOPPING = "stopping"
    BROKEN = "broken"
    RELEASED = "released"


class _Task:
    __slots__ = ("attempts", "attempts_max", "needs", "number", "worker")

    def __init__(self, number: int, needs: int, attempts: int) -> None:
        self.number = number
        self.needs = needs
        self.attempts = self.attempts_max = attempts
        self.worker: int | None = None


class _Worker:
    __slots__ = (
        "is_ending",
        "is_ready",
        "is_recalled",
        "is_slow",
        "number",
        "since",
        "tasks",
        "tasks_left",
    )

    def __init__(self, number: int, tasks_left: float) -> None:
        self.number = number
        self.tasks_left = tasks_left
        self.tasks: deque[int] = deque()
        self.is_ready = False
        self.is_ending = False
        self.since = Instant(0)
        """When it was given the task that it runs, or has answered the one before."""
        self.is_slow = False
        """Whether nothing is sent ahead before it answers."""
        self.is_recalled = False
        """Whether nothing can be recalled before it answers, or is sent more."""


class PoolMachine:
    """See the module's text.

    Attributes:
        phase: how far the pool has come.
        reason: why it is broken.
    """

    def __init__(self, spec: PoolSpec) -> None:
        self.phase = PoolPhase.OPEN
        self.reason = ""
        self._spec = spec
        self._size = spec.size
        self._tasks: dict[int, _Task] = {}
        self._queue: OrderedDict[int, None] = OrderedDict()
        """Not a deque: to cancel one of many takes as long as to cancel one of few."""
        self._runnable = 0
        """How many tasks are queued or sent."""
        self._workers: dict[int, _Worker] = {}
        self._idle: list[_Worker] = []
        """Ready workers without a task; the one that became idle last has the warmest caches."""
        self._roomy: dict[int, _Worker] = {}
        """Workers that run a task and may be sent another."""
        self._present = 0
        """How many workers are starting or take tasks."""
        self._next_worker = 1
        self._failed_starts = 0
        self._deadline: Instant | None = None
        self._now = self._checked_at = Instant(0)
        self._depth = spec.depth
        self._took = int(spec.ahead)
        """How long tasks take of late, in nanoseconds."""

    @property
    def next_deadline(self) -> Instant | None:
        """When workers that have not ended are killed."""
        return self._deadline

    @property
    def can_send(self) -> bool:
        """Whether a task that is submitted now would be sent, or would start a worker."""
        return bool(self._idle or self._roomy or self._present < self._size)

    @property
    def workers(self) -> list[PoolWorkerView]:
        """How each worker is."""
        return [
            PoolWorkerView(
                worker=worker.number,
                is_ready=worker.is_ready,
                task=worker.tasks[0] if worker.is_ready and worker.tasks else None,
                since=worker.since,
            )
            for worker in self._workers.values()
        ]

    def handle(self, stimulus: PoolStimulus, now: Instant) -> list[PoolEffect]:
        """Take in a fact; return what is to be done, in this order."""
        effects: list[PoolEffect] = []
        self._now = now
        match stimulus:
            case PoolTaskSubmitted():
                self._on_submitted(stimulus, effects)
            case TaskAnswered(worker=worker, task=number, took=took):
                self._note_duration(took)
                self._on_answered(worker, number, TaskEnd.ANSWERED, effects)
            case NeedMet(task=number):
                self._on_need_met(number, effects)
            case NeedFailed(task=number, was_cancelled=was_cancelled):
                end = TaskEnd.CANCELLED if was_cancelled else TaskEnd.SKIPPED
                self._end_unsent(number, end, effects)
            case TaskCancelled(task=number):
                self._end_unsent(number, TaskEnd.CANCELLED, effects)
            case TaskWithdrawn(worker=worker, task=number):
                self._on_answered(worker, number, TaskEnd.CANCELLED, effects)
            case WorkerReady(worker=number):
                self._on_ready(number, effects)
            case PoolWorkerRefused(worker=number, reason=reason):
                self._on_worker_gone(number, (), reason, effects)
            case WorkerEnded(worker=number, begun=begun, reason=reason, advanced=advanced):
                for advanced_task in advanced:
                    if (task := self._tasks.get(advanced_task)) is not None:
                        # A task that made progress is not what kills workers: it has all its
                        # attempts again.
                        task.attempts = task.attempts_max
                self._on_worker_gone(number, begun, reason, effects)
            case InitializerFailed(reason=reason):
                self._break(reason, effects)
            case TasksRecalled(worker=number, tasks=tasks):
                self._on_recalled(number, tasks, effects)
            case CloseRequested(cancels=cancels):
                self._on_close(effects, cancels=cancels)
            case PoolStopRequested():
                self._on_stop(effects, now)
            case HostLost(reason=reason):
                self._on_host_lost(reason, effects)
        if self.phase is not PoolPhase.OPEN:
            self._go_on_ending(effects, now)
        return effects

    def tick(self, now: Instant) -> list[PoolEffect]:
        """Kill the workers whose time is over."""
        if self._deadline is None or now < self._deadline:
            return []
        self._deadline = None
        return [KillWorker(number) for number in self._workers]

    # Tasks

    def _on_submitted(self, stimulus: PoolTaskSubmitted, effects: list[PoolEffect]) -> None:
        number = stimulus.task
        if self.phase is not PoolPhase.OPEN:
            # It was on its way when the pool was closed.
            is_broken = self.phase is PoolPhase.BROKEN or bool(self.reason)
            end = TaskEnd.ABANDONED if is_broken else TaskEnd.CANCELLED
            effects.append(EndTask(number, end, self.reason))
            return
        self._tasks[number] = task = _Task(number, stimulus.needs, stimulus.attempts)
        if not task.needs:
            self._runnable += 1
            self._queue[number] = None
            self._dispatch(effects)

    def _on_need_met(self, number: int, effects: list[PoolEffect]) -> None:
        task = self._tasks.get(number)
        if task is None or not task.needs:
            return
        task.needs -= 1
        if not task.needs:
            self._runnable += 1
            self._queue[number] = None
            self._dispatch(effects)

    def _on_answered(
        self, number: int, task_number: int, end: TaskEnd, effects: list[PoolEffect]
    ) -> None:
        task = self._tasks.get(task_number)
        worker = self._workers.get(number)
        if task is None or worker is None or task.worker != number:
            return  # of a task that is over: its pool was broken meanwhile
        # By number: tasks that were withdrawn may be answered out of their order.
        worker.tasks.remove(task_number)
        worker.is_recalled = worker.is_slow = False
        worker.since = self._now
        self._end(task, end, effects)
        self._runnable -= 1
        self._take_more(worker, effects)

    def _note_duration(self, took: int) -> None:
        """Adapt how many tasks are sent ahead: at once to a long task, slowly to short ones."""
        # Too many sent ahead wait behind a long task, which costs more than too few short ones.
        self._took = took if took > self._took else (7 * self._took + took) // 8
        ahead = self._spec.ahead // (self._took + _OVERHEAD_NS)
        self._depth = max(self._spec.depth, min(ahead, self._spec.depth_max))

    def _end_unsent(self, number: int, end: TaskEnd, effects: list[PoolEffect]) -> None:
        task = self._tasks.get(number)
        if task is None or task.worker is not None:
            return
        if not task.needs:
            del self._queue[number]
            self._runnable -= 1
        self._end(task, end, effects)

    def _end(
        self,
        task: _Task,
        end: TaskEnd,
        effects: list[PoolEffect],
        reason: str = "",
        worker: int | None = None,
    ) -> None:
        del self._tasks[task.number]
        effects.append(EndTask(task.number, end, reason, worker))

    def _dispatch(self, effects: list[PoolEffect]) -> None:
        """Send queued tasks to workers that have room, and start workers for those behind."""
        queue = self._queue
        while queue:
            if self._idle:
                worker = self._idle.pop()
            elif self._roomy:
                # The one that has had room for longest is done first, as a rule.
                worker = next(iter(self._roomy.values()))
            else:
                break
            self._send(worker, queue.popitem(last=False)[0], effects)
        # No more workers than tasks: a pool of a hundred that gets one task starts one.
        while self._present < self._size and self._present < self._runnable:
            self._start_worker(effects)

    def _send(self, worker: _Worker, number: int, effects: list[PoolEffect]) -> None:
        if not worker.tasks:
            worker.since = self._now
        worker.tasks.append(number)
        worker.tasks_left -= 1
        worker.is_recalled = False
        self._tasks[number].worker = worker.number
        self._note_room(worker)
        effects.append(SendTask(worker.number, number))

    def _note_room(self, worker: _Worker) -> None:
        has_room = worker.tasks_left > 0 and 0 < len(worker.tasks) < self._depth
        if has_room and not worker.is_ending and not worker.is_slow:
            self._roomy[worker.number] = worker
        else:
            self._roomy.pop(worker.number, None)

    def _take_more(self, worker: _Worker, effects: list[PoolEffect]) -> None:
        """Find something to do for a worker that has room again."""
        if worker.is_ending:
            return
        if worker.tasks_left <= 0:
            self._roomy.pop(worker.number, None)
            if not worker.tasks:
                self._let_end(worker, effects)
                self._dispatch(effects)
            return
        if self._now - self._checked_at > _SLOW_NS and self._recall_from_slow(effects):
            # Returned tasks go before queued ones.
            if worker.tasks:
                self._note_room(worker)
            else:
                self._roomy.pop(worker.number, None)
                self._idle.append(worker)
            return
        queue, depth = self._queue, self._depth
        while queue and len(worker.tasks) < depth and worker.tasks_left > 0:
            self._send(worker, queue.popitem(last=False)[0], effects)
        if worker.tasks:
            self._note_room(worker)
            return
        self._roomy.pop(worker.number, None)
        self._idle.append(worker)
        self._recall_for_idle(effects)

    def _recall_from_slow(self, effects: list[PoolEffect]) -> bool:
        """Take back what lies behind a task that takes long: it would lose its place."""
        self._checked_at = self._now
        count = len(effects)
        for worker in self._workers.values():
            if len(worker.tasks) > 1 and self._now - worker.since > _SLOW_NS:
                worker.is_slow = worker.is_recalled = True
                self._roomy.pop(worker.number, None)
                effects.append(RecallTasks(worker.number))
        return len(effects) > count

    def _recall_for_idle(self, effects: list[PoolEffect]) -> None:
        for worker in self._workers.values():
            if len(worker.tasks) > 1 and not worker.is_recalled:
                worker.is_recalled = True
                effects.append(RecallTasks(worker.number))
                return

    def _on_recalled(self, number: int, tasks: tuple[int, ...], effects: list[PoolEffect]) -> None:
        worker = self._workers.get(number)
        if worker is None:
            return
        self._take_back(worker, tasks)
        if self.phase is PoolPhase.STOPPING:
            for task in tasks:
                self._end_unsent(task, TaskEnd.CANCELLED, effects)
            return
        if not worker.tasks and not worker.is_ending and worker not in self._idle:
            self._idle.insert(0, worker)  # it has not come to any of them
        self._dispatch(effects)
        if self._idle:
            self._recall_for_idle(effects)

    def _take_back(self, worker: _Worker, tasks: tuple[int, ...]) -> None:
        """Queue again, at the front, what a worker was sent and has not taken."""
        for number in reversed(tasks):
            task = self._tasks.get(number)
            if task is not None and task.worker == worker.number:
                task.worker = None
                worker.tasks.remove(number)
                worker.tasks_left += 1
                self._queue_first(number)
        self._note_room(worker)

    def _queue_first(self, number: int) -> None:
        self._queue[number] = None
        self._queue.move_to_end(number, last=False)

    # Workers

    def _start_worker(self, effects: list[PoolEffect]) -> None:
        tasks_max = self._spec.tasks_max
        number, self._next_worker = self._next_worker, self._next_worker + 1
        self._workers[number] = _Worker(number, float("inf") if tasks_max is None else tasks_max)
        self._present += 1
        effects.append(StartWorker(number))

    def _on_ready(self, number: int, effects: list[PoolEffect]) -> None:
        worker = self._workers.get(number)
        if worker is None or worker.is_ready:
            return
        worker.is_ready = True
        self._failed_starts = 0
        if not worker.is_ending:
            self._take_more(worker, effects)
            self._dispatch(effects)

    def _let_end(self, worker: _Worker, effects: list[PoolEffect]) -> None:
        worker.is_ending = True
        self._present -= 1
        self._roomy.pop(worker.number, None)
        if worker in self._idle:
            self._idle.remove(worker)
        effects.append(EndWorker(worker.number))

    def _on_worker_gone(
        self, number: int, begun: tuple[int, ...], reason: str, effects: list[PoolEffect]
    ) -> None:
        worker = self._workers.pop(number, None)
        if worker is None:
            return
        if not worker.is_ending:
            self._present -= 1
        self._roomy.pop(number, None)
        if worker in self._idle:
            self._idle.remove(worker)
        unread = tuple(task for task in worker.tasks if task not in begun)
        self._take_back(worker, unread)
        self._roomy.pop(number, None)
        for task_number in reversed(worker.tasks):
            self._end_or_retry(self._tasks[task_number], reason, effects)
        if self.phase is PoolPhase.STOPPING:
            for task_number in unread:
                self._end_unsent(task_number, TaskEnd.CANCELLED, effects)
        if not worker.is_ready and not worker.is_ending:
            self._count_failed_start(reason, effects)
        if self.phase in (PoolPhase.OPEN, PoolPhase.CLOSING):
            self._dispatch(effects)

    def _end_or_retry(self, task: _Task, reason: str, effects: list[PoolEffect]) -> None:
        task.attempts -= 1
        worker, task.worker = task.worker, None
        if task.attempts > 0 and self.phase in (PoolPhase.OPEN, PoolPhase.CLOSING):
            self._queue_first(task.number)
            return
        self._runnable -= 1
        self._end(task, TaskEnd.DIED, effects, reason, worker)

    def _count_failed_start(self, reason: str, effects: list[PoolEffect]) -> None:
        self._failed_starts += 1
        if self._failed_starts < self._spec.starts_max:
            return
        ready = sum(worker.is_ready for worker in self._workers.values())
        if ready:
            self._size = ready
        elif self._runnable:
            self._break(reason, effects)

    # The end

    def _on_close(self, effects: list[PoolEffect], *, cancels: bool) -> None:
        if self.phase is PoolPhase.OPEN:
            self.phase = PoolPhase.CLOSING
        if cancels:
            self._cancel_unsent(effects)

    def _cancel_unsent(self, effects: list[PoolEffect]) -> None:
        for number in [number for number, task in self._tasks.items() if task.worker is None]:
            self._end_unsent(number, TaskEnd.CANCELLED, effects)

    def _on_stop(self, effects: list[PoolEffect], now: Instant) -> None:
        if self.phase in (PoolPhase.BROKEN, PoolPhase.RELEASED):
            return
        if self.phase is PoolPhase.STOPPING:
            effects += [KillWorker(number) for number in self._workers]
            return
        self.phase = PoolPhase.STOPPING
        self._cancel_unsent(effects)
        for worker in self._workers.values():
            if len(worker.tasks) > 1:
                effects.append(RecallTasks(worker.number))
            if worker.tasks:
                effects.append(InterruptWorker(worker.number))
            elif not worker.is_ready:
                effects.append(KillWorker(worker.number))
        self._deadline = after(now, self._spec.grace)

    def _break(self, reason: str, effects: list[PoolEffect]) -> None:
        if self.phase in (PoolPhase.BROKEN, PoolPhase.RELEASED):
            return
        self.phase = PoolPhase.BROKEN
        self.reason = reason
        self._end_all(TaskEnd.ABANDONED, effects)
        effects += [KillWorker(number) for number in self._workers]

    def _on_host_lost(self, reason: str, effects: list[PoolEffect]) -> None:
        if self.phase is PoolPhase.RELEASED:
            return
        self.phase = PoolPhase.BROKEN
        self.reason = self.reason or reason
        self._end_all(TaskEnd.ABANDONED, effects)
        self._workers.clear()

    def _end_all(self, end: TaskEnd, effects: list[PoolEffect]) -> None:
        for task in list(self._tasks.values()):
            self._end(task, end, effects, self.reason)
        self._queue.clear()
        self._runnable = 0
        self._idle.clear()
        self._roomy.clear()
        for worker in self._workers.values():
            worker.tasks.clear()

    def _go_on_ending(self, effects: list[PoolEffect], now: Instant) -> None:
        """Let workers end that have no more to do, and release the pool when none is left."""
        if self.phase is PoolPhase.RELEASED or self._tasks:
            return
        if self.phase in (PoolPhase.CLOSING, PoolPhase.STOPPING):
            for worker in [*self._workers.values()]:
                if not worker.is_ending:
                    self._let_end(worker, effects)
                    if self._deadline is None:
                        self._deadline = after(now, self._spec.end_patience)
        if not self._workers:
            self.phase = PoolPhase.RELEASED
            self._deadline = None
            effects.append(ReleasePool())
