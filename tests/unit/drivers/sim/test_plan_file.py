"""Plans of one node, and faults that one node and a cluster share, as files."""

from pathlib import Path

import pytest

from rankwise.base.errors import ConfigError
from rankwise.base.failure import FailureCause, OutcomeStatus
from rankwise.base.units import MILLISECOND, SECOND
from rankwise.drivers.sim.cluster.faults import Preempt
from rankwise.drivers.sim.cluster.plan_file import load_plan
from rankwise.drivers.sim.cluster.world import ClusterWorld

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
happenings:
  - {what: HAPPENING}
"""


def plan(tmp_path: Path, text: str) -> str:
    path = tmp_path / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("happening", "cause"),
    [
        ("lose-guardian, at: 8 s", FailureCause.GUARDIAN_LOST),
        ("blame-worker, at: 8 s, local_rank: 1", FailureCause.OUT_OF_STEP),
        ("fail-worker, at: 8 s, node: 0, local_rank: 1, code: 3", FailureCause.EXITED),
    ],
)
def test_a_node_that_is_alone_meets_the_faults_of_a_cluster(
    tmp_path: Path, happening: str, cause: FailureCause
) -> None:
    read = load_plan(plan(tmp_path, ALONE.replace("HAPPENING", happening)))

    run = ClusterWorld(read, 3).run()

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
happenings:
  - {what: lose-guardian, at: 8 s, node: 1}
  - {what: blame-worker, at: 16 s, node: 2, local_rank: 1}
"""
    run = ClusterWorld(load_plan(plan(tmp_path, text)), 0).run()

    assert run.verdict is not None
    assert run.verdict.status is OutcomeStatus.SUCCEEDED
    assert [len(book.record.members) for book in run.rounds.values()] == [4, 3, 3]
    assert run.rounds[1].ended_because.startswith("rank 5 on h2 was out of step")


def test_every_field_that_is_a_time_takes_a_unit(tmp_path: Path) -> None:
    happening = "preempt, node: 0, at: 1 min, ranks_before: 100 ms"
    read = load_plan(plan(tmp_path, ALONE.replace("HAPPENING", happening)))

    (preempt,) = read.happenings
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
            "CompactStore is about a store or other nodes, and a node that is alone has neither",
        ),
        ("is_alone: true\nrendezvous: {nodes_max: 2}", "rendezvous.nodes_max is 2, expected 1"),
        ("is_alone: true\nrendezvous: {spares: 1}", "rendezvous.spares is 1, expected 0 where"),
        ("is_alone: true\nworkers: {recovers: 50}", "workers.recovers is 50, expected 0 where"),
        ("workers: {per_node: 2, lives: [[{}]]}", r"lives\[0\] has 1 programs, expected one for"),
        ("workers: {lives: [[{after: 3}]]}", "after is 3, expected a duration with its unit"),
        ("gang: {size: 3}", "gang.size is 3 and workers.per_node 1, expected the same"),
        ("gang: 3", "gang is 3, expected fields"),
        ("workers: {lives: 3}", "Expected `array`, got `int`"),
        ("workers: {lives: [3]}", "Expected `array`, got `int`"),
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
