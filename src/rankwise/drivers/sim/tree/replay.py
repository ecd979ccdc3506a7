"""Replays the task graph of a seed: `python -m rankwise.drivers.sim.tree.replay --seed 440`.

Prints the plan's limits and the journal as JSON lines, and what was wrong, if anything was. Exit
code 0 if every invariant held, 1 if one was broken.
"""

import argparse
import sys
from collections.abc import Sequence

from rankwise.base.errors import SimulationError
from rankwise.drivers.sim.tree.plans import random_plan
from rankwise.drivers.sim.tree.world import TreeWorld


def command_for(seed: int) -> str:
    """The one command that shows again what a seed has shown."""
    return f"python -m rankwise.drivers.sim.tree.replay --seed {seed}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rankwise.drivers.sim.tree.replay",
        description="Replay the simulated task graph of a seed, with all its faults.",
    )
    parser.add_argument("--seed", type=int, required=True, help="the plan's seed")
    plan = random_plan(parser.parse_args(arguments).seed)
    world = TreeWorld(plan)
    try:
        world.run()
    except SimulationError as error:
        verdict = f"{type(error).__name__}: {error}"
    else:
        verdict = ""
    sys.stdout.write(f"{plan.spec}\n{plan.deaths}\n{world.journal.lines().decode()}")
    sys.stdout.write(f"{verdict or 'every invariant held'}\n")
    return 1 if verdict else 0


if __name__ == "__main__":
    sys.exit(main())
