"""Nodes whose clocks differ ask each other at the end who was late, and agents die meanwhile."""

from typing import Any

import msgspec
import pytest

from rankwise.base.failure import OutcomeStatus
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.drivers.virtual.cluster.cluster_plan import Clocks, ClusterPlan, Workers
from rankwise.drivers.virtual.cluster.simulator import ClusterRun, ClusterSimulator
from rankwise.sim.faults.vocabulary import FaultOfCluster, KillAgent

NODES, WORK = 4, Duration(5 * SECOND)
RENDEZVOUS = RendezvousConfig(nodes_min=NODES, nodes_max=NODES)
CLOCKS, ONE_CLOCK = Clocks(), Clocks(offset_max=Duration(0), drift_ppm_max=0)


@pytest.mark.parametrize("seed", range(5))
def test_the_late_rank_is_named_on_every_node_by_clocks_that_are_hours_apart(seed: int) -> None:
    run, journal = cluster(seed)

    told = entries(journal, "InquiryAnswered")
    assert run.verdict is not None
    assert run.verdict.status is OutcomeStatus.SUCCEEDED
    assert [answer["effect"]["late"]["rank"] for answer in told] == [2 * NODES - 1] * NODES
    # Each of the others has waited half of the time.
    assert all(0.4 < answer["effect"]["late"]["waited"] / WORK < 0.6 for answer in told)


@pytest.mark.parametrize("dies", range(NODES))
def test_an_agent_that_dies_while_nodes_ask_is_not_waited_for_until_its_lease_ends(
    dies: int,
) -> None:
    _, journal = cluster(1, clocks=ONE_CLOCK)
    asked_at = min(entry["at"] for entry in entries(journal, "BooksWanted"))

    _, journal = cluster(1, KillAgent(at=Instant(asked_at), node=dies), clocks=ONE_CLOCK)

    answered_at = [entry["at"] for entry in entries(journal, "InquiryAnswered")]
    assert len(answered_at) == NODES - 1
    # A second if it is asked, and two if it asks, as does the leader.
    assert max(answered_at) - asked_at < 2 * SECOND + 10 * MILLISECOND


def cluster(
    seed: int, *faults: FaultOfCluster, clocks: Clocks = CLOCKS
) -> tuple[ClusterRun, bytes]:
    """What became of a cluster whose last rank is late, and its journal."""
    plan = ClusterPlan(
        nodes=NODES,
        rendezvous=RENDEZVOUS,
        workers=Workers(per_node=2, work=WORK, late=Duration(50 * MILLISECOND)),
        clocks=clocks,
        faults=faults,
    )
    world = ClusterSimulator(plan, seed)
    run = world.run()
    return run, world.journal.lines()


def entries(journal: bytes, effect: str) -> list[dict[str, Any]]:
    """Those of the agents that ordered, or told, that."""
    lines = map(msgspec.json.decode, journal.splitlines())
    return [line for line in lines if line.get("effect", {}).get("type") == effect]
