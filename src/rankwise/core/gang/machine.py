"""The gang machine: workers of one node that live and die together.

Theory of operation
===================

```
IDLE ─Started→ STARTING ─all spawned→ RUNNING ─all ended well───────→ SWEEPING ─Swept→ FINISHED
                  │                      ├─silent → DUMPING ─┐           ▲
                  └────────one failed────┴───────────────────┴→ STOPPING │ all ended
                                              grace over → KILLING ──────┘

 RUNNING ─one failed, or RecallRequested→ RECALLING ─all have yielded→ CLEARING ─Swept→ PAUSED
 PAUSED ─Resumed→ STARTING
```

All or nothing: the first failure of a worker (a non-zero exit, a signal, a refusal to start, a
hang) ends the gang. The others are told to stop with SIGTERM, and killed when the grace is
over. When every worker has ended, what they left behind is swept, and only then is the gang
finished: a stray of this one could hold the port or the device of the next.

- A gang has one life. Whether another gang follows is the agent's affair (`core/agent`), which
  numbers them; the number (`attempt`) travels with every stimulus, and facts about an earlier gang
  change nothing.
- *Recovery* (`rankwise.recover`; ADR 0021): a gang with restarts left outlives the failure of a
  worker if another one runs a function that can be called again. Those that do are recalled; the
  others are told to stop. A worker that is late with either is killed. Strays of the dead are
  swept, and the gang pauses. Then the agent resumes it as another attempt: those that have yielded
  are called again, and the others are made anew. In a pause a request to stop kills the workers
  that stand: they have left their functions, and have nothing to save.
- The same is done when the round is over for another node's sake (`RecallRequested`), though no
  worker of this gang has failed. A later exit of theirs is not a failure of their own.
- A worker that can be recovered holds back the exception of its function: its cause may be a death
  that is not known yet. If none becomes known within `exception_timeout`, all exceptions that are
  held are released, and their workers fail as any others do.
- A stop request is obeyed in every phase, and the outcome is that of the first fact. A batch
  system's SIGTERM to all processes stays a stop, though a worker may die of it before the request
  is read. Workers that had all ended well before it was read have succeeded. The second request
  means SIGKILL at once, also if it comes from another source.
- A worker may be told to stop before its process exists: the order is kept. When a stop is
  requested and no process exists, the gang waits for none: the sweep takes the orders back.
- Two gangs must never be alive at once: what a sweep could not end, or a sweep that did not end
  itself, forbids another gang, and the outcome's detail says so.
- While workers are started, their spawner has to make progress: a fork server computes or reads
  while it imports. Without any for `hang_timeout`, or when `spawn_timeout` is over, those that do
  not exist yet have not started.
- A hang is the absence of progress of *any* worker. `progress.py` decides what progress is, from
  looks at the workers. When the timeout could have passed, the gang asks (`LookForProgress`) and
  sets its next deadline from the answer.
- Which rank keeps others waiting in a collective, `core/ledger` finds out from the ranks' call
  records. Such a worker counts as failed, however it ends or has ended: before the stop is ordered,
  all show where they stand, as after a hang.
- Ctrl-Z stops the workers and their agent. No deadline counts the time of the suspension.
- A worker that fails since its peer is gone is not the cause, but the kernel may tell of the peer's
  death later: only when it has taken its connections down, and written its core. So the stop is not
  ordered until another one has failed by itself, or `verdict_timeout` has passed. At once, and then
  again, the gang asks whose cores are being written (`LookForDumps`), and waits for these for up to
  `dump_timeout`.
- If the guardian is lost, so are its workers: the gang ends at once, and none can follow. A fact
  from before stays true: a gang whose workers had all ended well has succeeded.
"""

from rankwise.base.errors import LocalProtocolError
from rankwise.base.failure import TIME_LIMIT_SIGNAL, Failure, Outcome, OutcomeStatus
from rankwise.base.machine import Ticked
from rankwise.base.units import Duration, Instant, after, between, format_duration, postponed
from rankwise.core.gang.failures import StopOrders, failures_of
from rankwise.core.gang.state import GangPhase, RecallState, WorkerLife
from rankwise.core.gang.vocabulary import (
    AnnounceKill,
    AnnounceStuck,
    DumpsLooked,
    DumpStacks,
    Effect,
    Finish,
    GangSpec,
    GuardianLost,
    LookForDumps,
    LookForProgress,
    Pause,
    ProgressLooked,
    RanksBlamed,
    RecallRequested,
    RecoveryMessage,
    RecoveryMessageSent,
    RecoveryOrder,
    Resumed,
    SignalWorker,
    SpawnWorker,
    StacksDumped,
    Started,
    Stimulus,
    StopRequested,
    Suspended,
    Sweep,
    Swept,
    TellWorker,
    WorkerExited,
    WorkerRefused,
    WorkerReported,
    WorkerSpawned,
)
from rankwise.core.gang.workers import GangWorkers

