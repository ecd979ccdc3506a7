"""Thousands of simulated task graphs, each compared with the same tasks run one after the other.

A seed that fails here prints the command that replays it. `RANKWISE_SEEDS=50000` runs more of them,
`RANKWISE_FIRST_SEED` others.
"""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from task_graph_worlds import TreeWorld, command_for, random_plan
from task_graph_worlds import main as replay_main

from rankwise.base.errors import RankwiseError
from rankwise.base.units import Instant
from rankwise.core.tree.hazards import Hazards
from rankwise.core.tree.machine import TaskGraph
from rankwise.core.tree.state import GraphTask
from rankwise.core.tree.vocabulary import (
    Access,
    ChildDied,
    ChildrenReported,
    Dispatch,
    Effect,
    EndCause,
    GraphSpec,
    SlotsRecalled,
    Stimulus,
)

SEED_COUNT = int(os.environ.get("RANKWISE_SEEDS", "1500"))
FIRST_SEED = int(os.environ.get("RANKWISE_FIRST_SEED", "0"))
WORLDS = "tests/simulation/task_graph_worlds.py"
SEEDS = range(FIRST_SEED, FIRST_SEED + SEED_COUNT)

DIGEST_PROGRAM = """
import hashlib, sys
from task_graph_worlds import TreeWorld, random_plan
digest = hashlib.sha256()
for seed in range(int(sys.argv[1])):
    world = TreeWorld(random_plan(seed))
    world.run()
    digest.update(world.journal.lines())
print(digest.hexdigest())
"""


def run_seed(seed: int, make_graph: type[TaskGraph] = TaskGraph) -> TreeWorld:
    world = TreeWorld(random_plan(seed), make_graph)
    try:
        world.run()
    except (RankwiseError, AssertionError) as error:
        error.add_note(f"replay it: {command_for(seed)}")
        raise
    return world


def run_seeds(count: int, make_graph: type[TaskGraph]) -> None:
    for seed in range(count):
        run_seed(seed, make_graph)


class BlindToReaders(Hazards):
    """Lets a writer overtake those who still read, and an old value be overwritten too early."""

    def enter(self, task: GraphTask, accesses: Sequence[Access]) -> dict[GraphTask, bool]:
        found = super().enter(task, accesses)
        return {producer: needs_data for producer, needs_data in found.items() if needs_data}


class UnorderedGraph(TaskGraph):
    def __init__(self, spec: GraphSpec) -> None:
        super().__init__(spec)
        self._hazards = BlindToReaders()


class TrustingGraph(TaskGraph):
    """Sends words ahead as if nothing before them could ever fail."""

    def handle(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        return [
            Dispatch(effect.child, effect.slots, [False] * len(effect.slots), effect.epoch)
            if isinstance(effect, Dispatch)
            else effect
            for effect in super().handle(stimulus, now)
        ]


class ForgetfulOfDeaths(TaskGraph):
    """Runs again what a dead child had done and not reported."""

    def handle(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        if isinstance(stimulus, ChildDied):
            stimulus = ChildDied(stimulus.child, 0, 0, stimulus.successor)
        return super().handle(stimulus, now)


def test_every_seed_gives_the_values_of_a_sequential_run_and_the_seeds_see_it_all() -> None:
    seen: Counter[str] = Counter()

    for seed in SEEDS:
        world = run_seed(seed)
        seen["refused memory"] += world.refusals > 0
        for outcome in world.outcomes:
            seen["all completed"] += bool(outcome.task_count) and not outcome.unfinished
            seen.update({unfinished.cause for unfinished in outcome.unfinished})
        stimuli = {type(stimulus) for stimulus in world.heard}
        seen["reported"] += ChildrenReported in stimuli
        seen["recalled"] += any(isinstance(s, SlotsRecalled) and s.slots for s in world.heard)

    expected = [*EndCause, "refused memory", "all completed", "reported", "recalled"]
    rare = {name: seen[name] for name in expected if seen[name] * 100 < SEED_COUNT}
    assert not rare, f"the plans hardly ever lead to {rare}"


@pytest.mark.parametrize("broken", [UnorderedGraph, TrustingGraph, ForgetfulOfDeaths])
def test_a_graph_with_a_mistake_is_found_out(broken: type[TaskGraph]) -> None:
    with pytest.raises((RankwiseError, AssertionError)) as caught:
        run_seeds(300, broken)

    assert caught.value.__notes__[-1].startswith(f"replay it: python {WORLDS} --seed")


def test_equal_seeds_give_equal_journals_whatever_the_hash_seed_of_the_process() -> None:
    here = hashlib.sha256()
    for seed in range(60):
        here.update(run_seed(seed).journal.lines())

    there = subprocess.run(
        [sys.executable, "-c", DIGEST_PROGRAM, "60"],
        env={**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()

    assert there == here.hexdigest()


def test_a_replay_prints_the_journal_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay_main(["--seed", "17"]) == 0

    printed = capsys.readouterr().out
    assert run_seed(17).journal.lines().decode() in printed
    assert printed.endswith("every invariant held\n")
