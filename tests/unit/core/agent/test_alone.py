"""An agent that is alone: restarts, stops and verdicts without a store."""

from rankwise.base.backoff import Backoff
from rankwise.base.failure import ErrorRecord, ExitStatus, OutcomeStatus
from rankwise.base.machine import Ticked
from rankwise.base.units import SECOND, Duration, Instant, after
from rankwise.core.agent.alone import spec_alone
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.state import AgentPhase
from rankwise.core.agent.vocabulary import (
    AgentStarted,
    AnnounceRestart,
    AskRanksToStop,
    BeginAttempt,
    DescribeFailures,
    Effect,
    FailuresDescribed,
    FinishRun,
    PrepareRound,
    RanksStood,
    RoundPrepared,
    StepReported,
    Stimulus,
    StopRanksAt,
)
from rankwise.core.gang.vocabulary import (
    GangSpec,
    GuardianLost,
    ProgressLooked,
    SignalWorker,
    SpawnWorker,
    StopRequested,
    Suspended,
    Sweep,
    Swept,
    WorkerExited,
    WorkerRefused,
    WorkerReported,
    WorkerSpawned,
)
from rankwise.core.rendezvous.configuration import RestartPolicy
from rankwise.core.watch.vocabulary import FindAwaited, WatchSpec

NOW = Instant(SECOND)
PORT = 29500


class Node:
    """A node with two workers, fed with facts; answers what a driver answers at once."""

    def __init__(
        self,
        policy: RestartPolicy,
        *,
        refuses: int | None = None,
        hang_timeout: Duration | None = None,
    ) -> None:
        self.refuses = refuses
        """The local rank of the worker that cannot be started."""
        gang = GangSpec(size=2, exit_timeout=Duration(SECOND), hang_timeout=hang_timeout)
        watch = WatchSpec(asks_about_hangs=hang_timeout is not None)
        self.agent = Agent(spec_alone(gang, policy, watch=watch))
        self.now = NOW
        self.effects: list[Effect] = []
        self.tell(AgentStarted(self.agent.spec))

    def tell(self, *stimuli: Stimulus) -> list[Effect]:
        effects: list[Effect] = []
        for stimulus in stimuli:
            effects += self._step(stimulus)
        return effects

    def _step(self, stimulus: Stimulus) -> list[Effect]:
        effects = list(self.agent.handle(stimulus, self.now))
        for effect in tuple(effects):
            match effect:
                case PrepareRound():
                    effects += self._step(RoundPrepared(effect.round, PORT))
                case SpawnWorker() if effect.local_rank == self.refuses:
                    why = "no such file"
                    effects += self._step(WorkerRefused(effect.local_rank, effect.attempt, why))
                case SpawnWorker():
                    pid = 100 + effect.local_rank
                    effects += self._step(WorkerSpawned(effect.local_rank, effect.attempt, pid))
                case DescribeFailures():
                    effects += self._step(FailuresDescribed(effect.round, effect.failures))
                case Sweep():
                    effects += self._step(Swept(effect.attempt))
                case _:
                    pass
        return effects

    def exits(self, attempt: int, *codes: int) -> list[Effect]:
        """Let the workers end one after the other; the first is the first to fail."""
        effects: list[Effect] = []
        for rank, code in enumerate(codes):
            self.now = after(self.now, Duration(1))
            effects += self.tell(WorkerExited(rank, attempt, ExitStatus(code), self.now))
        return effects

    @property
    def finished(self) -> FinishRun:
        assert self.agent.finished is not None
        return self.agent.finished


def worlds(effects: list[Effect]) -> list[tuple[int, int]]:
    """The round and the restarts of each attempt that has begun."""
    return [
        (effect.world.round, effect.world.restarts)
        for effect in effects
        if isinstance(effect, BeginAttempt)
    ]


def test_its_first_round_begins_at_once_with_all_ranks_on_this_node() -> None:
    node = Node(RestartPolicy())

    world = node.agent.world

    assert node.agent.phase is AgentPhase.RUNNING
    assert world is not None
    assert (world.node_rank, world.members, world.first_rank, world.size) == (0, ("0",), 0, 2)
    assert (world.master_address, world.master_port) == ("127.0.0.1", PORT)