SIGTERM = 15
SIGKILL = 9


class Gang:
    """One gang from start to outcome. See the module's text for its life.

    Args:
        spec: what the gang is.
        attempt: its number among the gangs that follow each other on one process host, so that
            facts about the last gang do not touch the next.
    """

    def __init__(self, spec: GangSpec, attempt: int = 0) -> None:
        self.spec = spec
        self.phase = GangPhase.IDLE
        self.attempt = attempt
        self.outcome: Outcome | None = None
        self.recovers = False
        """Whether another attempt may follow, for which workers are worth keeping."""
        self._workers = GangWorkers(spec.size)
        self._deadline: Instant | None = None
        self._start_due = Instant(0)
        self._exits_due: Instant | None = None
        """When the next worker that has told of its exception must have ended."""
        self._stop_due: Instant | None = None
        """When siblings of a failure are told to stop, if they may go on for a while."""
        self._exceptions_due: Instant | None = None
        """When exceptions that are held back are released."""
        self._verdict_due: Instant | None = None
        """When the gang asks whose cores are being written, before it blames a lost peer."""
        self._dumps_due: Instant | None = None
        """Until when dying workers are awaited for the verdict, at the latest."""
        self._is_stuck_killed = False
        self._is_pause_reported = False
        self._is_recall_due = False
        self._resumed: Resumed | None = None
        self._stop_ordered_at: Instant | None = None
        self._kill_ordered_at: Instant | None = None
        self._stop: StopRequested | None = None
        self._stop_came_first = False
        self._is_stopped_by_request = False
        """Whether a request to stop ended the attempt, perhaps after a failure that was judged."""

    @property
    def next_deadline(self) -> Instant | None:
        """When `tick` wants to be called next; None while only stimuli can change anything."""
        due: tuple[Instant | None, ...] = ()
        if self._is_under_way:
            due = (self._exits_due, self._stop_due, self._exceptions_due, self._verdict_due)
        # The deadlines of failures count only while the gang is under way: an end has its own.
        return min((at for at in (self._deadline, *due) if at is not None), default=None)

    @property
    def workers(self) -> tuple[WorkerLife, ...]:
        """What is known of each worker, by local rank."""
        return tuple(self._workers)

    def is_last(self, local_rank: int) -> bool:
        """Whether all other workers have ended."""
        return self._workers.have_ended_but(local_rank)

    @property
    def failures_so_far(self) -> tuple[Failure, ...]:
        """The failures as far as they are known, the likely root first."""
        return self._failures()

    def handle(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        """Take in a fact; return what is to be done, in this order."""
        if self.phase is GangPhase.IDLE or isinstance(stimulus, Started):
            return self._begin(stimulus, now)
        match stimulus:
            case WorkerSpawned():
                return self._on_spawned(stimulus, now)
            case WorkerRefused():
                return self._on_refused(stimulus, now)
            case WorkerReported():
                return self._on_reported(stimulus, now)
            case WorkerExited():
                return self._on_exited(stimulus, now)
            case RecoveryMessageSent():
                return self._on_recovery_message(stimulus, now)
            case RecallRequested():
                return self._on_recall_requested(now)
            case Resumed():
                return self._on_resumed(stimulus, now)
            case Swept():
                return self._on_swept(stimulus, now)
            case StopRequested():
                return self._on_stop_requested(stimulus, now)
            case ProgressLooked():
                return self._on_progress_looked(stimulus, now)
            case DumpsLooked():
                return self._on_dumps_looked(stimulus, now)
            case RanksBlamed():
                return self._on_ranks_blamed(stimulus, now)
            case StacksDumped():
                return self._on_stacks_dumped(stimulus, now)
            case Suspended():
                return self._on_suspended(stimulus)
            case GuardianLost():
                return self._on_guardian_lost(stimulus, now)
            case Ticked():
                return self.tick(now)

    def tick(self, now: Instant) -> list[Effect]:
        """Let a deadline that has passed take effect. Calling it too early changes nothing."""
        if self._stop_due is not None and self._is_under_way and now >= self._stop_due:
            return self._begin_stopping(now)
        if self._exits_due is not None and self._is_under_way and now >= self._exits_due:
            return self._check_exit_deadlines(now)
        if self._exceptions_due is not None and self._is_under_way and now >= self._exceptions_due:
            return self._release_exceptions()
        if self._verdict_due is not None and self._is_under_way and now >= self._verdict_due:
            self._verdict_due = None
            return [LookForDumps(self.attempt)]
        if self._deadline is None or now < self._deadline:
            return []
        self._deadline = None
        match self.phase:
            case GangPhase.STARTING if now < self._start_due:
                # The start's own limit counts while the answer is out: a node that is too busy
                # to answer is too busy to start ranks.
                self._deadline = self._start_due
                return [LookForProgress(self.attempt)]
            case GangPhase.STARTING:
                return self._give_up_late_start(now)
            case GangPhase.RUNNING:
                return [LookForProgress(self.attempt)]
            case GangPhase.DUMPING:
                return self._begin_stopping(now)
            case GangPhase.RECALLING:
                return self._kill_stuck(now)
            case GangPhase.CLEARING:
                return self._begin_stopping(now)
            case GangPhase.STOPPING:
                return self._begin_killing(now)
            case GangPhase.KILLING:
                return self._give_up_killing(now)
            case GangPhase.SWEEPING:
                return self._give_up_sweeping()
            case GangPhase.IDLE | GangPhase.PAUSED | GangPhase.FINISHED:
                raise AssertionError(f"a gang that is {self.phase} has no deadline")

    def _begin(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        if self.phase is not GangPhase.IDLE or not isinstance(stimulus, Started):
            what = type(stimulus).__name__
            raise LocalProtocolError(
                f"{what} came while the gang was {self.phase}; a gang begins with Started, once"
            )
        self.phase = GangPhase.STARTING
        self._begin_starting(now)
        return [SpawnWorker(worker.local_rank, self.attempt) for worker in self._workers]

    def _begin_starting(self, now: Instant) -> None:
        self._start_due = after(now, self.spec.spawn_timeout)
        self._look_by(now)

    def _look_by(self, last_progress: Instant) -> None:
        """While workers are started: look again when their start could have hung."""
        hang_timeout = self.spec.hang_timeout
        hung_at = self._start_due if hang_timeout is None else after(last_progress, hang_timeout)
        self._deadline = min(self._start_due, hung_at)

    def _worker_of(
        self,
        stimulus: WorkerSpawned
        | WorkerRefused
        | WorkerReported
        | WorkerExited
        | RecoveryMessageSent,
    ) -> WorkerLife | None:
        """The worker that is meant, or None when its life is over already."""
        if stimulus.attempt != self.attempt or self.phase is GangPhase.FINISHED:
            return None
        worker = self._workers.lives[stimulus.local_rank]
        return None if worker.has_ended else worker

    def _on_spawned(self, stimulus: WorkerSpawned, now: Instant) -> list[Effect]:
        if self.phase is GangPhase.FINISHED:
            return []
        worker = self._worker_of(stimulus)
        if worker is None:
            # It came up after it was given up, or is of an earlier attempt: the next may need its
            # port.
            return [SignalWorker(stimulus.local_rank, stimulus.attempt, SIGKILL)]
        worker.pid = stimulus.pid
        match self.phase:
            case GangPhase.STARTING:
                return self._run_if_complete(now)
            case GangPhase.STOPPING:
                # The order to stop was given before there was a process to give it to.
                return [self._signal(worker, self._stop_signal)]
            case GangPhase.KILLING:
                return [self._signal(worker, SIGKILL)]
            case _:
                return []

    def _run_if_complete(self, now: Instant) -> list[Effect]:
        if not self._workers.are_made:
            return []
        self.phase = GangPhase.RUNNING
        hang_timeout = self.spec.hang_timeout
        self._deadline = None if hang_timeout is None else after(now, hang_timeout)
        # Either waited for the others to exist.
        if self._is_recall_due or self._workers.has_failure:
            return self._end_attempt(now)
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
        """Whether nothing has ended the gang yet."""
        return self.phase in (GangPhase.STARTING, GangPhase.RUNNING)

    def _on_reported(self, stimulus: WorkerReported, now: Instant) -> list[Effect]:
        worker = self._worker_of(stimulus)
        # A process can report once for itself and again for a child that inherited the pipe:
        # the first exception is the one that it dies of.
        if worker is not None and worker.error is None:
            worker.error = stimulus.error
            # A thread of its own may keep a process that has raised: only its exit, or this limit,
            # ends the gang.
            worker.must_end_by = after(now, self.spec.exit_timeout)
            self._exits_due = self._exits_due or worker.must_end_by
        return []

    def _check_exit_deadlines(self, now: Instant) -> list[Effect]:
        """End the gang if a worker should have ended by now; else look again at the next one."""
        self._exits_due = self._workers.note_survivors(now)
        if any(worker.has_lingered for worker in self._workers):
            return self._begin_stopping(now)
        return []

    def _on_exited(self, stimulus: WorkerExited, now: Instant) -> list[Effect]:
        worker = self._worker_of(stimulus)
        if worker is None:
            return []
        worker.exit = stimulus.exit
        worker.ended_at = stimulus.at
        if stimulus.was_killed_by_us:
            worker.signals_sent.append(SIGKILL)
        if self._is_stopped_by_request and stimulus.exit.signal_number == self._stop_signal:
            # The signal went to the whole run, and news of this exit took longer than the request:
            # it belongs to the stop, as one does that is held back for it (`core/watch`).
            assert self._stop_ordered_at is not None, "ordered with the request"
            worker.ended_at = max(worker.ended_at, after(self._stop_ordered_at, Duration(1)))
        return self._after_an_end(worker, now)

    def _after_an_end(self, worker: WorkerLife, now: Instant) -> list[Effect]:
        if self._is_under_way and worker.has_failed:
            if self.spec.stop_delay and not self._workers.have_ended:
                # The first failure counts: a later one must not give the others more time.
                self._stop_due = self._stop_due or after(now, self.spec.stop_delay)
            elif self._awaits_cause:
                return self._await_cause(now)
            else:
                # A program that cannot be started will not start in a recovery either: no worker is
                # kept for it.
                never_started = worker.refusal is not None
                return self._begin_stopping(now) if never_started else self._end_attempt(now)
        match self.phase:
            case GangPhase.STARTING:
                return []
            case GangPhase.RECALLING:
                return self._clear_if_all_yielded(now)
            case GangPhase.CLEARING | GangPhase.PAUSED:
                # Another worker died while the sweep was out, which spared it: sweep once more,
                # without it.
                return self._begin_clearing(now)
            case _:
                return self._sweep_if_all_ended(now)

    @property
    def _awaits_cause(self) -> bool:
        """Whether all that have failed say that a peer is gone, and others may be dying."""
        failed = [worker for worker in self._workers if worker.has_failed]
        # No peer waits for the last one, and a gang that starts has no peers yet.
        may_come = self.phase is GangPhase.RUNNING and bool(self._workers.running)
        return may_come and all(worker.says_peer_is_gone for worker in failed)

    def _await_cause(self, now: Instant) -> list[Effect]:
        if self._dumps_due is not None:
            return []
        self._verdict_due = after(now, min(self.spec.verdict_timeout, self.spec.dump_timeout))
        self._dumps_due = after(now, self.spec.dump_timeout)
        # Now, too: a worker that is dying already is the cause; a later abort may be a consequence.
        return [LookForDumps(self.attempt)]

    def _on_dumps_looked(self, looked: DumpsLooked, now: Instant) -> list[Effect]:
        if looked.attempt != self.attempt or self.phase is GangPhase.FINISHED:
            return []
        for local_rank in looked.dumping:
            self._workers.lives[local_rank].dumps_core = True
        if self._dumps_due is None or self._verdict_due is not None or not self._awaits_cause:
            return []
        if any(worker.dumps_core for worker in self._workers.running) and now < self._dumps_due:
            # The kernel tells of a death when the core is written, which takes seconds: wait for
            # that.
            self._verdict_due = self._dumps_due
            return []
        return self._end_attempt(now)

    # Recovery

    def _on_recovery_message(self, said: RecoveryMessageSent, now: Instant) -> list[Effect]:
        worker = self._worker_of(said)
        if worker is None:
            return []
        match said.word:
            case RecoveryMessage.OFFERS if self._is_under_way:
                worker.recall_state = RecallState.OFFERED
                worker.recall_timeout = said.recall_timeout
            case RecoveryMessage.WITHDRAWS:
                return self._on_withdrawn(worker)
            # One that is recalled leaves its function by an exception, too: that is what was asked
            # of it.
            case RecoveryMessage.EXCEPTION_HELD if worker.recall_state is not RecallState.RECALLED:
                return self._on_exception_held(worker, now)
            case RecoveryMessage.YIELDED if worker.recall_state is RecallState.RECALLED:
                worker.recall_state = RecallState.YIELDED
                if self.phase is GangPhase.RECALLING:
                    return self._clear_if_all_yielded(now)
            case _:
                pass
        return []

    def _on_withdrawn(self, worker: WorkerLife) -> list[Effect]:
        """Its function has returned. If it was recalled meanwhile, it is late, and begins anew."""
        was_recalled = worker.recall_state is RecallState.RECALLED
        worker.recall_state = RecallState.BOUND
        is_late = was_recalled and self.phase is GangPhase.RECALLING
        return [self._signal(worker, SIGKILL)] if is_late else []

    def _on_exception_held(self, worker: WorkerLife, now: Instant) -> list[Effect]:
        if not self._is_under_way or not self.recovers:
            worker.recall_state = RecallState.BOUND
            return [TellWorker(worker.local_rank, self.attempt, RecoveryOrder.RELEASE)]
        worker.recall_state = RecallState.EXCEPTION_HELD
        # Its cause may be a death that is not known yet: the worker is kept until then.
        self._exceptions_due = self._exceptions_due or after(now, self.spec.exception_timeout)
        return []

    def _release_exceptions(self) -> list[Effect]:
        """No death explains the exceptions that workers hold: they are what has gone wrong."""
        self._exceptions_due = None
        held = [each for each in self._workers if each.recall_state is RecallState.EXCEPTION_HELD]
        for worker in held:
            worker.recall_state = RecallState.BOUND
        return [
            TellWorker(worker.local_rank, self.attempt, RecoveryOrder.RELEASE)
            for worker in held
            if worker.is_running
        ]

    def _end_attempt(self, now: Instant) -> list[Effect]:
        """The attempt is over: recall those that can be called again, or stop all."""
        recallable = self._workers.recallable
        if not self.recovers or not recallable:
            return self._begin_stopping(now)
        if self.phase is GangPhase.STARTING:
            return []  # until all of them exist, so that none comes up in the middle of a sweep
        self.phase = GangPhase.RECALLING
        self._exceptions_due = None
        self._stop_ordered_at = now
        self._deadline = after(now, max(worker.recall_timeout for worker in recallable))
        effects: list[Effect] = []
        for worker in recallable:
            worker.recall_state = RecallState.RECALLED
            # Told by a word and not a signal: its function is left by an exception, with its state
            # intact.
            effects.append(TellWorker(worker.local_rank, self.attempt, RecoveryOrder.RECALL))
        effects += [
            self._signal(worker, SIGTERM)
            for worker in self._workers.running
            if worker.recall_state is RecallState.BOUND
        ]
        return effects

    def _on_recall_requested(self, now: Instant) -> list[Effect]:
        is_recalled = self.phase in (GangPhase.RECALLING, GangPhase.CLEARING, GangPhase.PAUSED)
        if is_recalled or self._stop is not None:
            return []  # since a worker of our own has failed, or since it was told to end
        if not (self._is_under_way and self.recovers and self._workers.recallable):
            return self._on_stop_requested(StopRequested(SIGTERM), now)
        # The request, not a worker, ends the attempt: what workers do after it is no failure of
        # theirs.
        self._is_recall_due, self._stop_came_first = True, self._dumps_due is None
        return self._end_attempt(now)

    def _clear_if_all_yielded(self, now: Instant) -> list[Effect]:
        if self._workers.in_functions:
            return []
        # No worker is left that could be called again: then this is an end like any other.
        return self._begin_clearing(now) if self._workers.running else self._begin_sweep(now)

    def _kill_stuck(self, now: Instant) -> list[Effect]:
        """Kill who has not left its function in time; whom not even that ends, ends the gang."""
        if self._is_stuck_killed:
            return self._begin_killing(now)
        self._is_stuck_killed = True
        self._deadline = after(now, self.spec.sweep_timeout)
        stuck = self._workers.in_functions
        # A rank in C code does not see the recall. It would keep all others from going on.
        doomed = tuple(worker.local_rank for worker in stuck)
        return [
            AnnounceStuck(self.attempt, doomed),
            *(self._signal(worker, SIGKILL) for worker in stuck),
        ]

    def _begin_clearing(self, now: Instant) -> list[Effect]:
        self.phase = GangPhase.CLEARING
        self._deadline = after(now, self.spec.sweep_timeout)
        return [Sweep(self.attempt, self._workers.kept)]

    def _pause(self, now: Instant) -> list[Effect]:
        self.phase = GangPhase.PAUSED
        self._deadline = None
        if self._resumed is not None:
            # The next round was settled while the dead were swept: the pause need not be announced.
            return self._go_on(self._resumed, now)
        if self._is_pause_reported:
            return []
        self._is_pause_reported = True
        return [Pause(self._new_outcome(), self._workers.kept)]

    def _on_resumed(self, resumed: Resumed, now: Instant) -> list[Effect]:
        if self.phase is GangPhase.PAUSED:
            return self._go_on(resumed, now)
        if self.phase is GangPhase.CLEARING:
            self._resumed = resumed
        return []

    def _go_on(self, resumed: Resumed, now: Instant) -> list[Effect]:
        """Begin another attempt with those that are left, and new workers in the other places."""
        self.attempt, self.recovers = resumed.attempt, resumed.recovers
        self.phase = GangPhase.STARTING
        self._begin_starting(now)
        self._exits_due = self._stop_due = self._stop_ordered_at = self._resumed = None
        self._verdict_due = self._dumps_due = None
        self._is_stuck_killed = self._is_pause_reported = False
        self._is_recall_due = self._stop_came_first = self._is_stopped_by_request = False
        # A new attempt's facts carry its number: facts about the last one change nothing from here
        # on.
        kept = self._workers.renew()
        return [
            *(TellWorker(local_rank, self.attempt, RecoveryOrder.AGAIN) for local_rank in kept),
            *(
                SpawnWorker(worker.local_rank, self.attempt)
                for worker in self._workers
                if worker.pid is None
            ),
            *self._run_if_complete(now),  # if none is to be made
        ]

    # The end

    def _sweep_if_all_ended(self, now: Instant) -> list[Effect]:
        if self._workers.have_ended:
            return self._begin_sweep(now)
        is_ending = (
            self.phase in (GangPhase.STOPPING, GangPhase.KILLING) and not self._workers.are_made
        )
        return self._call_off(now) if is_ending and self._is_stopped_before_spawn else []

    def _begin_sweep(self, now: Instant) -> list[Effect]:
        self.phase = GangPhase.SWEEPING
        self._deadline = after(now, self.spec.sweep_timeout)
        return [Sweep(self.attempt)]

    @property
    def _stop_signal(self) -> int:
        asked_by = None if self._stop is None else self._stop.signal
        # Workers get the signal that the user sent, so that Ctrl-C is a KeyboardInterrupt. A time
        # limit is no signal.
        return SIGTERM if asked_by in (None, TIME_LIMIT_SIGNAL) else asked_by

    def _begin_stopping(self, now: Instant) -> list[Effect]:
        if self._stop_ordered_at is None:
            self._stop_ordered_at = now
        if self._is_stopped_before_spawn:
            return self._call_off(now)
        if self.spec.grace == 0:
            return self._begin_killing(now)
        self.phase = GangPhase.STOPPING
        self._deadline = after(now, self.spec.grace)
        return self._signal_all(self._stop_signal) or self._sweep_if_all_ended(now)

    @property
    def _is_stopped_before_spawn(self) -> bool:
        """Whether a stop was requested while no worker has a process."""
        return self._stop is not None and not self._workers.running

    def _call_off(self, now: Instant) -> list[Effect]:
        """Wait for no worker that does not exist yet; the sweep takes back the orders for them."""
        # A fork server that imports may take minutes, and makes no process once the sweep has
        # reached it.
        self._workers.give_up_unmade("the gang was stopped before it had started", now)
        return self._begin_sweep(now)

    def _begin_killing(self, now: Instant, *, asked_again: bool = False) -> list[Effect]:
        if self._stop_ordered_at is None:
            self._stop_ordered_at = now
        if self._is_stopped_before_spawn:
            return self._call_off(now)
        self.phase = GangPhase.KILLING
        self._kill_ordered_at = now
        self._deadline = after(now, self.spec.sweep_timeout)
        orders = self._signal_all(SIGKILL)
        if not orders:
            return self._sweep_if_all_ended(now)
        doomed = self._workers.kept
        return [AnnounceKill(self.attempt, doomed, asked_again), *orders]

    def _signal_all(self, signal: int) -> list[Effect]:
        """Signal all that live; those outside of their functions can save nothing: kill them."""
        outside = (RecallState.EXCEPTION_HELD, RecallState.RECALLED, RecallState.YIELDED)
        return [
            self._signal(worker, SIGKILL if worker.recall_state in outside else signal)
            for worker in self._workers.running
        ]

    def _signal(self, worker: WorkerLife, signal: int) -> SignalWorker:
        worker.signals_sent.append(signal)
        return SignalWorker(worker.local_rank, self.attempt, signal)

    def _give_up_late_start(self, now: Instant) -> list[Effect]:
        patience = format_duration(self.spec.spawn_timeout)
        return self._give_up_starting(f"it did not start within {patience}", now)

    def _give_up_starting(self, why: str, now: Instant) -> list[Effect]:
        self._workers.give_up_unmade(why, now)
        return self._begin_stopping(now)

    def _give_up_killing(self, now: Instant) -> list[Effect]:
        for worker in self._workers.running:
            # It is stuck in the kernel, on a dead disk or GPU. Nothing may wait for ever for it,
            # and no other gang may begin while it may live.
            worker.outlived_kill = True
            worker.ended_at = now
        self._workers.give_up_unmade("it was asked to stop before it had started", now)
        return self._begin_sweep(now)

    def _on_swept(self, stimulus: Swept, now: Instant) -> list[Effect]:
        if stimulus.attempt != self.attempt:
            return []
        if self.phase is GangPhase.CLEARING:
            if stimulus.spares != self._workers.kept:
                return []  # of an earlier sweep: another worker has died since
            return self._begin_stopping(now) if stimulus.survivors else self._pause(now)
        if self.phase is not GangPhase.SWEEPING or stimulus.spares:
            return []
        if stimulus.survivors:
            # A process that lives could hold the port or the device of the next gang: none may
            # follow.
            pids = ", ".join(str(pid) for pid in stimulus.survivors)
            obstacle = f"SIGKILL does not end processes that ranks left behind (pids {pids})"
            return self._finish(stimulus.survivors, f"not restarted: {obstacle}")
        return self._finish()

    def _give_up_sweeping(self) -> list[Effect]:
        known = tuple(
            worker.pid
            for worker in self._workers
            if worker.outlived_kill and worker.pid is not None
        )
        patience = format_duration(self.spec.sweep_timeout)
        return self._finish(
            known,
            f"not restarted: processes that ranks left behind were not killed within {patience}",
        )

    @property
    def _status(self) -> OutcomeStatus:
        if self._stop_came_first and not self._had_succeeded_before_stop:
            return OutcomeStatus.STOPPED
        # The first fact counts: a stop never turns an earlier failure into a stop.
        return OutcomeStatus.FAILED if self._workers.has_failure else OutcomeStatus.SUCCEEDED

    @property
    def _had_succeeded_before_stop(self) -> bool:
        """True if all workers had ended well when a stop was ordered, though it was read later."""
        ordered_at = self._stop_ordered_at
        return ordered_at is not None and self._workers.have_succeeded_by(ordered_at)

    def _finish(self, survivors: tuple[int, ...] = (), obstacle: str = "") -> list[Effect]:
        """End the gang's life; the `obstacle` is why none can follow a failed one."""
        self.phase = GangPhase.FINISHED
        self._deadline = None
        self.outcome = self._new_outcome(survivors, obstacle)
        return [Finish(self.outcome)]

    def _new_outcome(self, survivors: tuple[int, ...] = (), obstacle: str = "") -> Outcome:
        status = self._status
        return Outcome(
            status=status,
            attempts=1,
            failures=self._failures(),
            stop_signal=None if self._stop is None else self._stop.signal,
            survivors=survivors,
            detail=obstacle if status is OutcomeStatus.FAILED else "",
        )

    def _on_stop_requested(self, stimulus: StopRequested, now: Instant) -> list[Effect]:
        is_first = self._stop is None
        if is_first:
            self._stop = stimulus
        match self.phase:
            case GangPhase.FINISHED | GangPhase.SWEEPING | GangPhase.KILLING | GangPhase.IDLE:
                return []
            case GangPhase.STARTING | GangPhase.RUNNING | GangPhase.DUMPING:
                is_first_fact = self.phase is not GangPhase.DUMPING and self._dumps_due is None
                self._stop_came_first, self._is_stopped_by_request = is_first_fact, True
                return self._begin_stopping(now)
            case GangPhase.RECALLING | GangPhase.CLEARING | GangPhase.PAUSED:
                return self._begin_stopping(now)
            case GangPhase.STOPPING:
                return [] if is_first else self._begin_killing(now, asked_again=True)

    def _on_progress_looked(self, stimulus: ProgressLooked, now: Instant) -> list[Effect]:
        hang_timeout = self.spec.hang_timeout
        if self.phase is GangPhase.STARTING and stimulus.attempt == self.attempt:
            return self._on_start_looked(stimulus, now)
        if self.phase is not GangPhase.RUNNING or stimulus.attempt != self.attempt:
            return []
        assert hang_timeout is not None, "progress is only looked for when there is a hang timeout"
        if between(stimulus.last_progress, now) < hang_timeout:
            # The patience counts from the last progress, not from this look: so a hang is found in
            # time.
            self._deadline = after(stimulus.last_progress, hang_timeout)
            return []
        for worker in self._workers.running:
            # All of them have hung: which of them began it in a collective, progress alone does not
            # show.
            worker.hung_at = now
            if worker.local_rank in stimulus.awaited:
                worker.accused = stimulus.accused
        return self._begin_dumping(now)

    def _on_start_looked(self, looked: ProgressLooked, now: Instant) -> list[Effect]:
        hang_timeout = self.spec.hang_timeout
        assert hang_timeout is not None, "progress is only looked for when there is a hang timeout"
        if now >= self._start_due:
            # The answer overtook the tick of the start's limit: the limit decides all the same.
            return self._give_up_late_start(now)
        if between(looked.last_progress, now) >= hang_timeout:
            patience = format_duration(hang_timeout)
            return self._give_up_starting(f"its start made no progress for {patience}", now)
        self._look_by(looked.last_progress)
        return []

    def _on_ranks_blamed(self, stimulus: RanksBlamed, now: Instant) -> list[Effect]:
        if stimulus.attempt != self.attempt:
            return []
        if self.phase not in (GangPhase.RUNNING, GangPhase.SWEEPING):
            return []
        for local_rank in stimulus.local_ranks:
            worker = self._workers.lives[local_rank]
            worker.blame, worker.blamed_at = stimulus.reason, now
            worker.accused, worker.mismatch = stimulus.accused, stimulus.mismatch
        # A worker that was done too early may have been swept when ranks of another node miss it.
        return self._begin_dumping(now) if self.phase is GangPhase.RUNNING else []

    def _begin_dumping(self, now: Instant) -> list[Effect]:
        self.phase = GangPhase.DUMPING
        self._deadline = after(now, self.spec.stacks_timeout)
        return [DumpStacks(self.attempt)]

    def _on_stacks_dumped(self, stimulus: StacksDumped, now: Instant) -> list[Effect]:
        if self.phase is not GangPhase.DUMPING or stimulus.attempt != self.attempt:
            return []
        return self._begin_stopping(now)

    def _on_suspended(self, stimulus: Suspended) -> list[Effect]:
        stood = stimulus.duration
        self._deadline = postponed(self._deadline, stood)
        self._start_due = after(self._start_due, stood)
        self._exits_due = postponed(self._exits_due, stood)
        self._stop_due = postponed(self._stop_due, stood)
        self._exceptions_due = postponed(self._exceptions_due, stood)
        self._verdict_due = postponed(self._verdict_due, stood)
        self._dumps_due = postponed(self._dumps_due, stood)
        self._workers.postpone(stood)
        return []

    def _on_guardian_lost(self, stimulus: GuardianLost, now: Instant) -> list[Effect]:
        if self.phase is GangPhase.FINISHED:
            return []
        for worker in self._workers:
            if not worker.has_ended:
                worker.lost = stimulus.reason
                worker.ended_at = now
        # Its workers died with the guardian (their parent-death signal), so there is nothing to
        # sweep.
        return self._finish(obstacle=f"not restarted: {stimulus.reason}")

    def _failures(self) -> tuple[Failure, ...]:
        orders = StopOrders(self._stop_ordered_at, self._kill_ordered_at)
        return failures_of(self._workers, self.spec, self.attempt, orders)
