"""Thousands of simulated nodes that are alone, each checked after every step.

A seed that fails here prints the command that replays it. `RANKWISE_SEEDS=50000` runs more of them,
`RANKWISE_FIRST_SEED` others.
"""

import hashlib
import os
import subprocess
import sys
from collections import Counter

import msgspec
import pytest

from rankwise.base.errors import SimulationError
from rankwise.base.failure import FailureCause, OutcomeStatus
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.replay import replay
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.drivers.virtual.cluster.cluster_plan import ClusterPlan
from rankwise.drivers.virtual.cluster.random_plans import random_plan as random_cluster
from rankwise.drivers.virtual.cluster.simulator import ClusterSimulator
from rankwise.drivers.virtual.gang_simulator import GangSimulator, MakeAgent, SimulatedRun
from rankwise.drivers.virtual.invariants import InvariantBroken
from rankwise.drivers.virtual.random_plans import random_plan
from rankwise.drivers.virtual.worker_behaviour import RunsForever, WorkerProgram
from rankwise.sim.faults.vocabulary import AmongOthers, Preempt, StartAgents

SEED_COUNT = int(os.environ.get("RANKWISE_SEEDS", "3000"))
FIRST_SEED = int(os.environ.get("RANKWISE_FIRST_SEED", "0"))
SEEDS = range(FIRST_SEED, FIRST_SEED + SEED_COUNT)

RUNS = WorkerProgram(ending=RunsForever())
DIGEST_PROGRAM = """
import hashlib, sys
from rankwise.drivers.virtual.random_plans import random_plan
from rankwise.drivers.virtual.gang_simulator import GangSimulator
digest = hashlib.sha256()
for seed in range(int(sys.argv[1])):
    digest.update(GangSimulator(seed).run_plan(random_plan(seed)).journal)
print(digest.hexdigest())
"""


class Forgetful(Agent):
    """Forgets to prepare its rounds."""

    def _prepare(self, round_number: int, now: Instant) -> None:
        """Order nothing."""


def command_for(seed: int) -> str:
    return f"rankwise sim cluster --standalone --random --seed {seed} --story"


def run_seed(seed: int, make_agent: MakeAgent = Agent) -> tuple[ClusterPlan, SimulatedRun]:
    plan = random_plan(seed)
    try:
        return plan, GangSimulator(seed, make_agent=make_agent).run_plan(plan)
    except (SimulationError, AssertionError) as error:
        error.add_note(f"replay it: {command_for(seed)}")
        raise


def test_a_journal_is_enough_to_replay_a_run() -> None:
    for seed in SEEDS[:300]:
        _, run = run_seed(seed)

        steps = list(replay(run.journal.splitlines(keepends=True), f"seed {seed}"))

        assert not [step for step in steps if step.differs]
        assert steps[-1].phase == "finished"


def test_every_invariant_holds_for_every_seed_and_the_seeds_see_it_all() -> None:
    seen: Counter[str] = Counter()

    for seed in SEEDS:
        plan, run = run_seed(seed)
        outcome = run.outcome
        seen[f"size {plan.workers.per_node}"] += 1
        seen[outcome.status] += 1
        seen[f"attempts {outcome.attempts}"] += 1
        seen["survivors"] += bool(outcome.survivors)
        seen["detail"] += bool(outcome.detail)
        seen[outcome.failures[0].cause if outcome.failures else "no failure"] += 1

    causes = set(FailureCause) - {FailureCause.STORE_LOST}  # a gang knows of no store
    expected = [*OutcomeStatus, *causes, "size 1", "size 64", "attempts 1", "attempts 4"]
    expected += ["survivors", "detail", "no failure"]
    rare = {name: seen[name] for name in expected if seen[name] * 1000 < SEED_COUNT}
    assert not rare, f"the plans hardly ever lead to {rare}"


def test_a_rank_that_has_raised_and_cannot_even_be_killed_has_failed() -> None:
    _, run = run_seed(405_551)

    assert run.outcome.status is OutcomeStatus.FAILED
    assert run.outcome.survivors


@pytest.mark.parametrize(
    ("milliseconds", "status"), [(100, OutcomeStatus.STOPPED), (900, OutcomeStatus.FAILED)]
)
def test_ranks_that_are_signalled_just_before_their_agent_are_stopped(
    milliseconds: int, status: OutcomeStatus
) -> None:
    ahead = Duration(milliseconds * MILLISECOND)
    signals = Preempt(at=Instant(5 * SECOND), node=0, ranks_before=ahead)

    run = GangSimulator(faults=(signals,)).run(GangSpec(size=3), [[RUNS] * 3])

    assert run.outcome.status is status


def test_a_node_that_is_alone_bears_what_happens_to_nodes_of_clusters() -> None:
    for seed in SEEDS[:150]:
        plan = random_plan(seed)
        more = [
            msgspec.structs.replace(
                each, **dict.fromkeys({"node"} & set(each.__struct_fields__), 0)
            )
            for each in random_cluster(seed).faults
            if not isinstance(each, AmongOthers | StartAgents)
        ]
        both = tuple(sorted((*plan.faults, *more), key=lambda fault: fault.at))

        ClusterSimulator(msgspec.structs.replace(plan, faults=both), seed).run()


def test_equal_seeds_give_equal_journals() -> None:
    for seed in range(100):
        assert run_seed(seed)[1].journal == run_seed(seed)[1].journal


def test_other_seeds_give_other_journals() -> None:
    journals = {run_seed(seed)[1].journal for seed in range(100)}

    assert len(journals) == 100


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_journals_do_not_depend_on_the_hash_seed_of_the_process(hash_seed: str) -> None:
    here = hashlib.sha256()
    for seed in range(100):
        here.update(run_seed(seed)[1].journal)

    there = subprocess.run(
        [sys.executable, "-c", DIGEST_PROGRAM, "100"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()

    assert there == here.hexdigest()


def test_a_failing_seed_prints_the_command_that_replays_it() -> None:
    with pytest.raises(InvariantBroken) as caught:
        run_seed(17, Forgetful)

    assert caught.value.__notes__ == [f"replay it: {command_for(17)}"]


def test_that_command_tells_the_story_of_the_seed() -> None:
    command = [sys.executable, "-m", *command_for(17).split()]

    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    outcome = run_seed(17)[1].outcome
    assert told.startswith("    0.000000 s  < started\n")
    assert f"\nverdict           {outcome.status}" in told
