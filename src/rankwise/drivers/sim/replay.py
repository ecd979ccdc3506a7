"""Replays the random plan of a seed: `python -m rankwise.drivers.sim.replay --seed 7311`.

Prints the plan, the story of the run, and what was wrong with it, if anything was. Exit code 0 if
every invariant held, 1 if one was broken.
"""

import argparse
import sys
from collections.abc import Sequence

import msgspec

from rankwise.base.errors import SimulationError
from rankwise.base.failure import Outcome
from rankwise.drivers.sim.cluster.faults import ClusterPlan
from rankwise.drivers.sim.plans import random_plan
from rankwise.drivers.sim.story import story
from rankwise.drivers.sim.world import SimulatedWorld


def command_for(seed: int) -> str:
    """The one command that shows again what a seed has shown."""
    return f"python -m rankwise.drivers.sim.replay --seed {seed}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rankwise.drivers.sim.replay",
        description="Replay the simulated gang of a seed, with all its faults.",
    )
    parser.add_argument("--seed", type=int, required=True, help="the plan's seed")
    parser.add_argument(
        "--journal", action="store_true", help="print the journal as JSON lines, and nothing else"
    )
    options = parser.parse_args(arguments)
    return _replay(options.seed, journal_only=options.journal)


def _replay(seed: int, *, journal_only: bool) -> int:
    plan, world = random_plan(seed), SimulatedWorld(seed)
    verdict: Outcome | SimulationError
    try:
        verdict = world.run_plan(plan).outcome
    except SimulationError as error:
        verdict = error
    journal = world.journal.lines()
    if journal_only:
        sys.stdout.write(journal.decode())
    else:
        sys.stdout.write(f"{_describe(seed, plan)}\n{story(journal)}\n")
        if isinstance(verdict, Outcome):
            sys.stdout.write(f"every invariant held; the run {verdict.status}\n")
    if isinstance(verdict, SimulationError):
        sys.stderr.write(f"{type(verdict).__name__}: {verdict}\n")
        return 1
    return 0


def _describe(seed: int, plan: ClusterPlan) -> str:
    """The plan, with of each program only what is unusual."""
    lines = [f"seed {seed}", f"spec {_json(plan.gang_spec)}"]
    lines += [f"policy {_json(plan.rendezvous.policy)}", f"guardian {_json(plan.guardian)}"]
    lines += [f"happening {_json(happening)}" for happening in plan.happenings]
    for attempt, life in enumerate(plan.workers.lives):
        for local_rank, program in enumerate(life):
            lines.append(f"attempt {attempt} worker {local_rank}: {_json(program)}")
    return "\n".join(lines) + "\n"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


if __name__ == "__main__":
    sys.exit(main())
