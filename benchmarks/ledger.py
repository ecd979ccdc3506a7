"""What it costs to enter a collective call in the ledger.

    python benchmarks/ledger.py [--repetitions 3]

CPU time of the calling thread per all_reduce of 4 KiB in a world of one rank, where nothing else is
done: with the entry and without it, by turns in one process, the least of 15 turns of 2,000 calls.
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


def measured(library: str) -> tuple[float, float]:
    """Seconds of CPU per call, not entered and entered."""
    told = output_of_run("--standalone", "--no-prefix", PROGRAM, library, patience_s=PATIENCE)
    plain, entered = map(float, told.split())
    return plain, entered


def main() -> None:
    options = arguments(__doc__, repetitions=3)
    describe_machine()
    table = Table(
        "CPU time of an all_reduce of 4 KiB", ("library", "plain", "entered", "more"), options.json
    )
    for library in ("numpy", *(["torch"] if HAS_TORCH else [])):
        samples = [measured(library) for _ in range(options.repetitions)]
        plain, entered = (statistics.median(each) for each in zip(*samples, strict=True))
        cells = (f"{value * 1e6:.1f} us" for value in (plain, entered, entered - plain))
        table.row(library, *cells)


if __name__ == "__main__":
    main()
