"""What it costs to enter a collective call in the ledger.

    python benchmarks/ledger.py [--repetitions 3]

CPU time of the calling thread per all_reduce of 4 KiB in a world of one rank, where nothing else is
done: with the entry and without it, by turns in one process, the least of 150 turns of 200 calls.
And what part that is of a loop of two ranks, of which all CPU time of a rank's process counts.
CPU time suffers less from other work on the machine than wall time, and still suffers.
"""

import statistics

from measuring import (
    HAS_TORCH,
    PROGRAMS,
    Table,
    arguments,
    describe_machine,
    output_of_run,
)

PROGRAM = str(PROGRAMS / "entering.py")
PATIENCE = 300.0


def measured(library: str, ranks: int) -> tuple[float, float]:
    """Seconds of CPU per call, not entered and entered."""
    options = ("--standalone", "--no-prefix", f"--nproc-per-node={ranks}")
    told = output_of_run(*options, PROGRAM, library, patience_s=PATIENCE)
    plain, entered = map(float, told.split())
    return plain, entered


def main() -> None:
    options = arguments(__doc__, repetitions=3)
    describe_machine()
    table = Table(
        "CPU time of an all_reduce of 4 KiB",
        ("library", "plain", "entered", "more", "loop of two ranks", "of that loop"),
        options.json,
    )
    for library in ("numpy", *(["torch"] if HAS_TORCH else [])):
        samples = [measured(library, 1) for _ in range(options.repetitions)]
        plain, entered = (statistics.median(each) for each in zip(*samples, strict=True))
        loop = statistics.median(measured(library, 2)[0] for _ in range(options.repetitions))
        cells = (f"{value * 1e6:.1f} us" for value in (plain, entered, entered - plain, loop))
        table.row(library, *cells, f"{100 * (entered - plain) / loop:.1f} %")


if __name__ == "__main__":
    main()
