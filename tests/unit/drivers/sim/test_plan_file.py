"""Plans of one node, and faults that one node and a cluster share, as files."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from rankwise.base.errors import ConfigError
from rankwise.base.failure import FailureCause, OutcomeStatus
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant
from rankwise.core.agent.state import AgentPhase
from rankwise.drivers.virtual.cluster.plan_file import load_plan
from rankwise.drivers.virtual.cluster.simulator import ClusterSimulator
from rankwise.sim.faults.reading import CLUSTER, RANKS_AND_NODES, read_faults
from rankwise.sim.faults.vocabulary import (
    FAULTS,
    Fault,
    KillAgent,
    Partition,
    Preempt,
    Target,
)

ALONE = """
is_alone: true
rendezvous: {policy: {restarts_max: 1}}
gang: {grace: 2 s}
guardian: {latency_max: 20 ms, delays_orders: true}
workers:
  lives:
    - - {ending: {type: Raises, message: loss is NaN, exit_takes: 10 ms}, after: 3 s}
      - {ending: {type: RunsForever}, stop_takes: null, strays: 1}
    - - {ending: {type: Exits, code: 0}, after: 5 s}
      - {ending: {type: RunsForever}}
faults:
  - {what: FAULT}
"""


def plan(tmp_path: Path, text: str) -> str:
    path = tmp_path / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("lose-guardian, at: 8 s", FailureCause.GUARDIAN_LOST),
        ("blame-worker, at: 8 s, local_rank: 1", FailureCause.OUT_OF_STEP),
        ("fail-worker, at: 8 s, node: 0, local_rank: 1, code: 3", FailureCause.EXITED),
    ],
)
def test_a_node_that_is_alone_meets_the_faults_of_a_cluster(
    tmp_path: Path, fault: str, cause: FailureCause
) -> None:
    read = load_plan(plan(tmp_path, ALONE.replace("FAULT", fault)))

    run = ClusterSimulator(read, 3).run()

    (finished,) = run.finished.values()
    outcome = finished.as_outcome()
    assert outcome.status is OutcomeStatus.FAILED
    assert outcome.attempts == 2
    assert outcome.failures[0].cause is cause


def test_nodes_of_a_cluster_meet_the_faults_of_one_node(tmp_path: Path) -> None:
    text = """
nodes: 4
rendezvous: {nodes_min: 3, nodes_max: 4, policy: {restarts_max: 2}}
workers: {per_node: 2}
faults:
  - {what: lose-guardian, at: 8 s, node: 1}
  - {what: blame-worker, at: 16 s, node: 2, local_rank: 1}
