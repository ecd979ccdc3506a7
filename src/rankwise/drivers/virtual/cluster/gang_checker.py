"""What must be true of every node that is alone, checked after every step of its agent.

The checker sits where the journal sits, so it gets every stimulus and effect, and it may look at
the truth about the processes, which the machine cannot. It keeps records of its own and shares no
code with the machine: what it demands follows from the promises in the machine's text.

- All or nothing: once a failure, a stop or a hang is known, every worker is told to stop.
- Deadlines: killed when the grace is over, given up and swept when the killing took too long,
  finished when the sweep took too long. No process is signalled without a reason, nor killed early.
- One attempt at a time: none begins while a process of an earlier one lives, or may.
- Budget: restarts are used, announced, after their pause, no more than there are, and not for
  what could not be started, unless the policy says so.
- Facts are held back only behind an exit by SIGTERM in a gang that has no reason to end: for a
  moment, or until a stop that was asked for ends the gang.
- The outcome comes once and is true: its root cause is the worker that failed first, or the violent
  death that may have caused that; every process that lives on is named there; nothing comes after
  it.
"""

from dataclasses import dataclass, field
from typing import Any, NoReturn

from rankwise.base.errors import SimulationError
from rankwise.base.failure import Failure, FailureCause, Outcome, OutcomeStatus
from rankwise.base.root_cause import names_lost_connection
from rankwise.base.units import MILLISECOND, Duration, Instant, after, between
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.vocabulary import AnnounceRestart, FinishRun
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import (
    DumpsLooked,
    DumpStacks,
    GuardianLost,
    LookForDumps,
    LookForProgress,
    ProgressLooked,
    RanksBlamed,
    SignalWorker,
    SpawnWorker,
    StacksDumped,
    StopRequested,
    Sweep,
    Swept,
    WorkerExited,
    WorkerRefused,
    WorkerReported,
    WorkerSpawned,
)
from rankwise.core.watch.vocabulary import HoldReason, NoteHold
from rankwise.drivers.virtual.cluster.host import SIGKILL, SIGTERM, SimulatedHost
from rankwise.drivers.virtual.cluster.root_cause_truth import root_cause_is_true
from rankwise.drivers.virtual.invariants import InvariantBroken
from rankwise.ports.journal import Journal

FAR_AWAY = Instant(1 << 62)
STOP_NOTICE = Duration(300 * MILLISECOND)
"""How long an exit by SIGTERM may be held back, unless a stop was asked for."""
FACTS = (
    WorkerSpawned,
    WorkerRefused,
    WorkerReported,
    WorkerExited,
    Swept,
    ProgressLooked,
    DumpsLooked,
    RanksBlamed,
    StacksDumped,
    GuardianLost,
)
"""What an exit that is held back holds up."""


def just_before(now: Instant) -> Instant:
    """The latest deadline that must have been met: one of this very instant may still be."""
    return Instant(now - 1)


@dataclass(slots=True)
class AttemptRecords:
    """What the checker has seen of one attempt."""

    begun_at: Instant
    spawned: set[int] = field(default_factory=set)
    started: set[int] = field(default_factory=set)
    untold: set[int] = field(default_factory=set)
    unkilled: set[int] = field(default_factory=set)
    living: set[int] = field(default_factory=set)
    started_too_late: set[int] = field(default_factory=set)
    """Came up after they had been given up."""
    refused_at: dict[int, Instant] = field(default_factory=dict)
    exit_codes: dict[int, int] = field(default_factory=dict)
    reported_at: dict[int, Instant] = field(default_factory=dict)
    lost_peers: set[int] = field(default_factory=set)
    """Have told of an exception that says that a peer is gone."""
    failed: set[int] = field(default_factory=set)
    cause_due: Instant | None = None
    """Until when the death is awaited that explains what the lost peers of others have done."""
    has_asked_who_dies: bool = False
    """Whether it has asked when it began to wait."""
    asks_who_dies: bool = False
    """Whether it has asked again then; it ends when that is answered."""
    failed_at: Instant | None = None
    """When the first failure arrived."""
    start_has_hung: bool = False
    """Whether nothing had made progress for too long before all had come up."""
    is_blamed: bool = False
    """Whether one of its workers was blamed."""
    dump_ordered_at: Instant | None = None
    ending_since: Instant | None = None
    """When it became known that the attempt must end."""
    ended_by_stop: bool = False
    """Whether that was a request to stop."""
    kill_allowed_at: Instant | None = None
    sweep_ordered_at: Instant | None = None
    swept: Swept | None = None


