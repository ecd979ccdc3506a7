"""A rank of one node does not come to a collective, and the ranks of all nodes wait for it."""

import pytest

from rankwise.base.failure import FailureCause, OutcomeStatus
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.rendezvous.configuration import RendezvousConfig, RestartPolicy
from rankwise.drivers.virtual.cluster.cluster_plan import ClusterPlan, Workers
from rankwise.drivers.virtual.cluster.simulator import ClusterRun, ClusterSimulator
from rankwise.sim.faults.vocabulary import FaultOfCluster, KillAgent, MissCall, Partition

MISSED_AT = 10 * SECOND


@pytest.mark.parametrize("seed", range(10))
def test_the_rank_that_has_not_come_is_the_root_cause_and_no_time_out_is(seed: int) -> None:
    run = cluster(4, missed(), work=600 * SECOND, seed=seed)

    assert run.verdict is not None
    root = run.verdict.root
    assert root is not None
    assert (root.cause, root.rank) == (FailureCause.OUT_OF_STEP, rank_on(run, 2))
    others = ", ".join(str(rank) for rank in range(8) if rank != root.rank)
    assert root.detail.startswith(f"rank {root.rank} has not come to all_reduce #1, in which ")
    assert len(others) > 0
    assert [finish.verdict for finish in run.finished.values()] == [run.verdict] * 4


@pytest.mark.parametrize("seed", range(10))
def test_a_rank_that_is_done_while_others_wait_ends_the_run_before_any_time_out(seed: int) -> None:
    run = cluster(4, missed(patience=3600 * SECOND), work=11 * SECOND, seed=seed)

    assert run.verdict is not None
    assert run.verdict.status is OutcomeStatus.FAILED
    root = run.verdict.root
    assert root is not None
    assert (root.cause, root.rank) == (FailureCause.OUT_OF_STEP, rank_on(run, 2))
    assert root.detail.startswith(f"rank {root.rank} was done without a call of that group")


def test_a_restart_follows_in_which_all_come() -> None:
    run = cluster(4, missed(), work=20 * SECOND, restarts_max=1)

    assert run.verdict is not None
    assert run.verdict.status is OutcomeStatus.SUCCEEDED
    assert run.verdict.restarts == 1


def test_who_is_silent_holds_nobody_up() -> None:
    """The agents of two nodes are gone or cut off when the others' time-outs are due."""
    patience = 6 * SECOND
    over_at = MISSED_AT + patience
    run = cluster(
        4,
        missed(patience=patience),
        Partition(at=Instant(over_at - SECOND), nodes=(2,), lasts=Duration(30 * SECOND)),
        KillAgent(at=Instant(over_at - SECOND), node=3),
        work=600 * SECOND,
    )

    assert run.verdict is not None
    first = next(iter(run.rounds.values()))
    assert first.dissolved_at is not None
    assert first.dissolved_at - over_at < 4 * SECOND


def test_a_leader_that_dies_while_it_asks_holds_nobody_up() -> None:
    for leader in range(3):
        run = cluster(
            3,
            missed(),
            KillAgent(at=Instant(MISSED_AT + 5 * SECOND), node=leader),
            work=600 * SECOND,
        )

        assert run.verdict is not None
        first = next(iter(run.rounds.values()))
        assert first.dissolved_at is not None
        assert first.dissolved_at - MISSED_AT < 15 * SECOND


def missed(patience: int = 5 * SECOND) -> MissCall:
    return MissCall(at=Instant(MISSED_AT), node=2, local_rank=1, patience=Duration(patience))


def rank_on(run: ClusterRun, node: int) -> int:
    """The job's rank of the second worker of a node, in the first round."""
    members = next(iter(run.rounds.values())).record.members
    place = next(place for place, name in enumerate(members) if name.startswith(f"n{node}."))
    return 2 * place + 1


def cluster(
    nodes: int, *faults: FaultOfCluster, work: int, restarts_max: int = 0, seed: int = 1
) -> ClusterRun:
    plan = ClusterPlan(
        nodes=nodes,
        rendezvous=RendezvousConfig(
            nodes_min=nodes, nodes_max=nodes, policy=RestartPolicy(restarts_max=restarts_max)
        ),
        workers=Workers(per_node=2, work=Duration(work)),
        faults=faults,
    )
    return ClusterSimulator(plan, seed).run()