"""
    run = ClusterSimulator(load_plan(plan(tmp_path, text)), 0).run()

    assert run.verdict is not None
    assert run.verdict.status is OutcomeStatus.SUCCEEDED
    assert [len(book.record.members) for book in run.rounds.values()] == [4, 3, 3]
    assert run.rounds[1].ended_because.startswith("rank 5 on h2 was out of step")


def test_every_field_that_is_a_time_takes_a_unit(tmp_path: Path) -> None:
    fault = "preempt, node: 0, at: 1 min, ranks_before: 100 ms"
    read = load_plan(plan(tmp_path, ALONE.replace("FAULT", fault)))

    (preempt,) = read.faults
    assert isinstance(preempt, Preempt)
    assert (preempt.at, preempt.ranks_before) == (60 * SECOND, 100 * MILLISECOND)
    assert read.gang_spec.grace == 2 * SECOND
    assert read.workers.lives[0][0].after == 3 * SECOND


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("is_alone: true\nnodes: 2", "nodes is 2, expected 1 where is_alone is true"),
        (
            "is_alone: true\nhappenings: [{what: compact-store, at: 1 s}]",
            "compact-store is about a store or other nodes, and a node that is alone has neither",
        ),
        ("is_alone: true\nrendezvous: {nodes_max: 2}", "rendezvous.nodes_max is 2, expected 1"),
        ("is_alone: true\nrendezvous: {spares: 1}", "rendezvous.spares is 1, expected 0 where"),
        ("is_alone: true\nworkers: {recovers: 50}", "workers.recovers is 50, expected 0 where"),
        ("workers: {per_node: 2, lives: [[{}]]}", r"lives\[0\] has 1 programs, expected one for"),
        ("workers: {lives: [[{after: 3}]]}", "after is 3, expected a duration with its unit"),
        ("gang: {size: 3}", "gang.size is 3 and workers.per_node 1, expected the same"),
        ("gang: 3", "gang is 3, expected fields"),
        ("rendezvous: {policy: 3}", r"rendezvous\.policy is 3, expected fields"),
        ("workers: {lives: 3}", r"plan\.yaml: workers\.lives is 3, expected a list"),
        ("workers: {lives: [3]}", r"workers\.lives\[0\] is 3, expected a list"),
        ("network: {los: 3}", r"network\.los: there is no such field; did you mean loss\?"),
        ("nodes: many", "nodes is 'many', expected a whole number"),
        (
            "workers: {lives: [[{ending: {type: Exists}}]]}",
            r"workers\.lives\[0\]\[0\]\.ending\.type: there is no 'Exists'; did you mean Exits\?",
        ),
        ("late: {9: 5 s}", "late names node 9, and the cluster has nodes 0 to 7"),
        ("faults: 3", "faults is 3, expected a list of faults"),
        ("faults: [3]", r"faults\[0\]: 3 is not a fault: the key what is missing"),
        ("faults: []\nhappenings: []", "faults and happenings are two words for one list"),
        ("faults: [{what: kill-agent, at: 3, node: 0}]", r"faults\[0\]: at is 3, expected a durat"),
        (
            "faults: [{what: kill-agent, at: 3 s}]",
            r"kill-agent needs node \(as in kill-agent:no",
        ),
        (
            "faults: [{what: partition, at: 3 s, nodes: 1, lasts: 1 s}]",
            "nodes is 1, expected a list",
        ),
        (
            "faults: [{what: preempt, at: 1 s, node: 0, phase: runing}]",
            "phase: there is no 'runing'; did you mean r",
        ),
        (
            "faults: [{what: late, rank: 0, by: 1 s}]",
            "fault of a rank, and here only simulated clus",
        ),
        (
            "faults: [{what: leave, at: 1 s, node: 8}]",
            "leave names node 8, and the cluster has nodes 0",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, given: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_plan(plan(tmp_path, given))


def test_a_node_that_is_alone_takes_no_time_limit(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("is_alone: true\ntime_limit: 5 s\n")

    with pytest.raises(ConfigError, match="time_limit is given, and is_alone is true"):
        load_plan(str(path))


def test_faults_of_a_cluster_can_be_given_in_the_short_form_beside_a_plan(tmp_path: Path) -> None:
    file = plan(tmp_path, "nodes: 4\nhappenings: [{what: kill-agent, at: 1 s, node: 0}]\n")

    read = load_plan(
        [
            file,
            "kill:node=1,at=15s,back_after=4s",
            "partition:nodes=0+3,at=25s,lasts=8s",
            "late:node=2,by=3s",
            "preempt:node=1,at=1s,signal=SIGINT,phase=running",
        ]
    )

    second = Instant(SECOND)
    assert read.late == {2: 3 * SECOND}
    assert read.faults == (
        KillAgent(at=second, node=0),
        KillAgent(at=Instant(15 * SECOND), node=1, back_after=Duration(4 * SECOND)),
        Partition(at=Instant(25 * SECOND), nodes=(0, 3), lasts=Duration(8 * SECOND)),
        Preempt(at=second, node=1, signal=2, phase=AgentPhase.RUNNING),
    )


def test_a_node_is_late_once() -> None:
    with pytest.raises(ConfigError, match=r"late:node=1,by=3s: node 1 is late already, expected o"):
        load_plan(["late:node=1,by=2s", "late:node=1,by=3s"])


def test_two_plans_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"names the plans a\.yaml and b\.yaml, expected one"):
        load_plan(["a.yaml", "b.yaml"])


@pytest.mark.parametrize(
    ("word", "taken", "told"),
    [
        (
            "partition:at=1s,nodes=0,lasts=2s",
            RANKS_AND_NODES,
            "fault of a simulated cluster, and h",
        ),
        ("partition:at=1s,nodes=0,lasts=2s", RANKS_AND_NODES, "rankwise sim cluster takes it"),
        ("jitter:percent=3", CLUSTER, "fault of a chip, and here only simulated clusters have"),
        ("kill:link=sip0-sip1", RANKS_AND_NODES, "these ranks have no machine"),
        ("flip:rank=0,bit=1@collective=1", CLUSTER, "rankwise run --on sim takes it"),
        ("kill:rank=0,at=1s", CLUSTER, "this is a fault of a rank"),
        ("exlode:node=0", CLUSTER, "there is no fault 'exlode'"),
        ("flip:rank=0,bit=-1@collective=1", RANKS_AND_NODES, "bit is -1, expected 0 or more"),
        ("flip:rank=0,bit=1,element=-2@collective=1", RANKS_AND_NODES, "element is -2, expected 0"),
    ],
)
def test_a_fault_is_refused_with_what_takes_it_or_what_was_expected(
    word: str, taken: Sequence[Target], told: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        read_faults([word], taken)

    assert str(refused.value).startswith(f"--faults {word}: ")
    assert told in str(refused.value)


def test_every_fault_has_one_word_for_what_it_strikes() -> None:
    kinds = [kind for of in FAULTS.values() for kind in of.values()]

    assert set(kinds) == set(get_args(Fault))
    assert all(word in FAULTS[Target.CLUSTER] for word in FAULTS[Target.NODE])