class GangChecker:
    """Watches one agent and its gangs.

    Raises:
        InvariantBroken: as soon as something is wrong.
    """

    def __init__(self, agent: Agent, host: SimulatedHost) -> None:
        self._spec = agent.spec.gang
        self._policy = agent.spec.rendezvous.policy
        self._agent = agent
        self._host = host
        self._attempts: list[AttemptRecords] = []
        self._stops_received = 0
        self._stopped_at: Instant | None = None
        self._guardian_lost = False
        self._restart: tuple[Instant, int] | None = None
        self._restarts_announced = 0
        self._asked_for_progress_at = Instant(0)
        self._outcome: Outcome | None = None
        self._held: list[Any] = []
        """Facts that the gang gets later."""
        self._held_until = FAR_AWAY
        self._released: tuple[Instant, set[int]] = Instant(0), set()
        """Ranks whose exits were held back until an instant: the gang gets one after the other."""

    def stimulus(self, stimulus: Any, now: Instant) -> None:
        """Note what the agent is about to be told."""
        if isinstance(stimulus, FACTS) and self._is_held(stimulus, now):
            self._held.append(stimulus)
            return
        if isinstance(stimulus, StopRequested) and self._held:
            self._held_until = after(now, self._spec.grace)
        self._note_fact(stimulus, now)

    def _is_held(self, fact: Any, now: Instant) -> bool:
        """Whether the gang gets a fact later, since it may be a stop's doing."""
        if self._held:
            return True
        is_open = isinstance(fact, WorkerExited) and fact.exit.code in (-SIGTERM, 128 + SIGTERM)
        if is_open and self._gang_lives:
            patience = self._spec.grace if self._stops_received else STOP_NOTICE
            self._held_until = after(now, patience)
            return True
        return False

    @property
    def _gang_lives(self) -> bool:
        gang = self._agent.gang
        return gang is not None and gang.phase in (GangPhase.STARTING, GangPhase.RUNNING)

    def _release(self, now: Instant) -> None:
        held, self._held, self._held_until = self._held, [], FAR_AWAY
        if not held:
            self._broken("a hold is noted, and no exit by SIGTERM was its reason")
        exits = {fact.local_rank for fact in held if isinstance(fact, WorkerExited)}
        self._released = now, exits
        for fact in held:
            self._note_fact(fact, now)

    def _note_fact(self, stimulus: Any, now: Instant) -> None:
        match stimulus:
            case WorkerSpawned(local_rank, attempt):
                self._note_start(self._attempts[attempt], local_rank, now)
            case WorkerRefused(local_rank, attempt):
                records = self._attempts[attempt]
                records.refused_at[local_rank] = now
                self._note_failure(records, now)
            case WorkerReported(local_rank, attempt, error):
                records = self._attempts[attempt]
                if local_rank not in records.reported_at and names_lost_connection(error):
                    records.lost_peers.add(local_rank)
                records.reported_at.setdefault(local_rank, now)
            case WorkerExited(local_rank, attempt, exit_status):
                self._note_exit(self._attempts[attempt], local_rank, exit_status.code, now)
            case Swept(attempt):
                self._attempts[attempt].swept = stimulus
            case StacksDumped(attempt):
                self._must_end(self._attempts[attempt], now)
            case ProgressLooked(attempt, last_progress):
                self._note_look(self._attempts[attempt], last_progress, now)
            case DumpsLooked(attempt):
                if self._attempts[attempt].asks_who_dies:
                    self._must_end(self._attempts[attempt], now)  # no core is written here
            case RanksBlamed(_, attempt) if attempt < len(self._attempts):
                self._attempts[attempt].is_blamed = True
            case StopRequested():
                self._note_stop(now)
            case GuardianLost():
                self._guardian_lost = True
            case _:
                pass

    def effect(self, effect: Any, now: Instant) -> None:
        """Judge an order of the agent."""
        if self._outcome is not None:
            self._broken(f"the agent is finished and still orders {effect}")
        match effect:
            case NoteHold(reason=HoldReason.STOP):
                self._release(now)
            case SpawnWorker(local_rank, attempt):
                self._judge_spawn(local_rank, attempt, now)
            case SignalWorker():
                self._judge_signal(effect, now)
            case LookForProgress():
                self._asked_for_progress_at = now
            case LookForDumps(attempt):
                self._judge_look_for_dumps(self._attempts[attempt], now)
            case DumpStacks(attempt):
                self._judge_dump(self._attempts[attempt], now)
            case Sweep(attempt):
                self._judge_sweep(self._attempts[attempt], now)
            case AnnounceRestart():
                self._judge_restart(effect, now)
            case FinishRun():
                self._judge_outcome(effect.as_outcome())
            case _:
                pass

    def after_step(self, now: Instant) -> None:
        """Judge what has not been done by now."""
        deadline = self._agent.next_deadline
        if deadline is not None and deadline < now:
            self._broken(f"the agent wants to be woken at {deadline}, which is over")
        if self._held and (now > self._held_until or not self._gang_lives):
            self._broken(f"{self._held[0]} is held back, and has no reason to be")
        if self._outcome is not None or not self._attempts:
            return
        records = self._attempts[-1]
        self._expect_spawns(records, now)
        if records.sweep_ordered_at is not None:
            if now > after(records.sweep_ordered_at, self._spec.sweep_timeout):
                self._expect_restart(now)
            return
        self._find_reasons_to_end(records, just_before(now))
        if records.ending_since is None:
            return
        if records.untold:
            self._broken(f"workers {sorted(records.untold)} were not told to stop: all or nothing")
        assert records.kill_allowed_at is not None, "set when the end began"
        if now > records.kill_allowed_at and records.unkilled:
            self._broken(
                f"the grace is over, and workers {sorted(records.unkilled)} are not killed"
            )
        if now > after(records.kill_allowed_at, self._spec.sweep_timeout):
            self._broken("workers were killed long ago, and are neither ended nor given up")

    def judge_end(self) -> None:
        """Nothing will ever happen again: the agent must have finished.

        Raises:
            SimulationError: it rightly waits for workers that never end.
        """
        if self._outcome is not None:
            return
        may_wait = bool(self._host.processes())
        if may_wait and self._attempts and self._attempts[-1].ending_since is None:
            raise SimulationError(
                "this world never ends: its workers run for ever, and its plan stops none",
                hint="give stop_after, or a hang timeout",
            )
        self._broken(f"nothing will ever happen again, and the agent is {self._agent.phase}")

    def _note_start(self, records: AttemptRecords, local_rank: int, now: Instant) -> None:
        self._find_reasons_to_end(records, just_before(now))
        if self._gave_up_starting(records) or records.sweep_ordered_at is not None:
            records.started_too_late.add(local_rank)
        for ranks in (records.started, records.living, records.untold, records.unkilled):
            ranks.add(local_rank)

    def _note_exit(self, records: AttemptRecords, local_rank: int, code: int, now: Instant) -> None:
        records.exit_codes[local_rank] = code
        for ranks in (records.living, records.untold, records.unkilled):
            ranks.discard(local_rank)
        if code != 0:
            records.failed.add(local_rank)
        if code != 0 and not self._awaits_cause(records, now):
            self._note_failure(records, now)

    def _awaits_cause(self, records: AttemptRecords, now: Instant) -> bool:
        """Whether all that have failed say that a peer is gone, so that its death is awaited."""
        is_open = (
            records.ending_since is None and records.dump_ordered_at is None and records.living
        )
        if (
            not is_open
            or len(records.started) < self._spec.size
            or records.failed - records.lost_peers
        ):
            return False
        records.failed_at = records.failed_at or now
        records.cause_due = records.cause_due or after(now, self._spec.verdict_timeout)
        return True

    def _judge_look_for_dumps(self, records: AttemptRecords, now: Instant) -> None:
        if records.cause_due is None:
            self._broken("the gang asks who is dying, and nothing has failed for a lost peer")
        elif not records.has_asked_who_dies:
            records.has_asked_who_dies = True
        elif now < records.cause_due:
            self._broken("the gang asks again who is dying before it has waited")
        else:
            records.asks_who_dies = True

    def _note_failure(self, records: AttemptRecords, now: Instant) -> None:
        if records.failed_at is None and records.sweep_ordered_at is None:
            records.failed_at = now
        if records.dump_ordered_at is None:
            self._must_end(records, now)

    def _note_stop(self, now: Instant) -> None:
        self._stops_received += 1
        if self._stopped_at is None:
            self._stopped_at = now
        if not self._attempts:
            return
        records = self._attempts[-1]
        was_ending = records.ending_since is not None
        records.ended_by_stop = records.ended_by_stop or not was_ending
        self._must_end(records, now)
        if self._stops_received > 1 and was_ending:
            records.kill_allowed_at = min(records.kill_allowed_at or now, now)

    def _must_end(self, records: AttemptRecords, now: Instant) -> None:
        if records.ending_since is None:
            records.ending_since = now
            records.kill_allowed_at = after(now, self._spec.grace)

    def _find_reasons_to_end(self, records: AttemptRecords, now: Instant) -> None:
        """The reasons which no stimulus tells: starting, dumping or exiting took too long."""
        if records.ending_since is not None:
            return
        starting_ends = self._starting_ends(records)
        if len(records.started) < self._spec.size and now >= starting_ends:
            self._must_end(records, starting_ends)
        elif records.dump_ordered_at is not None:
            dumping_ends = after(records.dump_ordered_at, self._spec.stacks_timeout)
            if now >= dumping_ends:
                self._must_end(records, dumping_ends)
        else:
            exits_due = min(
                (
                    after(records.reported_at[rank], self._spec.exit_timeout)
                    for rank in records.reported_at.keys() & records.living
                ),
                default=FAR_AWAY,
            )
            if now >= exits_due:
                self._must_end(records, exits_due)
            elif (
                records.cause_due is not None
                and now >= records.cause_due
                and not records.asks_who_dies
            ):
                self._must_end(records, records.cause_due)

    def _note_look(self, records: AttemptRecords, last_progress: Instant, now: Instant) -> None:
        hang_timeout = self._spec.hang_timeout
        assert hang_timeout is not None, "only a run with a hang timeout looks"
        is_starting = len(records.started) < self._spec.size and records.ending_since is None
        if is_starting and between(last_progress, now) >= hang_timeout:
            records.start_has_hung = True
            self._must_end(records, now)

    def _starting_ends(self, records: AttemptRecords) -> Instant:
        return after(records.begun_at, self._spec.spawn_timeout)

    def _gave_up_starting(self, records: AttemptRecords) -> bool:
        return records.start_has_hung or records.ending_since == self._starting_ends(records)

    def _expect_spawns(self, records: AttemptRecords, now: Instant) -> None:
        if len(records.spawned) < self._spec.size:
            self._broken(f"only workers {sorted(records.spawned)} of {self._spec.size} are started")
        if self._restart is not None and now > self._restart[0]:
            self._broken(f"attempt {self._restart[1]} should have begun at {self._restart[0]}")

    def _expect_restart(self, now: Instant) -> None:
        if self._restart is None or now > self._restart[0]:
            self._broken("the sweep took too long, and the gang goes on waiting for it")

    def _judge_spawn(self, local_rank: int, attempt: int, now: Instant) -> None:
        if attempt == len(self._attempts):
            self._judge_beginning(attempt, now)
            self._attempts.append(AttemptRecords(now))
        if attempt != len(self._attempts) - 1:
            self._broken(f"attempt {attempt} is begun out of turn")
        records = self._attempts[attempt]
        if local_rank in records.spawned:
            self._broken(f"worker {local_rank} is started twice in attempt {attempt}")
        if not 0 <= local_rank < self._spec.size:
            self._broken(f"worker {local_rank} is started in a gang of {self._spec.size}")
        records.spawned.add(local_rank)

    def _judge_beginning(self, attempt: int, now: Instant) -> None:
        if attempt == 0:
            return
        if self._restart != (now, attempt):
            self._broken(f"attempt {attempt} begins now, but {self._restart} was announced")
        self._restart = None
        swept = self._attempts[-1].swept
        if swept is None or swept.survivors:
            self._broken(f"attempt {attempt} begins, and the one before is not swept: {swept}")
        living = [process.pid for process in self._host.processes()]
        if living:
            self._broken(f"attempt {attempt} begins while processes {living} are alive")

    def _judge_signal(self, order: SignalWorker, now: Instant) -> None:
        records = self._attempts[order.attempt]
        rank = order.local_rank
        if rank not in records.started:
            self._broken(f"worker {rank} is signalled, and no process of it is known")
        released_at, released = self._released
        if rank not in records.living and not (released_at == now and rank in released):
            self._broken(f"worker {rank} is signalled, and is known to have ended")
        self._find_reasons_to_end(records, now)
        if records.ending_since is None:
            self._broken(f"worker {rank} gets signal {order.signal} without a reason")
        records.untold.discard(rank)
        if order.signal != SIGKILL:
            return
        records.unkilled.discard(rank)
        assert records.kill_allowed_at is not None, "set when the end began"
        if now < records.kill_allowed_at and rank not in records.started_too_late:
            self._broken(f"worker {rank} is killed before its grace is over")

    def _judge_dump(self, records: AttemptRecords, now: Instant) -> None:
        records.dump_ordered_at = now
        if records.is_blamed:
            return
        patience = self._spec.hang_timeout
        if patience is None:
            self._broken("a hang is reported without a hang timeout")
        asked_at = self._asked_for_progress_at
        lively = [
            process.local_rank
            for process in self._host.processes()
            if not process.is_stray and after(process.last_progress(asked_at), patience) > now
        ]
        if lively:
            self._broken(f"a hang is told, and workers {lively} show signs of life")

    def _judge_sweep(self, records: AttemptRecords, now: Instant) -> None:
        if records.sweep_ordered_at is not None:
            self._broken("one attempt is swept twice")
        waited_for = records.spawned - set(records.exit_codes) - set(records.refused_at)
        self._find_reasons_to_end(records, now)
        if self._gave_up_starting(records):
            waited_for = (waited_for & records.started) - records.started_too_late
        if self._stops_received:
            waited_for &= (
                records.started
            )  # a gang that stops does not wait for workers that were never started
        gives_up_at = after(records.kill_allowed_at or FAR_AWAY, self._spec.sweep_timeout)
        if waited_for and now < gives_up_at:
            self._broken(f"the gang is swept while workers {sorted(waited_for)} may be alive")
        records.sweep_ordered_at = now

    def _judge_restart(self, announcement: AnnounceRestart, now: Instant) -> None:
        self._restarts_announced += 1
        if self._restarts_announced > self._policy.restarts_max:
            self._broken(f"restart {self._restarts_announced} of {self._policy.restarts_max}")
        if self._stops_received:
            self._broken("a restart after a stop was requested")
        if not announcement.failures:
            self._broken("a restart without a failure")
        if self._is_final(announcement.failures[0]):
            self._broken("a restart after what could not be started")
        expected = self._policy.backoff.before_restart(self._restarts_announced)
        if announcement.pause != expected:
            self._broken(f"a pause of {announcement.pause} ns, expected {expected}")
        attempt = len(self._attempts)
        self._restart = (after(now, Duration(announcement.pause)), attempt)
        self._judge_root_cause(self._attempts[-1], announcement)

    def _judge_root_cause(self, records: AttemptRecords, told: AnnounceRestart | Outcome) -> None:
        assert told.failures, "looked at only when there are some"
        if self._guardian_lost:
            return
        root = told.failures[0]
        problem = root_cause_is_true(
            root,
            [self._host.workers[root.attempt, rank] for rank in sorted(records.started)],
            clock=self._host.clock,
            known_until=records.ending_since,
            ended_by_stop=records.ended_by_stop,
        )
        if problem:
            self._broken(problem)

    def _judge_outcome(self, outcome: Outcome) -> None:
        self._outcome = outcome
        if outcome.attempts != len(self._attempts):
            self._broken(f"{outcome.attempts} attempts told, {len(self._attempts)} made")
        if not self._attempts:
            return
        records = self._attempts[-1]
        failed_first = records.failed_at is not None or records.dump_ordered_at is not None
        timed_out = any(f.cause is FailureCause.NOT_STARTED for f in outcome.failures)
        match outcome.status:
            case OutcomeStatus.SUCCEEDED:
                if [records.exit_codes.get(rank) for rank in range(self._spec.size)] != (
                    [0] * self._spec.size
                ):
                    self._broken(f"a success with exit codes {records.exit_codes}")
            case OutcomeStatus.STOPPED:
                if self._stopped_at is None:
                    self._broken("stopped without a request to stop")
                if records.failed_at is not None and records.failed_at < self._stopped_at:
                    self._broken("stopped, though a worker had failed before")
            case OutcomeStatus.FAILED:
                # A rank that has raised and cannot be killed has failed, though its end is unknown.
                raised = bool(records.reported_at.keys() & records.living)
                if not (failed_first or raised or timed_out or self._guardian_lost):
                    self._broken("failed without a failed worker")
                if not outcome.failures or outcome.failures[0].cause is FailureCause.STOPPED:
                    self._broken(f"the failures explain nothing: {outcome.failures}")
                self._judge_root_cause(records, outcome)
                self._judge_giving_up(records, outcome)
        self._judge_survivors(records, outcome)

    def _is_final(self, root: Failure) -> bool:
        is_unstarted = root.cause is FailureCause.NOT_STARTED
        return is_unstarted and not self._policy.retries_startup_errors

    def _judge_giving_up(self, records: AttemptRecords, outcome: Outcome) -> None:
        swept_clean = records.swept is not None and not records.swept.survivors
        has_restarts = self._restarts_announced < self._policy.restarts_max
        may_restart = swept_clean and not self._is_final(outcome.failures[0])
        if has_restarts and may_restart and not self._stops_received and not self._guardian_lost:
            self._broken("failed, though restarts were left")
        if has_restarts and not self._stops_received and not outcome.detail:
            self._broken("restarts were left, and the outcome does not say why")

    def _judge_survivors(self, records: AttemptRecords, outcome: Outcome) -> None:
        if self._guardian_lost or records.swept is None:
            return  # who lives on cannot be known; the agent's own end takes care of the rest
        nameless = [p.pid for p in self._host.processes() if p.pid not in outcome.survivors]
        if nameless:
            self._broken(f"processes {nameless} live on, and the outcome does not name them")

    def _broken(self, what: str) -> NoReturn:
        raise InvariantBroken(what)


class WatchedJournal:
    """Writes everything into a journal, if there is one, then shows it to the checker."""

    def __init__(self, journal: Journal | None, checker: GangChecker) -> None:
        self._journal = journal
        self._checker = checker

    def stimulus(self, machine: str, number: int, stimulus: Any, now: Instant) -> None:
        """The machine is about to be told something."""
        if self._journal is not None:
            self._journal.stimulus(machine, number, stimulus, now)
        self._checker.stimulus(stimulus, now)

    def effect(self, machine: str, cause: int, effect: Any, now: Instant) -> None:
        """It has ordered something."""
        if self._journal is not None:
            self._journal.effect(machine, cause, effect, now)
        self._checker.effect(effect, now)
