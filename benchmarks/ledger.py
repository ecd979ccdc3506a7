"""What it costs to enter a collective call in the ledger.

    python benchmarks/ledger.py [--repetitions 3] [--quick]

First the entry alone: CPU time of the calling thread per all_reduce of 4 KiB in a world of one
rank, where nothing else is done: with the entry and without it, by turns in one process, the least
of 150 turns of 200 calls. Then loops of 2 and 4 ranks, of which all CPU time of rank 0's process
counts: whole runs with the ledger and with --no-ledger in turns, CPU (least of 60 turns) and wall
time (median of them); and, since runs differ by more than an entry, calls with and without the
entry by turns within the runs that have the ledger.
CPU time suffers less from other work on the machine than wall time, and still suffers.
"""

import statistics
from typing import NamedTuple

from measuring import (
    HAS_TORCH,
    PROGRAMS,
    Table,
    arguments,
    describe_machine,
    output_of_run,
)

PROGRAM = str(PROGRAMS / "entering.py")
PATIENCE = 600.0
TURNS_ALONE, TURNS_OF_LOOP, TURNS_IF_QUICK = 150, 60, 10


class Measured(NamedTuple):
    """Seconds per call, not entered and entered."""

    plain_cpu: float
    plain_wall: float
    cpu: float
    wall: float


def measured(library: str, ranks: int, turns: int, *options: str) -> Measured:
    words = ("--standalone", "--no-prefix", f"--nproc-per-node={ranks}", *options)
    told = output_of_run(*words, PROGRAM, library, str(turns), patience_s=PATIENCE)
    return Measured(*map(float, told.split()))


def middle(samples: list[Measured]) -> Measured:
    return Measured(*(statistics.median(each) for each in zip(*samples, strict=True)))


def micro(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def main() -> None:
    options = arguments(__doc__, repetitions=3)
    turns_alone, turns = TURNS_ALONE, TURNS_OF_LOOP
    if options.quick:
        turns_alone = turns = TURNS_IF_QUICK
    describe_machine()
    libraries = ("numpy", *(["torch"] if HAS_TORCH else []))
    alone = Table(
        "CPU time of an all_reduce of 4 KiB on one rank",
        ("library", "plain", "entered", "more"),
        options.json,
    )
    for library in libraries:
        took = middle([measured(library, 1, turns_alone) for _ in range(options.repetitions)])
        cells = (took.plain_cpu, took.cpu, took.cpu - took.plain_cpu)
        alone.row(library, *map(micro, cells))
    loops = Table(
        "A loop of all_reduces of 4 KiB: CPU and wall time per call",
        (
            *("loop", "CPU, --no-ledger", "CPU, with it", "CPU, by turns"),
            *("wall, --no-ledger", "wall, with it", "wall, by turns"),
        ),
        options.json,
    )
    for library in libraries:
        for ranks in (2,) if options.quick else (2, 4):
            pairs = [
                (
                    measured(library, ranks, turns),
                    measured(library, ranks, turns, "--no-ledger"),
                )
                for _ in range(options.repetitions)
            ]
            took, without = (middle(list(each)) for each in zip(*pairs, strict=True))
            loops.row(
                f"{library}, {ranks} ranks",
                micro(without.cpu),
                micro(took.cpu),
                f"{100 * (took.cpu / took.plain_cpu - 1):+.1f} %",
                micro(without.wall),
                micro(took.wall),
                f"{100 * (took.wall / took.plain_wall - 1):+.1f} %",
            )


if __name__ == "__main__":
    main()
