"""The gang machine: workers of one node that live and die together.

Theory of operation
===================

```
IDLE ─Started→ STARTING ─all spawned→ RUNNING ─all ended well───────→ SWEEPING ─Swept→ FINISHED
                  │                      ├─silent → DUMPING ─┐           ▲ │
                  └────────one failed────┴───────────────────┴→ STOPPING │ │
                                              grace over → KILLING ──────┘ │ all ended
       STARTING ←─pause over─ BACKING_OFF ←─failed, but restarts left──────┘
```

All or nothing: the first failure of a worker (a non-zero exit, a signal, a refusal to start, a
hang) ends the attempt. The others are told to stop with SIGTERM, and killed when the grace is
over. When every worker has ended, what they left behind is swept, and only then may the next
attempt start: a stray of the last one could hold its port or its device.

- An attempt's number travels with every stimulus; facts about an earlier attempt change nothing.
- A stop request is obeyed in every phase and forbids restarts. It never turns a failure that came
  first into a success or a stop: the outcome tells what happened first. First means: first heard
  of. A batch system's SIGTERM to everybody must stay a stop, though a worker may die of it before
  the request is read. The second request, from whomever, means SIGKILL at once.
- A worker may be told to stop before its process exists. The order is kept and given as soon as
  `WorkerSpawned` says that there is somebody to give it to. One that comes up after it was given
  up is killed. When a stop is requested and no process exists, or none any more, as while a
  fork server imports, nobody is waited for: the sweep takes the orders back.
- A process that survives SIGKILL (it is stuck in the kernel) is given up after `sweep_timeout`,
  so that nothing waits for ever. Two attempts must never be alive at once: what a sweep could not
  end, or a sweep that did not end itself, forbids a restart, and the outcome says so.
- A hang is the absence of any sign of life from *any* worker. The machine does not see signs of
  life, which may be thousands per second: when the timeout could have passed it asks
  (`LookForProgress`) and sets its next deadline from the answer.
- A worker that has told of the exception that it dies of may still not end: a thread of its own
  keeps it. Its exit would tell, so only when `exit_timeout` has passed without one is the attempt
  ended as if it had.
- If the guardian is lost, so are its workers: the gang ends at once, without restart. What had
  happened before stays true: a gang whose workers had all ended well has succeeded.

Only failures spend restarts. The first restart is immediate, later ones back off.
"""

from rankwise.base.errors import LocalProtocolError
from rankwise.base.failure import Failure, Outcome, OutcomeStatus
from rankwise.base.units import Instant, after, between, format_duration
from rankwise.core.gang.failures import failures_of
from rankwise.core.gang.state import Phase, WorkerLife
from rankwise.core.gang.vocabulary import (
    AnnounceKill,
    AnnounceRestart,
    DumpStacks,
    Effect,
    Finish,
    GangSpec,
    GuardianLost,
    LookForProgress,
    ProgressLooked,
    SignalWorker,
    SpawnWorker,
    StacksDumped,
    Started,
    Stimulus,
    StopRequested,
    Sweep,
    Swept,
    Ticked,
    WorkerExited,
    WorkerRefused,
    WorkerReported,
    WorkerSpawned,
)

SIGTERM = 15
SIGKILL = 9


