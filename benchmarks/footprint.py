"""What the agent weighs and how long it takes to say how it is used.

python benchmarks/footprint.py [--repetitions 9] [--quick]
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from measuring import (
    HAS_TORCH,
    PROGRAMS,
    RANKWISE,
    TORCHRUN,
    Table,
    arguments,
    describe_machine,
    environment,
    ratio,
    seconds,
    seconds_of,
    take_turns,
)


def peak_megabytes(command: Sequence[str]) -> float:
    """Peak resident memory of the agent's own process, in MB."""
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}")
    return usage.ru_maxrss * 1024 / 1e6


def main() -> None:
    options = arguments(__doc__, repetitions=9)
    describe_machine()
    launchers = {"rankwise": [*RANKWISE, "run"], **({"torchrun": TORCHRUN} if HAS_TORCH else {})}
    helps = take_turns(
        {
            "rankwise": partial(seconds_of, [*RANKWISE, "--help"]),
            **({"torchrun": partial(seconds_of, [*TORCHRUN, "--help"])} if HAS_TORCH else {}),
            "python": partial(seconds_of, [sys.executable, "-c", "pass"]),
        },
        options.repetitions,
    )
    table = Table(
        "Agent",
        ("launcher", "--help", "/ torchrun", "peak memory, 4 ranks", "64 ranks"),
        options.json,
    )
    nothing = str(PROGRAMS / "nothing.py")
    for name, command in launchers.items():
        run = [*command, "--standalone", "--nproc-per-node"]
        table.row(
            name,
            seconds(helps[name]),
            ratio(helps[name], helps.get("torchrun")),
            f"{peak_megabytes([*run, '4', nothing]):.0f} MB",
            f"{peak_megabytes([*run, '64', nothing]):.0f} MB",
        )
    table.row("bare interpreter", seconds(helps["python"]), "-", "-", "-")


if __name__ == "__main__":
    main()
