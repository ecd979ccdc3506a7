"""How much the agent works to move its workers' output, and how late a line is.

    python benchmarks/logs.py [--repetitions 5] [--quick]

Four ranks write lines of 100 bytes which go to a file each and to the console, a pipe that this
program reads. Every line is checked: whole, once, with its prefix, in the file and on the console.
The agent's CPU is what the kernel accounted to its process alone.
"""

import os
import re
import statistics
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

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
    scratch_directory,
    seconds,
    take_turns,
)

RANKS = 4
WRITING = str(PROGRAMS / "writing.py")
LINE = re.compile(rb"(\[default\d\]:)?L(\d) (\d{7}) x+ E")
FLAGS = ("--standalone", "--nproc-per-node", str(RANKS), "--tee", "3", "--log-dir")


def tee(launcher: Sequence[str], count: int, found: dict[str, set[int]], name: str) -> float:
    """CPU seconds of the agent for COUNT lines per rank; notes how many whole lines arrived."""
    with scratch_directory() as directory:
        process = subprocess.Popen(
            [*launcher, *FLAGS, str(directory), WRITING, str(count)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None, "asked for above"
        output = process.stdout.read()
        # Children that the agent has waited for are accounted apart: workers are none of them.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{launcher[0]} ended with {process.returncode}")
        matches = (LINE.fullmatch(line) for line in output.split(b"\n"))
        whole = {match.group(2, 3) for match in matches if match is not None}
        in_files = sum(
            path.read_bytes().count(b" E\n") for path in Path(directory).rglob("stdout.log")
        )
        found.setdefault(name, set()).update({len(whole), in_files})
        return usage.ru_utime + usage.ru_stime


def agent_cpu_of_nothing(launcher: Sequence[str]) -> float:
    """CPU seconds of the agent for a run that writes nothing: its start, which is not pumping."""
    return tee(launcher, 0, {}, "")


def delays(launcher: Sequence[str], count: int) -> list[float]:
    """Seconds from the writing of single lines until they were read from the console."""
    with scratch_directory() as directory:
        process = subprocess.Popen(
            [*launcher, *FLAGS, str(directory), WRITING, "stamps", str(count)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None, "asked for above"
        late = []
        for line in process.stdout:
            stamp = re.search(rb"S\d \d+ (\d+)$", line.rstrip())
            if stamp is not None:
                late.append((time.monotonic_ns() - int(stamp[1])) / 1e9)
        process.wait()
        return late


def main() -> None:
    options = arguments(__doc__, repetitions=5)
    count = 20_000 if options.quick else 200_000
    describe_machine()
    launchers = {"rankwise": [*RANKWISE, "run"], **({"torchrun": TORCHRUN} if HAS_TORCH else {})}
    found: dict[str, set[int]] = {}
    cpu = take_turns(
        {name: partial(tee, command, count, found, name) for name, command in launchers.items()},
        options.repetitions,
    )
    idle = take_turns(
        {name: partial(agent_cpu_of_nothing, command) for name, command in launchers.items()},
        options.repetitions,
    )
    table = Table(
        f"{RANKS} ranks x {count:,} lines of 100 bytes, tee'd",
        ("launcher", "agent CPU", "less its start", "/ torchrun", "whole lines, least", "expected"),
        options.json,
    )
    net = {name: cpu[name] - idle[name] for name in launchers}
    for name in launchers:
        table.row(
            name,
            seconds(cpu[name]),
            seconds(net[name]),
            ratio(net[name], net.get("torchrun")),
            f"{min(found[name]):,}",
            f"{RANKS * count:,}",
        )
    table = Table(
        "Delay of a lone line", ("launcher", "median", "99 of 100", "worst"), options.json
    )
    for name, command in launchers.items():
        late = sorted(delays(command, 25 if options.quick else 100))
        table.row(
            name,
            seconds(statistics.median(late)),
            seconds(late[int(len(late) * 0.99)]),
            seconds(late[-1]),
        )


if __name__ == "__main__":
    main()