class Gang:
    """One gang from start to outcome. See the module's text for its life.

    Args:
        spec: what the gang is.
        first_attempt: the number of its first life. Whoever makes one gang after another on one
            process host goes on counting, so that facts about the last gang do not touch the next.
    """

    def __init__(self, spec: GangSpec, first_attempt: int = 0) -> None:
        self.spec = spec
        self.phase = Phase.IDLE
        self.attempt = first_attempt
        self._first_attempt = first_attempt
        self.restarts_left = spec.restarts_max
        self.outcome: Outcome | None = None
        self._attempts_begun = 0
        self._workers: list[WorkerLife] = []
        self._deadline: Instant | None = None
        self._exits_due: Instant | None = None
        self._stop_ordered_at: Instant | None = None
        self._stop: StopRequested | None = None
        self._stop_came_first = False

    @property
    def next_deadline(self) -> Instant | None:
        """When `tick` wants to be called next; None while only stimuli can change anything."""
        if self._exits_due is None or not self._is_under_way:
            return self._deadline
        return self._exits_due if self._deadline is None else min(self._deadline, self._exits_due)

    @property
    def workers(self) -> tuple[WorkerLife, ...]:
        """What is known of each worker of the present attempt, by local rank."""
        return tuple(self._workers)

    @property
    def failures_so_far(self) -> tuple[Failure, ...]:
        """The failures of the present attempt, as far as they are known, the likely root first."""
        return self._failures()

    def handle(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        """Take in a fact; return what is to be done, in this order."""
        match stimulus:
            case Started():
                return self._on_started(now)
            case WorkerSpawned():
                return self._on_spawned(stimulus, now)
            case WorkerRefused():
                return self._on_refused(stimulus, now)
            case WorkerReported():
                return self._on_reported(stimulus, now)
            case WorkerExited():
                return self._on_exited(stimulus, now)
            case Swept():
                return self._on_swept(stimulus, now)
            case StopRequested():
                return self._on_stop_requested(stimulus, now)
            case ProgressLooked():
                return self._on_progress_looked(stimulus, now)
            case StacksDumped():
                return self._on_stacks_dumped(stimulus, now)
            case GuardianLost():
                return self._on_guardian_lost(stimulus, now)
            case Ticked():
                return self.tick(now)

    def tick(self, now: Instant) -> list[Effect]:
        """Let a deadline that has passed take effect. Calling it too early changes nothing."""
        if self._exits_due is not None and self._is_under_way and now >= self._exits_due:
            return self._look_for_lingerers(now)
        if self._deadline is None or now < self._deadline:
            return []
        self._deadline = None
        match self.phase:
            case Phase.STARTING:
                return self._give_up_starting(now)
            case Phase.RUNNING:
                return [LookForProgress(self.attempt)]
            case Phase.DUMPING:
                return self._begin_stopping(now)
            case Phase.STOPPING:
                return self._begin_killing(now)
            case Phase.KILLING:
                return self._give_up_killing(now)
            case Phase.SWEEPING:
                return self._give_up_sweeping()
            case Phase.BACKING_OFF:
                return self._begin_attempt(now)
            case Phase.IDLE | Phase.FINISHED:
                raise AssertionError(f"a gang that is {self.phase} has no deadline")

    def _on_started(self, now: Instant) -> list[Effect]:
        if self.phase is Phase.FINISHED and self._attempts_begun == 0:
            return []  # it was stopped before its life could begin
        if self.phase is not Phase.IDLE:
            raise LocalProtocolError(
                f"the gang was started while {self.phase}; a gang lives once, make another"
            )
        return self._begin_attempt(now)

    def _begin_attempt(self, now: Instant) -> list[Effect]:
        self.attempt = self._first_attempt + self._attempts_begun
        self._attempts_begun += 1
        self.phase = Phase.STARTING
        self._workers = self._new_workers()
        self._stop_ordered_at = None
        self._exits_due = None
        self._deadline = after(now, self.spec.start_patience)
        return [SpawnWorker(worker.local_rank, self.attempt) for worker in self._workers]

    def _new_workers(self) -> list[WorkerLife]:
        return [WorkerLife(local_rank) for local_rank in range(self.spec.size)]

    def _worker_of(
        self, stimulus: WorkerSpawned | WorkerRefused | WorkerReported | WorkerExited
    ) -> WorkerLife | None:
        """The worker that is meant, or None when its life is over already."""
        if stimulus.attempt != self.attempt or self.phase in (Phase.IDLE, Phase.FINISHED):
            return None
        worker = self._workers[stimulus.local_rank]
        return None if worker.has_ended else worker

    def _on_spawned(self, stimulus: WorkerSpawned, now: Instant) -> list[Effect]:
        if self.phase in (Phase.IDLE, Phase.FINISHED):
            return []
        worker = self._worker_of(stimulus)
        if worker is None:
            return [SignalWorker(stimulus.local_rank, stimulus.attempt, SIGKILL)]
        worker.pid = stimulus.pid
        match self.phase:
            case Phase.STARTING:
                return self._run_if_complete(now)
            case Phase.STOPPING:
                return [self._signal(worker, self._stop_signal)]
            case Phase.KILLING:
                return [self._signal(worker, SIGKILL)]
            case _:
                return []

    def _run_if_complete(self, now: Instant) -> list[Effect]:
        if any(worker.pid is None for worker in self._workers):
            return []
        self.phase = Phase.RUNNING
        hang_timeout = self.spec.hang_timeout
        self._deadline = None if hang_timeout is None else after(now, hang_timeout)
        return self._sweep_if_all_ended(now)

    def _on_refused(self, stimulus: WorkerRefused, now: Instant) -> list[Effect]:
        worker = self._worker_of(stimulus)
        if worker is None:
            return []
        worker.refusal = stimulus.reason
        worker.ended_at = now
        return self._after_an_end(worker, now)

    @property
    def _is_under_way(self) -> bool:
        """Whether nothing has ended the attempt yet."""
        return self.phase in (Phase.STARTING, Phase.RUNNING)

    def _on_reported(self, stimulus: WorkerReported, now: Instant) -> list[Effect]:
        worker = self._worker_of(stimulus)
        # A process can report once for itself and again for a child that inherited the pipe:
        # the first exception is the one that it dies of.
        if worker is not None and worker.error is None:
            worker.error = stimulus.error
            worker.must_end_by = after(now, self.spec.exit_timeout)
            self._exits_due = self._exits_due or worker.must_end_by
        return []

    def _look_for_lingerers(self, now: Instant) -> list[Effect]:
        """End the attempt if a worker should have ended by now; else look again at the next one."""
        self._exits_due = None
        for worker in self._workers:
            if worker.must_end_by is None or worker.has_ended:
                continue
            worker.has_lingered = now >= worker.must_end_by
            if not worker.has_lingered:
                self._exits_due = min(self._exits_due or worker.must_end_by, worker.must_end_by)
        if any(worker.has_lingered for worker in self._workers):
            return self._begin_stopping(now)
        return []

    def _on_exited(self, stimulus: WorkerExited, now: Instant) -> list[Effect]:
        worker = self._worker_of(stimulus)
        if worker is None:
            return []
        worker.exit = stimulus.exit
        worker.ended_at = stimulus.at
        return self._after_an_end(worker, now)

    def _after_an_end(self, worker: WorkerLife, now: Instant) -> list[Effect]:
        if self._is_under_way and worker.has_failed:
            return self._begin_stopping(now)
        if self.phase is Phase.STARTING:
            return []
        return self._sweep_if_all_ended(now)

    def _sweep_if_all_ended(self, now: Instant) -> list[Effect]:
        if self.phase in (Phase.STOPPING, Phase.KILLING) and self._is_stopped_unborn:
            return self._call_off(now)
        if not all(worker.has_ended for worker in self._workers):
            return []
        return self._begin_sweep(now)

    def _begin_sweep(self, now: Instant) -> list[Effect]:
        self.phase = Phase.SWEEPING
        self._deadline = after(now, self.spec.sweep_timeout)
        return [Sweep(self.attempt)]

    @property
    def _stop_signal(self) -> int:
        if self._stop is not None and self._stop.signal is not None:
            return self._stop.signal
        return SIGTERM

    def _begin_stopping(self, now: Instant) -> list[Effect]:
        if self._stop_ordered_at is None:
            self._stop_ordered_at = now
        if self._is_stopped_unborn:
            return self._call_off(now)
        if self.spec.grace == 0:
            return self._begin_killing(now)
        self.phase = Phase.STOPPING
        self._deadline = after(now, self.spec.grace)
        return self._signal_all(self._stop_signal) or self._sweep_if_all_ended(now)

    @property
    def _is_stopped_unborn(self) -> bool:
        """Whether a stop was requested while no worker has a process."""
        return self._stop is not None and not any(worker.is_running for worker in self._workers)

    def _call_off(self, now: Instant) -> list[Effect]:
        """Wait for no worker that does not exist yet; the sweep takes back the orders for them."""
        for worker in self._workers:
            if not worker.has_ended:
                worker.refusal = "the gang was stopped before it had started"
                worker.ended_at = now
        return self._begin_sweep(now)

    def _begin_killing(self, now: Instant, *, asked_again: bool = False) -> list[Effect]:
        if self._stop_ordered_at is None:
            self._stop_ordered_at = now
        if self._is_stopped_unborn:
            return self._call_off(now)
        self.phase = Phase.KILLING
        self._deadline = after(now, self.spec.sweep_timeout)
        orders = self._signal_all(SIGKILL)
        if not orders:
            return self._sweep_if_all_ended(now)
        doomed = tuple(worker.local_rank for worker in self._workers if worker.is_running)
        return [AnnounceKill(self.attempt, doomed, asked_again), *orders]

    def _signal_all(self, signal: int) -> list[Effect]:
        return [self._signal(worker, signal) for worker in self._workers if worker.is_running]

    def _signal(self, worker: WorkerLife, signal: int) -> SignalWorker:
        return SignalWorker(worker.local_rank, self.attempt, signal)

    def _give_up_starting(self, now: Instant) -> list[Effect]:
        patience = format_duration(self.spec.start_patience)
        for worker in self._workers:
            if worker.pid is None and not worker.has_ended:
                worker.refusal = f"it did not start within {patience}"
                worker.ended_at = now
        return self._begin_stopping(now)

    def _give_up_killing(self, now: Instant) -> list[Effect]:
        for worker in self._workers:
            if worker.is_running:
                worker.outlived_kill = True
            elif not worker.has_ended:
                worker.refusal = "it was told to stop before it had started"
            if not worker.has_ended:
                worker.ended_at = now
        return self._begin_sweep(now)

    def _on_swept(self, stimulus: Swept, now: Instant) -> list[Effect]:
        if self.phase is not Phase.SWEEPING or stimulus.attempt != self.attempt:
            return []
        if stimulus.survivors:
            pids = ", ".join(str(pid) for pid in stimulus.survivors)
            obstacle = f"SIGKILL does not end what the gang left behind (pids {pids})"
            return self._conclude(stimulus.survivors, f"not restarted: {obstacle}")
        if self._may_restart:
            return self._begin_restart(now)
        return self._conclude()

    def _give_up_sweeping(self) -> list[Effect]:
        known = tuple(
            worker.pid
            for worker in self._workers
            if worker.outlived_kill and worker.pid is not None
        )
        patience = format_duration(self.spec.sweep_timeout)
        return self._conclude(
            known, f"not restarted: what the gang left behind was not swept within {patience}"
        )

    @property
    def _has_failed(self) -> bool:
        return any(worker.has_failed for worker in self._workers)

    @property
    def _may_restart(self) -> bool:
        return self._has_failed and self._stop is None and self.restarts_left > 0

    def _conclude(self, survivors: tuple[int, ...] = (), obstacle: str = "") -> list[Effect]:
        """Finish, with the `obstacle` as the outcome's detail if it is what forbids a restart."""
        if self._stop_came_first:
            status = OutcomeStatus.STOPPED
        elif self._has_failed:
            status = OutcomeStatus.FAILED
        else:
            status = OutcomeStatus.SUCCEEDED
        restart_was_due = self._may_restart or self.phase is Phase.BACKING_OFF
        return self._finish(status, survivors, obstacle if restart_was_due else "")

    def _begin_restart(self, now: Instant) -> list[Effect]:
        self.restarts_left -= 1
        pause = self.spec.backoff.before_restart(self.attempt + 1)
        announcement = AnnounceRestart(self.attempt, self.restarts_left, pause, self._failures())
        self.phase = Phase.BACKING_OFF
        self._deadline = after(now, pause)
        return [announcement, *(self._begin_attempt(now) if pause == 0 else [])]

    def _finish(
        self, status: OutcomeStatus, survivors: tuple[int, ...] = (), detail: str = ""
    ) -> list[Effect]:
        self.phase = Phase.FINISHED
        self._deadline = None
        self.outcome = Outcome(
            status=status,
            attempts=self._attempts_begun,
            failures=self._failures(),
            stop_signal=None if self._stop is None else self._stop.signal,
            survivors=survivors,
            detail=detail,
        )
        return [Finish(self.outcome)]

    def _on_stop_requested(self, stimulus: StopRequested, now: Instant) -> list[Effect]:
        is_first = self._stop is None
        if is_first:
            self._stop = stimulus
        match self.phase:
            case Phase.FINISHED | Phase.SWEEPING | Phase.KILLING:
                return []
            case Phase.IDLE:
                self._stop_came_first = True
                return self._conclude()
            case Phase.BACKING_OFF:
                return self._conclude()
            case Phase.STARTING | Phase.RUNNING | Phase.DUMPING:
                self._stop_came_first = self.phase is not Phase.DUMPING
                return self._begin_stopping(now)
            case Phase.STOPPING:
                return [] if is_first else self._begin_killing(now, asked_again=True)

    def _on_progress_looked(self, stimulus: ProgressLooked, now: Instant) -> list[Effect]:
        hang_timeout = self.spec.hang_timeout
        if self.phase is not Phase.RUNNING or stimulus.attempt != self.attempt:
            return []
        assert hang_timeout is not None, "progress is only looked for when there is a hang timeout"
        if between(stimulus.last_progress, now) < hang_timeout:
            self._deadline = after(stimulus.last_progress, hang_timeout)
            return []
        for worker in self._workers:
            if worker.is_running:
                worker.hung_at = now
        self.phase = Phase.DUMPING
        self._deadline = after(now, self.spec.stacks_timeout)
        return [DumpStacks(self.attempt)]

    def _on_stacks_dumped(self, stimulus: StacksDumped, now: Instant) -> list[Effect]:
        if self.phase is not Phase.DUMPING or stimulus.attempt != self.attempt:
            return []
        return self._begin_stopping(now)

    def _on_guardian_lost(self, stimulus: GuardianLost, now: Instant) -> list[Effect]:
        if self.phase is Phase.FINISHED:
            return []
        if self.phase is Phase.IDLE:
            self._workers = self._new_workers()
        for worker in self._workers:
            if not worker.has_ended:
                worker.lost = stimulus.reason
                worker.ended_at = now
        return self._conclude(obstacle=f"not restarted: {stimulus.reason}")

    def _failures(self) -> tuple[Failure, ...]:
        return failures_of(self._workers, self.spec, self.attempt, self._stop_ordered_at)
