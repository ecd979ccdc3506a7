"""Simulated ranks of unmodified programs against what else there is.

- **rate**: rank-collectives per second of an all_reduce of 4 floats; peers are torch's threaded
  test group, by itself and pinned to one core, and processes with gloo. The last row is one
  all_reduce of 4 KiB at 256 ranks.
- **command**: a whole command, 4 ranks of DDP on a small network; peers are torchrun with gloo and
  the same script as a world of one.
- **large**: a step of DDP on 7,000 parameters at 1,024 ranks, and its memory.
- **idle**: memory per rank that does nothing.
- **model**: CPU time that the model of a machine adds to an operation.

All figures are wall-clock time on this machine, with everything else that it does.
"""

import statistics
import subprocess
import sys
from collections.abc import Sequence

from measuring import (
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
)

RATES = {8: 2_000, 64: 300, 1_024: 10}
"""How often, by the number of ranks."""
LARGE, LARGE_IF_QUICK = 1_024, 32
GLOO_RANKS = 8


def figures_of(command: Sequence[str]) -> list[float]:
    """The numbers that a command prints on its last line."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment())
    return [float(word) for word in done.stdout.split("\n")[-2].rpartition(":")[2].split()]


def simulated(ranks: int, program: str, *words: object, on: str = "sim") -> list[str]:
    """The command that runs a program on simulated ranks."""
    return [
        *RANKWISE, "run", "--on", on, f"--nproc-per-node={ranks}", "--no-prefix",
        str(PROGRAMS / program), *map(str, words),
    ]  # fmt: skip


def rates(large: int, repetitions: int, table: Table) -> None:
    for ranks, count in RATES.items():
        if ranks > large:
            continue
        threaded = [sys.executable, str(PROGRAMS / "threaded_all_reduce_rate.py")]
        commands = {
            "ours": simulated(ranks, "all_reduce_rate.py", count, 4),
            "threaded": [*threaded, str(ranks), str(count)],
            "pinned": [*threaded, str(ranks), str(count), "pinned"],
        }
        if ranks == GLOO_RANKS:
            real = [*RANKWISE, "run", "--standalone", f"--nproc-per-node={ranks}", "--no-prefix"]
            commands["gloo"] = [*real, str(PROGRAMS / "all_reduce_rate.py"), str(count // 10), "4"]
        found: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(repetitions):
            for name, command in commands.items():
                found[name].append(figures_of(command)[0])
        middle = {name: statistics.median(values) for name, values in found.items()}
        table.row(
            f"{ranks:,}",
            f"{middle['ours']:,.0f}",
            f"{middle['threaded']:,.0f}",
            ratio(middle["ours"], middle["threaded"]),
            f"{middle['pinned']:,.0f}",
            ratio(middle["ours"], middle["pinned"]),
            f"{middle['gloo']:,.0f}" if "gloo" in middle else "-",
            ratio(middle["ours"], middle.get("gloo")),
        )


def whole_commands(repetitions: int, table: Table) -> None:
    script = str(PROGRAMS / "ddp_steps.py")
    commands = {
        "ours": simulated(4, "ddp_steps.py", 5),
        "torchrun": [*TORCHRUN, "--standalone", "--nproc-per-node=4", script, "5"],
        "alone": [sys.executable, script, "5", "alone"],
    }
    found: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repetitions):
        for name, command in commands.items():
            found[name].append(seconds_of(command))
    ours, torchrun, alone = (statistics.median(found[name]) for name in commands)
    table.row(
        seconds(ours), seconds(torchrun), ratio(ours, torchrun), seconds(alone), ratio(ours, alone)
    )


def main() -> None:
    parts = ("rate", "command", "large", "idle", "model")
    options = arguments(__doc__, repetitions=5, parts=parts)
    large = LARGE_IF_QUICK if options.quick else LARGE
    describe_machine()
    if "rate" in options.only:
        heading = [
            "ranks", "simulated", "threaded group", "/ threaded", "pinned", "/ pinned", "gloo",
            "/ gloo",
        ]  # fmt: skip
        rates(
            large, options.repetitions, Table("Rank-collectives per second", heading, options.json)
        )
        middle = min(256, large)
        _, took = figures_of(simulated(middle, "all_reduce_rate.py", 20, 1_024))
        sizes = Table("all_reduce of 4 KiB", ["ranks", "simulated"], options.json)
        sizes.row(str(middle), seconds(took))
    if "command" in options.only:
        heading = ["simulated", "torchrun", "/ torchrun", "a world of one", "/ one"]
        title = "A whole command: 4 ranks of DDP"
        whole_commands(options.repetitions, Table(title, heading, options.json))
    if "large" in options.only:
        step, kibibytes = figures_of(simulated(large, "ddp_steps.py", 3))
        steps = Table(f"DDP at {large:,} ranks", ["step", "memory"], options.json)
        steps.row(seconds(step), f"{kibibytes / 2**20:.2f} GiB")
    if "idle" in options.only:
        few, many = (figures_of(simulated(n, "idle_ranks.py"))[0] for n in (16, large))
        idle = Table("Memory per idle rank", ["simulated"], options.json)
        idle.row(f"{(many - few) / (large - 16) / 1_024:.3f} MiB")
    if "model" in options.only:
        heading = ["", "add_", "add", "product", "view", "forward and backward"]
        model = Table("CPU time of an operation, us", heading, options.json)
        plain, timed = (
            figures_of(simulated(1, "operations.py", on=on)) for on in ("sim", "sim:pod64")
        )
        added = [after - before for before, after in zip(plain, timed, strict=True)]
        for name, figures in (("without a machine", plain), ("on pod64", timed), ("added", added)):
            model.row(name, *(f"{figure:.1f}" for figure in figures))


if __name__ == "__main__":
    main()
