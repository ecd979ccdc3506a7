"""Compares the verdict that a cluster shows with what its workers truly did."""

from rankwise.base.failure import Failure, FailureCause, OutcomeStatus
from rankwise.base.units import MILLISECOND
from rankwise.core.rendezvous.records import Round, Verdict
from rankwise.drivers.sim.cluster.books import RoundBook, RunBook
from rankwise.drivers.sim.cluster.faults import ClusterPlan
from rankwise.drivers.sim.cluster.root_cause_truth import deaths_by_others, may_be_root

_CAUSES_OF_BLAME = (FailureCause.HUNG, FailureCause.OUT_OF_STEP)


def verdict_is_true(run: RunBook, verdict: Verdict, plan: ClusterPlan) -> str:
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


def _root_is_true(root: Failure, last: RoundBook, plan: ClusterPlan) -> str:
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
        # What they have lost may be a rank that a scheduler has signalled. It has not failed,
        # but explains what came after its death, where no agent had heard of a stop.
        culprits += deaths_by_others(last.workers)
    told = [worker for worker in culprits if worker.rank == root.rank]
    slack = _slack(plan)
    if not told or (slack is not None and not may_be_root(told[0], culprits, slack)):
        return f"the root cause is told to be {root}, and the truth is {culprits}"
    return ""


def _blame_is_true(root: Failure, last: RoundBook) -> str:
    """Who is blamed has stood in no call, while others did."""
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