def test_it_has_succeeded_when_all_ranks_have() -> None:
    node = Node(RestartPolicy())

    node.exits(0, 0, 0)

    assert node.finished.verdict is not None
    assert node.finished.verdict.status is OutcomeStatus.SUCCEEDED


def test_agent_that_has_finished_has_no_deadline_though_a_hang_was_being_looked_into() -> None:
    node = Node(RestartPolicy(), hang_timeout=Duration(SECOND))
    node.now = after(node.now, Duration(SECOND))
    # The host has not found yet for whom they wait, and never will.
    assert node.tell(ProgressLooked(0, NOW)) == [FindAwaited(0)]
    assert node.agent.next_deadline is not None

    node.exits(0, 0, 0)

    assert node.finished.verdict is not None
    assert node.agent.next_deadline is None  # a driver that still reads output would spin


def test_a_failure_is_followed_by_another_round_while_restarts_are_left() -> None:
    node = Node(RestartPolicy(restarts_max=2))

    first = node.exits(0, 1, -15)
    announcements = [effect for effect in first if isinstance(effect, AnnounceRestart)]
    assert [(each.attempt, each.restarts_left, each.pause) for each in announcements] == [(0, 1, 0)]
    assert worlds(first) == [(1, 1)]

    node.exits(1, 0, 0)
    assert node.finished.verdict is not None
    assert node.finished.verdict.status is OutcomeStatus.SUCCEEDED
    assert node.finished.verdict.restarts == 1


def test_when_restarts_are_spent_the_last_failure_is_the_verdict() -> None:
    node = Node(RestartPolicy(restarts_max=1))
    node.exits(0, 3, -15)

    node.exits(1, -15, 4)

    verdict = node.finished.verdict
    assert verdict is not None
    assert (verdict.status, verdict.restarts, verdict.detail) == (OutcomeStatus.FAILED, 1, "")
    assert verdict.root is not None
    assert node.finished.outcome is not None


def test_a_later_restart_waits_for_its_pause() -> None:
    backoff = Backoff(initial=Duration(5 * SECOND))
    node = Node(RestartPolicy(restarts_max=2, backoff=backoff))
    node.exits(0, 1, -15)

    assert worlds(node.exits(1, 1, -15)) == []
    pause_ends = node.agent.next_deadline
    assert pause_ends is not None
    assert pause_ends - node.now == 5 * SECOND
    assert worlds(node.agent.tick(node.now)) == []
    assert worlds(node.agent.tick(pause_ends)) == [(2, 2)]


def test_a_stop_during_the_pause_leaves_the_failure_as_the_verdict() -> None:
    node = Node(RestartPolicy(restarts_max=2))
    node.exits(0, 1, -15)
    node.exits(1, 7, -15)

    node.tell(StopRequested(15))

    verdict = node.finished.verdict
    assert verdict is not None
    assert (verdict.status, verdict.restarts) == (OutcomeStatus.FAILED, 1)
    assert verdict.root is not None
    assert verdict.root.exit == ExitStatus(7)


def test_asked_to_stop_its_ranks_agree_on_a_step_and_it_has_stopped() -> None:
    node = Node(RestartPolicy(restarts_max=2))

    asked = node.tell(StopRequested(15))
    assert AskRanksToStop(0, 15) in asked
    assert SignalWorker(0, 0, 15) in asked
    assert node.tell(RanksStood(0, 8)) == [StopRanksAt(0, 8)]
    node.exits(0, -15, 0)

    verdict = node.finished.verdict
    assert verdict is not None
    assert (verdict.status, verdict.signal) == (OutcomeStatus.STOPPED, 15)


def test_asked_twice_it_kills() -> None:
    node = Node(RestartPolicy())
    node.tell(StopRequested(2))

    assert SignalWorker(1, 0, 9) in node.tell(StopRequested(2))


def test_a_stop_after_a_failure_forbids_the_restart_and_stays_a_failure() -> None:
    node = Node(RestartPolicy(restarts_max=2))
    node.tell(WorkerExited(0, 0, ExitStatus(5), NOW))

    node.tell(StopRequested(15))
    node.tell(WorkerExited(1, 0, ExitStatus(-15), NOW))

    verdict = node.finished.verdict
    assert verdict is not None
    assert (verdict.status, verdict.detail) == (OutcomeStatus.FAILED, "")


