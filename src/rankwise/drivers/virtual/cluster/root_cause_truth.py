"""Compares the root cause that is told with what the processes truly did."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from rankwise.base.failure import Failure, FailureCause, OutcomeStatus
from rankwise.base.root_cause import SELF_INFLICTED_SIGNALS
from rankwise.base.units import MILLISECOND, Instant
from rankwise.core.agent.vocabulary import LOSSES_OF_STORE, FinishRun
from rankwise.core.rendezvous.records import Round, Verdict
from rankwise.drivers.virtual.cluster.cluster_plan import ClusterPlan
from rankwise.drivers.virtual.cluster.host import SIGTERM
from rankwise.drivers.virtual.cluster.known_runs import RoundRecords, RunRecords
from rankwise.drivers.virtual.cluster.simulated_worker import SimulatedWorker
from rankwise.drivers.virtual.cluster.skewed_clocks import SkewedClock

HEAD_START = 250 * MILLISECOND
"""How much earlier a death by signal counts: spelled again, so that a change is noticed."""


def root_cause_is_true(
    root: Failure,
    workers: Sequence[SimulatedWorker],
    *,
    clock: SkewedClock,
    known_until: Instant | None,
    ended_by_stop: bool,
) -> str:
    """What is wrong with the root cause that a gang tells; empty if it is the truth.

    Args:
        root: the first failure that the gang tells of.
        workers: the workers of its attempt.
        clock: the node's.
        known_until: when the attempt began to end; what failed later explains nothing.
        ended_by_stop: whether a request to stop ended it.
    """
    # The request came to the ranks, too. Their exits were held back until it arrived, so that they
    # are its consequences, and explain no earlier failure.
    strangers = [] if ended_by_stop else deaths_by_others(workers)
    culprits = [
        worker
        for worker in (*workers, *strangers)
        if worker.failed_at is not None
        and (known_until is None or clock.shown_at(worker.failed_at) <= known_until)
    ]
    first = min(culprits, key=_order, default=None)
    match root.cause:
        case FailureCause.HUNG | FailureCause.OUT_OF_STEP:
            return ""
        case FailureCause.NOT_STARTED:
            if first is not None and clock.shown_at(_order(first)[0]) < root.at:
                return f"worker {first.local_rank} failed before {root} did not start"
            return ""
        case FailureCause.RAISED | FailureCause.EXITED | FailureCause.SIGNALED:
            told = [worker for worker in culprits if worker.local_rank == root.local_rank]
            if not told or not may_be_root(told[0], culprits, 0):
                return f"the root cause is told to be {root}, and the truth is {_shown(culprits)}"
            return ""
        case FailureCause.STOPPED | FailureCause.GUARDIAN_LOST | FailureCause.STORE_LOST:
            return f"the root cause is told to be {root}, which explains nothing"


def loss_is_root_cause(
    finished: FinishRun, workers: Mapping[tuple[int, int], SimulatedWorker]
) -> str:
    """What is wrong with the root cause of a node that has lost its store; empty if nothing is.

    A rank that failed because of a peer is no root cause then. `workers` are those of the node, by
    attempt and local rank.
    """
    refusal, failures = finished.refusal, finished.as_outcome().failures
    if refusal is None or refusal.kind not in LOSSES_OF_STORE or not failures:
        return ""
    root = failures[0]
    worker = workers.get((root.attempt, root.local_rank))
    if root.cause is not FailureCause.RAISED or worker is None or not worker.blames_peer:
        return ""
    return f"the store is lost, and the root cause is told to be {root}"


def may_be_root(told: SimulatedWorker, culprits: Collection[SimulatedWorker], slack: int) -> bool:
    """Whether this failure explains the others, where times are known up to `slack`.

    It is the earliest; or a violent death that was seen soon after the earliest, if that may be its
    consequence; or, where there is no such death, an exit that told of nothing; but it is not the
    consequence of such a death, or exit. Where times are known exactly, it is the first of these,
    and of one instant the one of the lowest rank. A failure that tells of a lost peer is explained
    by any failure that does not.
    """
    in_order = sorted(culprits, key=_order)
    times = {worker: _order(worker)[0] for worker in in_order}
    earliest = times[in_order[0]]
    first = [worker for worker in in_order if times[worker] <= earliest + slack]
    deaths = [worker for worker in in_order if worker.is_violent]
    exits = [worker for worker in in_order if worker.is_silent]
    if not slack:
        first, deaths, exits = first[:1], deaths[:1], exits[:1]
    explaining = deaths if told.is_violent else exits if told.is_silent else []
    seen_soon = told in explaining and times[told] - earliest < HEAD_START + slack
    # Where times are known exactly, the gang knows all that has failed before it told any to stop.
    # A worker that aborts late may have lost its peer, too: a watchdog does that.
    others = [
        worker
        for worker in in_order
        if not worker.lost_peer
        and (worker.died_by not in SELF_INFLICTED_SIGNALS or times[worker] - earliest < HEAD_START)
    ]
    if not slack and told.lost_peer and others:
        return False
    explains = all(each.lost_peer for each in first) and not told.lost_peer
    is_explained = seen_soon and any(each.may_be_consequence for each in first)
    if told not in first and not (explains or is_explained):
        return False
    stronger = [] if told.is_violent else deaths if told.is_silent else [*deaths, *exits]
    seen_before = any(times[each] - earliest < HEAD_START - slack for each in stronger)
    return not (seen_before and all(each.may_be_consequence for each in first))


def _order(worker: SimulatedWorker) -> tuple[Instant, int]:
    assert worker.failed_at is not None, "it has failed"
    return worker.failed_at, worker.rank


def deaths_by_others(workers: Iterable[SimulatedWorker]) -> list[SimulatedWorker]:
    """Workers that have died of a signal from elsewhere than their agent, as failed by it."""
    return [
        replace(worker, failed_at=worker.ended_at, died_by=SIGTERM)
        for worker in workers
        if worker.was_signalled and worker.failed_at is None and worker.ended_at is not None
    ]


_CAUSES_OF_BLAME = (FailureCause.HUNG, FailureCause.OUT_OF_STEP)


def verdict_is_true(run: RunRecords, verdict: Verdict, plan: ClusterPlan) -> str:
    """What is wrong with the verdict on a run; empty if it is the truth."""
    last = run.rounds[max(run.rounds)] if run.rounds else None
    match verdict.status:
        case OutcomeStatus.SUCCEEDED:
            if last is None:
                return "a success without a round"
            if sum(worker.succeeded for worker in last.workers) != _size_of(last.record):
                return f"a success in round {last.record.number}, and not all succeeded"
            return ""
        case OutcomeStatus.STOPPED:
            return "" if plan.has("preempt") else "a stop without a request"
        case OutcomeStatus.FAILED:
            if verdict.root is not None and last is not None:
                return _root_is_true(verdict.root, last, plan)
            return "" if verdict.detail else f"a failure that explains nothing: {verdict}"


def _root_is_true(root: Failure, last: RoundRecords, plan: ClusterPlan) -> str:
    if root.cause is FailureCause.NOT_STARTED:
        return ""
    if root.cause in _CAUSES_OF_BLAME and plan.has("blame-worker"):
        return ""
    if root.cause is FailureCause.OUT_OF_STEP and plan.has("miss-call"):
        return _blame_is_true(root, last)
    if root.cause is FailureCause.GUARDIAN_LOST and plan.has("lose-guardian"):
        return ""
    culprits = [worker for worker in last.workers if worker.failed_at is not None]
    if any(worker.lost_peer for worker in culprits):
        # What they have lost may be a rank that a scheduler has signalled. It has not failed, but
        # explains what came after its death, where no agent knew of a stop.
        culprits += deaths_by_others(last.workers)
    told = [worker for worker in culprits if worker.rank == root.rank]
    slack = _slack(plan)
    if not told or (slack is not None and not may_be_root(told[0], culprits, slack)):
        return f"the root cause is told to be {root}, and the truth is {_shown(culprits)}"
    return ""


def _shown(culprits: Iterable[SimulatedWorker]) -> str:
    """The failures as they happened, in order: a worker's whole state would fill a screen."""
    return "; ".join(
        f"rank {worker.rank} failed at {worker.failed_at}"
        + (f" by signal {worker.died_by}" if worker.died_by is not None else "")
        + (", for a lost peer" if worker.lost_peer else "")
        for worker in sorted(culprits, key=_order)
    )


def _blame_is_true(root: Failure, last: RoundRecords) -> str:
    """A blamed rank was in no call while others waited in one."""
    blamed = [worker for worker in last.workers if worker.rank == root.rank]
    others = [worker for worker in last.workers if worker.stands_since is not None]
    if not others or any(worker.stands_since is not None for worker in blamed):
        return f"the root cause is told to be {root}, who had come to the call"
    return ""


def _slack(plan: ClusterPlan) -> int | None:
    """How far two messages to the leader may differ; None in a world of large delays."""
    if plan.is_harsh or plan.has("kill-agent") or plan.closers_die:
        return None
    # A commit and the watch that tells it, after whatever commit was under way before.
    # Before it, the news of a death have travelled on the node.
    news = plan.guardian.latency_max - plan.guardian.latency_min
    return 6 * plan.network.latency_max + news + 10 * MILLISECOND


def _size_of(record: Round) -> int:
    return sum(record.slots_of(rank) for rank in range(len(record.members)))