def test_an_exception_after_which_no_restart_helps_ends_the_run() -> None:
    node = Node(RestartPolicy(restarts_max=2, final_exceptions=("ValueError",)))
    error = ErrorRecord(
        type="ValueError", message="x", traceback="ValueError: x", raised_at=NOW, wall_ns=0
    )

    node.tell(WorkerReported(0, 0, error))
    node.exits(0, 1, -15)

    verdict = node.finished.verdict
    assert verdict is not None
    assert verdict.detail.startswith("not restarted: --no-retry names ValueError")


def test_what_cannot_be_started_is_not_tried_again_unless_it_is_asked_for() -> None:
    patient = Node(RestartPolicy(restarts_max=1, retries_startup_errors=True), refuses=1)
    plain = Node(RestartPolicy(restarts_max=1), refuses=1)
    for node in (patient, plain):
        node.exits(0, -15)

    assert patient.agent.finished is None
    assert plain.finished.verdict is not None
    assert "a worker could not be started" in plain.finished.verdict.detail


def test_rounds_without_progress_end_the_run() -> None:
    node = Node(RestartPolicy(restarts_max=9, rounds_without_progress_max=2))
    node.tell(StepReported(0, 5))
    node.exits(0, 1, -15)  # a first step is progress
    node.tell(StepReported(1, 5))
    node.exits(1, 1, -15)
    assert node.agent.finished is None

    node.now = after(node.now, Duration(2 * SECOND))
    node.tell(Ticked(), StepReported(2, 4))
    node.exits(2, 1, -15)

    verdict = node.finished.verdict
    assert verdict is not None
    assert (
        verdict.detail == "not restarted: 2 attempts in a row without progress (--max-no-progress)"
    )


def test_a_node_that_failed_too_often_gives_up_since_there_is_no_other() -> None:
    node = Node(RestartPolicy(restarts_max=9, strikes_max=2))
    node.exits(0, 1, -15)

    node.exits(1, 1, -15)

    verdict = node.finished.verdict
    assert verdict is not None
    assert verdict.detail == "not restarted: 2 failures began on this node, and there is no other"


def test_a_guardian_that_dies_ends_the_run_and_says_why_no_restart_followed() -> None:
    node = Node(RestartPolicy(restarts_max=3))

    node.tell(GuardianLost("the guardian was killed"))

    verdict = node.finished.verdict
    assert verdict is not None
    assert verdict.detail == "not restarted: the guardian was killed"


def test_a_guardian_that_dies_in_the_pause_forbids_the_restart_that_was_announced() -> None:
    node = Node(RestartPolicy(restarts_max=2))
    node.exits(0, 1, -15)
    node.exits(1, 1, -15)

    node.tell(GuardianLost("the guardian was killed"))

    outcome = node.finished.as_outcome()
    assert (outcome.status, outcome.attempts) == (OutcomeStatus.FAILED, 2)
    assert outcome.detail.startswith("this node can start no more ranks: the guardian was killed")
    assert outcome.failures[0].exit == ExitStatus(1)


def test_the_next_gang_owes_nothing_to_a_worker_that_was_slow_to_end() -> None:
    node = Node(RestartPolicy(restarts_max=1))
    error = ErrorRecord(type="E", message="", traceback="", raised_at=NOW, wall_ns=0)
    node.tell(WorkerReported(0, 0, error))

    node.exits(0, 1, -15)

    assert node.agent.next_deadline is None


def test_a_pause_does_not_count_the_time_in_which_the_node_stood_still() -> None:
    backoff = Backoff(initial=Duration(10 * SECOND), longest=Duration(10 * SECOND))
    node = Node(RestartPolicy(restarts_max=2, backoff=backoff))
    node.exits(0, 1, 0)
    node.exits(1, 1, 0)
    due = node.agent.next_deadline
    assert due is not None

    node.now = after(due, Duration(3600 * SECOND))
    node.tell(Suspended(Duration(3600 * SECOND)))

    assert node.agent.next_deadline == after(due, Duration(3600 * SECOND))
